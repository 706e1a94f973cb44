"""A benchmark row shows a number only after its check; a wrong one turns the run red."""

from __future__ import annotations

import pytest

from nbkit import bench
from nbkit.bench import Measured, Row
from nbkit.errors import InputError, MissingResourceError


def row(name="r", measure=lambda: 2.0, check=lambda: None, **options) -> Row:
    return Row(name, unit="ms", baseline="one step", measure=measure, check=check, **options)


def fails():
    raise AssertionError("masks differ at position 3")


def unavailable():
    raise MissingResourceError("kvpress", hint="install it in an environment of its own")


def test_number_only_after_a_passed_check():
    measured = []
    outcomes = bench.run([
        row("good", measure=lambda: Measured(3.0, baseline=2.0, n=5, low=2.5, high=3.5)),
        row("bad", measure=lambda: measured.append(1) or 1.0, check=fails),
        row("false", check=lambda: False),
        row("absent", measure=unavailable),
    ])
    assert [outcome.state for outcome in outcomes] == ["measured", "wrong", "wrong", "skipped"]
    # The measurement of a wrong row is not even started.
    assert measured == []
    text = bench.table(outcomes)
    assert "3 ms (2.5 to 3.5)" in text and "1.50x" in text and "2 ms: one step" in text
    assert "masks differ at position 3" in text and "kvpress" in text
    assert "bad" in text and "1 ms" not in text


def test_goal_that_is_missed_is_marked():
    lines = bench.table(bench.run([row("slow", goal=1.0), row("quick", goal=5.0)])).splitlines()
    assert lines[1].startswith("!") and lines[2].startswith("✓") and "<= 5 ms" in lines[2]


def test_wrong_row_makes_the_command_fail(monkeypatch, capsys):
    from nbkit.__main__ import main

    monkeypatch.setattr(bench, "rows", lambda: [row("good"), row("bad", check=fails)])
    assert main(["bench"]) == 1
    assert main(["bench", "good"]) == 0
    assert main(["bench", "nothing"]) == 1
    assert "good, bad" in capsys.readouterr().err


def test_compare_calls_both_in_turn():
    calls = []
    measured = bench.compare(lambda: calls.append("a"), lambda: calls.append("b"), repeat=3, warmup=1)
    assert calls == ["a", "b"] * 4
    assert measured.n == 3 and measured.low <= measured.value <= measured.high


def test_seconds_refuses_no_repetition():
    with pytest.raises(InputError, match="repeat"):
        bench.seconds(lambda: None, repeat=0)


def test_rows_have_distinct_names():
    names = [one.name for one in bench.rows()]
    assert len(names) == len(set(names)) and "import nbkit" in names
