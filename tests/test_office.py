"""OfficeOps: the jobs, their declared and measured dependencies, undo rules, the two back ends, the checker, the sandbox."""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import pickle
import random
import re
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from nbkit.envs import Sandbox, run_program
from nbkit.envs.office import DIMENSIONS, Call, OfficeOps, intervene, plan
from nbkit.envs.office.answer import expected
from nbkit.envs.office.desk import LASTING, TOOLS
from nbkit.envs.office.jobs import JOBS, MARKS, ROUNDING, UNITS
from nbkit.envs.office.plans import dependent_rows
from nbkit.errors import InputError, MissingResourceError, RunError

SUITE = OfficeOps()
FREE = OfficeOps(irreversible=0)
FIRM = OfficeOps(irreversible=0.5)


def by_id(suite: OfficeOps, name: str):
    return next(variant for variant in suite.variants if variant.id == name)


def wrong_word(variant, turn: int = 0) -> str:
    others = [word for word in variant.options if word != variant.answer]
    return others[turn % len(others)]


def play(episode, steps) -> list[bool]:
    return [episode.step(step.call).ok for step in steps]


def corrected(variant, wrong: str, at: int) -> list:
    """The steps of one who works with a wrong word, is put right after `at` actions, redoes what depends and goes on."""
    right = plan(variant)
    return [*plan(variant, wrong)[:at], *(step for step in right[:at] if step.depends), *right[at:]]


# The jobs.


def test_84_variants_of_21_jobs_and_4_dimensions():
    assert len(JOBS) == 21 and len({job.name for job in JOBS}) == 21
    assert Counter(variant.dimension for variant in SUITE.variants) == dict.fromkeys(DIMENSIONS, 21)
    assert len({variant.id for variant in SUITE.variants}) == 84
    assert Counter(job.goal.kind for job in JOBS) == {"scope": 10, "group": 5, "measure": 6}
    assert Counter(job.constraint.kind for job in JOBS) == {"round": 6, "exclude": 5, "approve": 5, "protect": 5}
    assert Counter(job.context.kind for job in JOBS) == {"mark": 9, "unit": 12}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_words_are_short_and_apart(job):
    for name in DIMENSIONS:
        slot = getattr(job, name)
        assert len(set(slot.words)) == 8 and all(re.fullmatch("[a-z]{2,12}", word) for word in slot.words)
        assert slot.sentence.count("{}") == 1
    assert job.context.kind == "mark" or set(job.context.words) <= set(UNITS)
    assert job.context.kind == "unit" or set(job.context.words) == set(MARKS)
    assert job.constraint.kind != "round" or set(job.constraint.words) == set(ROUNDING)
    # A rule about one key has to mean something whatever the goal is.
    assert job.constraint.kind != "exclude" or (job.goal.kind != "group" and set(job.constraint.words) <= set(job.keys))
    assert sorted(job.clean) == ["convert", "dedupe", "drop", "tidy"]
    # What is hidden stands nowhere else: not among the words of another slot, not in what is always said.
    words = [word for name in DIMENSIONS for word in getattr(job, name).words]
    said = " ".join([job.opening, *(getattr(job, name).sentence for name in DIMENSIONS), job.fixed, job.keep])
    said += f" {job.rounding}" if job.constraint.kind in ("approve", "protect") else ""
    assert len(set(words)) == 32 and not set(words) & set(re.findall("[a-z]+", said.lower()))
    # Units and rates of one job differ in size, so a wrong one always shows.
    if job.context.kind == "unit":
        assert len({UNITS[word] for word in job.context.words}) == 8


@pytest.mark.parametrize("variant", SUITE.variants, ids=lambda variant: variant.id)
def test_request_lacks_exactly_the_segment(variant):
    assert variant.segment in variant.full and variant.segment not in variant.masked
    assert " ".join(variant.full.replace(variant.segment, "", 1).split()) == variant.masked
    assert re.search(rf"\b{variant.answer}\b", variant.segment)
    assert all(fact in variant.masked for fact in variant.facts) and len(variant.facts) == 3
    assert variant.options[variant.truth] == variant.answer == variant.slots[variant.slot] and len(variant.options) == variant.k


def test_plans_are_20_to_40_actions_whatever_the_word():
    lengths = set()
    for variant in OfficeOps(options=8).variants:
        sizes = {len(plan(variant, word)) for word in variant.options}
        assert len(sizes) == 1
        lengths |= sizes
    assert min(lengths) >= 20 and max(lengths) <= 40 and len(lengths) >= 10


def test_more_options_keep_the_truth_and_the_other_options():
    suites = [OfficeOps(options=k).variants for k in range(1, 9)]
    for ladder in zip(*suites):
        assert len({variant.answer for variant in ladder}) == 1
        for small, large in zip(ladder, ladder[1:]):
            assert set(small.options) < set(large.options)
    assert {variant.k for variant in SUITE.variants if variant.dimension in ("goal", "input")} == {6}
    assert {variant.k for variant in SUITE.variants if variant.dimension in ("constraint", "context")} == {4}
    assert {variant.k for variant in OfficeOps(options={"goal": 3}).variants if variant.dimension == "goal"} == {3}


def test_seed_draws_other_truths():
    assert [variant.answer for variant in OfficeOps(seed=1).variants] != [variant.answer for variant in SUITE.variants]
    assert OfficeOps(seed=1).variants == OfficeOps(seed=1).variants


# The oracle and the checker.


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plan_with_the_right_word_passes_and_no_other(seed):
    for variant in SUITE.variants:
        for word in variant.options:
            with SUITE.make(variant, seed=seed) as episode:
                assert all(play(episode, plan(variant, word))), (variant.id, word)
                assert episode.check().passed == (word == variant.answer), (variant.id, word)
                assert bool(episode.check().reasons) == (word != variant.answer)


def test_report_by_hand():
    # The first job's report, from the files alone, in a few lines that share nothing with the package.
    variant = by_id(SUITE, "sales-goal")
    with SUITE.make(variant, seed=3, backend="disk") as episode:
        root, sums, seen = episode.folder, Counter(), set()
        for name in ("jan", "feb"):
            for row in csv.DictReader(io.StringIO((root / f"incoming/{name}.csv").read_text())):
                if row["branch"] == variant.answer and row["mark"] != variant.slots["context"] and row["id"] not in seen:
                    seen.add(row["id"])
                    sums[row["product"].strip().lower()] += 6 * int(row["amount"])
        unit = ROUNDING[variant.slots["constraint"]]
        order = sorted(sums, key=lambda key: (-sums[key], key))
        lines = [f"{place},{key},{int(sums[key] / unit + 0.5) * unit}" for place, key in enumerate(order, 1)]
        play(episode, plan(variant))
        assert (root / f"reports/{variant.answer}_report.csv").read_text().splitlines()[1:] == lines


def test_seeds_draw_data_and_repeat():
    variant = SUITE.variants[0]
    traces = []
    for seed in (0, 0, 1):
        with SUITE.make(variant, seed=seed) as episode:
            play(episode, plan(variant))
            traces.append([text for _, text in episode.trace])
    assert traces[0] == traces[1] != traces[2]


def spoil_report(folder, variant):
    path = folder / f"reports/{variant.slots['goal']}_report.csv"
    path.write_bytes(path.read_bytes()[:-1])


def spoil_rows(folder, variant):
    with sqlite3.connect(folder / ".office/office.db") as data:
        data.execute(f"DELETE FROM {variant.slots['goal']}_with_labels WHERE rowid = 1")


def spoil_mail(folder, variant):
    with (folder / ".office/outbox.jsonl").open("a") as outbox:
        outbox.write(json.dumps({"tool": "send", "to": "all", "text": ""}) + "\n")


def spoil_old(folder, variant):
    (folder / "old/spare").mkdir()


def spoil_commit(folder, variant):
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", f"--git-dir={folder}/.office/git", f"--work-tree={folder}/reports",
                    "commit", "-q", "--allow-empty", "-m", "more"], check=True)


@pytest.mark.parametrize(("spoil", "reason"), [
    (spoil_report, "not what was asked for"), (spoil_rows, "table .*_with_labels"), (spoil_mail, "outbox holds 2"), (spoil_old, "wrong papers"),
    (spoil_commit, "one commit"),
], ids=lambda value: getattr(value, "__name__", None))
def test_checker_reads_what_is_really_there(spoil, reason):
    variant = by_id(FREE, "inventory-goal")
    with FREE.make(variant, backend="disk") as episode:
        play(episode, plan(variant))
        assert episode.check() == (True, ())
        spoil(episode.folder, variant)
        check = episode.check()
        assert not check.passed and len(check.reasons) == 1 and re.search(reason, check.reasons[0])


def test_checker_fails_an_office_where_nothing_was_done():
    with SUITE.make(SUITE.variants[0]) as episode:
        assert not episode.check().passed


# Dependencies.


@pytest.mark.parametrize("seed", [0, 1])
def test_declared_dependencies_are_the_measured_ones(seed):
    for variant in OfficeOps(options=8).variants:
        declared = [step.depends for step in plan(variant)]
        for word in variant.options:
            if word != variant.answer:
                assert intervene(variant, word, seed=seed) == declared, (variant.id, word)


def test_each_dimension_reaches_its_own_part_of_the_job():
    for variant in SUITE.variants:
        steps = plan(variant)
        kinds = {step.kind for step in steps if step.depends}
        if variant.dimension == "goal":
            # Every action after inspection.
            assert [step.depends for step in steps] == [step.kind != "inspect" for step in steps]
        elif variant.dimension == "input":
            assert kinds == {"load"}
        elif variant.dimension == "constraint":
            assert kinds <= {"output", "close"} and {"commit", "send"} <= {step.call.name for step in steps if step.depends}
        else:
            first = next(step for step in steps if step.depends)
            assert first.call.name == ("drop" if JOBS[variant.template].context.kind == "mark" else "convert")
            assert {"clean", "derive", "output"} <= kinds
        # The word itself stands in the first dependent call.
        assert next(step for step in steps if step.depends).fields
        assert all(step.depends for step in steps if step.fields)


def test_doing_what_does_not_depend_first_is_a_good_order():
    for variant in SUITE.variants:
        steps = plan(variant)
        with SUITE.make(variant) as episode:
            assert all(play(episode, [*(step for step in steps if not step.depends), *(step for step in steps if step.depends)]))
            assert episode.check().passed


def test_curves_follow_dependencies_and_not_labels():
    swap = {"goal": "constraint", "constraint": "goal", "input": "context", "context": "input"}

    def curves(suite):
        """Passes per label and timing of a worker with a wrong word and a fifth of the plan's length to spare."""
        passed = defaultdict(int)
        for variant in suite.variants:
            steps = len(plan(variant))
            for share in (0.1, 0.3, 0.5, 0.7, 0.9):
                with suite.make(variant, budget=int(1.2 * steps)) as episode:
                    for step in corrected(variant, wrong_word(variant), round(share * steps)):
                        if not episode.done:
                            episode.step(step.call)
                    passed[variant.dimension, share] += episode.check().passed
        return passed

    plain, swapped = curves(OfficeOps(options=6)), curves(OfficeOps(options=6, relabel=swap))
    assert all(swapped[label, share] == plain[swap[label], share] for label, share in plain)
    assert plain["goal", 0.5] < plain["constraint", 0.5] and swapped["goal", 0.5] > swapped["constraint", 0.5]
    assert all(variant.slot == swap[variant.dimension] for variant in OfficeOps(relabel=swap).variants)


def test_dependency_is_declared_from_the_flow_of_data():
    for template, job in enumerate(JOBS):
        rows = dependent_rows(template, "input")
        assert sum(rows) == len(job.lists) * (3 if job.scan else 2) + job.tally + ("join" in job.peeks)


# What can be undone.


@pytest.mark.parametrize("suite", [FREE, SUITE, FIRM, OfficeOps(irreversible=1)], ids=["0", "0.2", "0.5", "1"])
def test_redoing_what_depends_puts_right_all_but_what_is_final(suite):
    for number, variant in enumerate(suite.variants):
        length = len(plan(variant))
        for at in sorted({1, length // 4, length // 2, 3 * length // 4, length - 2, length}):
            wrong = wrong_word(variant, number + at)
            done = plan(variant, wrong)[:at]
            final = any(step.depends and not step.undoable for step in done)
            with suite.make(variant, seed=4) as episode:
                play(episode, corrected(variant, wrong, at))
                assert episode.check().passed == (not final), (variant.id, wrong, at)


def test_starting_over_works_when_nothing_is_final():
    for variant in FREE.variants:
        for at in (3, len(plan(variant)) // 2, len(plan(variant))):
            with FREE.make(variant) as episode:
                assert all(play(episode, [*plan(variant, wrong_word(variant))[:at], *plan(variant)]))
                assert episode.check().passed


def test_share_of_final_doings_is_nested_and_as_asked():
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 1.0)):
        for few, many in zip(OfficeOps(irreversible=low).variants, OfficeOps(irreversible=high).variants):
            assert few.lasting <= many.lasting and few.slots == many.slots
    assert all(not variant.lasting for variant in FREE.variants)
    assert all(variant.lasting == set(LASTING) for variant in OfficeOps(irreversible=1).variants)
    # 105 independent draws per share: four standard errors around it.
    count = sum(len(variant.lasting) for variant in FIRM.variants[::4])
    assert abs(count - 52.5) < 4 * (105 * 0.25) ** 0.5


@pytest.mark.parametrize("backend", ["memory", "disk"])
def test_final_means_final(backend):
    firm, variant = OfficeOps(irreversible=1), by_id(OfficeOps(irreversible=1), "energy-goal")
    steps = {step.call.name: step for step in plan(variant)}
    with firm.make(variant, backend=backend) as episode:
        play(episode, plan(variant))
        for name, answer in (("commit", "one commit"), ("purge", "empty already"), ("join", "is posted")):
            observation = episode.step(steps[name].call)
            assert not observation.ok and answer in observation.text
        assert episode.check().passed
        assert episode.step(steps["send"].call).ok
        assert episode.check().reasons == ("the outbox holds 2 mails and not the right 1",)
        assert "2 gone, 0 held" in episode.step(Call("outbox")).text
    with FREE.make(by_id(FREE, "energy-goal"), backend=backend) as episode:
        play(episode, plan(by_id(FREE, "energy-goal")))
        for name in ("commit", "purge", "join", "send"):
            assert episode.step(steps[name].call).ok
        assert episode.check().passed and "0 gone, 1 held" in episode.step(Call("outbox")).text


# Late messages and budgets.


def test_a_late_message_costs_verify_actions():
    suite = OfficeOps(reverify=3)
    variant = suite.variants[0]
    first = plan(variant)[0].call
    with suite.make(variant) as episode:
        episode.tell(variant.segment)
        assert episode.pending == 0 and episode.step(first).ok
        episode.tell(variant.segment)
        assert episode.pending == 3 and episode.messages == [(0, variant.segment), (1, variant.segment)]
        refused = episode.step(first)
        assert not refused.ok and "verify first (3 to go)" in refused.text and episode.actions == 2
        assert [episode.step(Call("verify")).text for _ in range(4)] == [f"verified, {n} to go" for n in (2, 1, 0)] + ["nothing to verify"]
        assert episode.step(first).ok
    free = OfficeOps(reverify=0)
    with free.make(free.variants[0]) as episode:
        episode.step(first)
        episode.tell("x")
        assert episode.pending == 0


def test_budget_bounds_an_episode():
    variant = SUITE.variants[0]
    steps = plan(variant)
    with SUITE.make(variant, budget=2) as episode:
        assert episode.observe().left == 2
        assert [episode.step(step.call).left for step in steps[:2]] == [1, 0]
        assert episode.done
        with pytest.raises(RunError, match="budget of 2 actions"):
            episode.step(steps[2].call)
        assert episode.actions == 2
        assert episode.reset().left == 2 and episode.actions == 0
    with SUITE.make(variant) as episode:
        assert episode.observe().left is None and not episode.done


# The two back ends.


@pytest.mark.parametrize("suite", [SUITE, FIRM], ids=["0.2", "0.5"])
def test_disk_and_memory_leave_the_same_trace(suite):
    # All of the suite as it comes; of the one with more that is final every third.
    for number, variant in enumerate(suite.variants if suite is SUITE else suite.variants[::3]):
        at = random.Random(f"{variant.id}").randrange(1, len(plan(variant)) + 1)
        steps = corrected(variant, wrong_word(variant, number), at)
        with suite.make(variant, seed=number) as memory, suite.make(variant, seed=number, backend="disk") as disk:
            for episode in (memory, disk):
                for done, step in enumerate(steps):
                    if done == at:
                        episode.tell(variant.segment)
                        episode.step(step.call)
                        episode.step(Call("verify"))
                    episode.step(step.call)
            assert memory.trace == disk.trace, variant.id
            assert memory.check() == disk.check() and memory.pending == disk.pending


def nonsense(rng: random.Random, variant) -> Call:
    """A call with arguments of the right and of the wrong kind, mostly close enough to do something."""
    goal, job = variant.slots["goal"], JOBS[variant.template]
    calls = [step.call for step in plan(variant, rng.choice(variant.options))]
    name = rng.choice([*TOOLS, "shell"])
    needed, allowed = TOOLS.get(name, (frozenset({"text"}), frozenset()))
    tables = [call.args["into"] for call in calls if "into" in call.args] + ["x1", "missing", "Bad", "sqlite_master", "_posted"]
    pools = {
        "path": [f"incoming/{job.files[0]}.csv", f"lists/{job.input.words[0]}_{job.lists[0]}.csv", "reports/x.csv", f"reports/{goal}_report.csv",
                 "../x", "/etc/passwd", ".office/office.db", "reports", "old/maps/papers.txt", "notes/rules.txt"],
        "folder": ["old", "incoming", "reports", "held", "..", ".office"], "by": ["key", "mark", "amount", "id", "anna", "code"],
        "keep": [*job.constraint.words[:3], "maps", "receipts", "..", "nothing"], "note": ["reports/n.txt", "notes/n.txt", "../n"],
        "files": [f"{goal}_report.csv", "readme.txt", f"{goal}_report.csv n.txt", "x.csv x.csv", "-f", "../x", "n.txt readme.txt"],
        "file": [f"reports/{goal}_report.csv", "reports/readme.txt", "reports/none.csv"], "unit": ["packs", "kegs", "miles"],
        "to": ["tens", "hundreds", "anna", "-x"], "mark": ["void", "ok"], "key": ["key", goal, job.column, "tea", "amount"],
        "value": ["amount", goal, "id", "mark"], "only": [f"{job.scope or 'mark'}={goal}", "mark=ok", "none=1"], "text": ["hello", "a\nb", ""],
        "message": ["done", "--amend", "later "],
    }
    args = {key: rng.choice(pools.get(key, tables)) for key in [*needed, *(key for key in allowed if rng.random() < 0.5)]}
    if rng.random() < 0.03:
        args["extra"] = "x"
    if args and rng.random() < 0.03:
        args[rng.choice(sorted(args))] = 3
    return Call(name, args)


@pytest.mark.parametrize("seed", range(10))
def test_disk_and_memory_agree_on_nonsense(seed):
    suite = OfficeOps(irreversible=(0, 0.3, 1)[seed % 3])
    variant = suite.variants[(seed * 37) % 84]
    rng = random.Random(f"nonsense/{seed}")
    steps = [step.call for step in plan(variant)]
    with suite.make(variant, seed=seed) as memory, suite.make(variant, seed=seed, backend="disk") as disk:
        done = Counter()
        for number in range(250):
            # Among the nonsense the job goes on, so that there is something to spoil.
            call = steps[number // 5 % len(steps)] if number % 5 == 0 else nonsense(rng, variant)
            one, other = memory.step(call), disk.step(call)
            assert one == other, (number, str(call))
            done[one.ok] += 1
        assert memory.check() == disk.check()
        assert done[True] > 30 and done[False] > 30
        assert sorted(os.listdir(disk.folder)) == [".office", "incoming", "lists", "notes", "old", "reports"]


@pytest.mark.parametrize("backend", ["memory", "disk"])
def test_numbers_stay_exact_and_tables_small(backend):
    variant = by_id(SUITE, "sales-goal")
    with SUITE.make(variant, backend=backend) as episode:
        play(episode, plan(variant)[:6])
        table, answers = f"{variant.answer}_jan", []
        for turn in range(6):
            answers.append(episode.step(Call("convert", {"table": table, "into": f"x{turn}", "unit": "kegs"})))
            table = f"x{turn}" if answers[-1].ok else table
        assert [answer.ok for answer in answers] == [True, *[False] * 5] and "numbers too large" in answers[1].text
        table = f"{variant.answer}_jan"
        rows = [episode.step(Call("stack", {"left": table, "right": table, "into": table})) for _ in range(9)]
        assert not rows[-1].ok and "too many rows" in rows[-1].text


def test_results_that_were_kept_change_nothing(monkeypatch):
    from nbkit.envs.office import memory, world

    variant = by_id(SUITE, "ledger-input")
    traces = []
    for kept in (3000, 2):
        world.world.cache_clear()
        monkeypatch.setattr(memory, "_KEPT", kept)
        for _ in range(2):
            with SUITE.make(variant) as episode:
                play(episode, corrected(variant, wrong_word(variant), 20))
                traces.append(episode.trace)
    assert traces[0] == traces[1] == traces[2] == traces[3]


def test_disk_holds_real_files_rows_commits_and_mail():
    variant = by_id(FIRM, "hotel-constraint")
    goal, hashes = variant.slots["goal"], []
    for _ in range(2):
        with FIRM.make(variant, backend="disk") as episode:
            play(episode, plan(variant))
            git = ["git", f"--git-dir={episode.folder}/.office/git", "log", "--format=%H|%an|%ae|%aI|%s"]
            hashes.append(subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines())
            with sqlite3.connect(episode.folder / ".office/office.db") as data:
                found = sorted(data.execute(f"SELECT * FROM {goal}_with_cleaners"))
            data.close()
            wanted = expected(variant.template, 0, tuple(variant.slots.items()), variant.lasting)
            assert found == wanted.tables[f"{goal}_with_cleaners"][1] and len(found) > 20
            mails = (episode.folder / ".office/outbox.jsonl").read_text().splitlines() + [
                path.read_text() for path in (episode.folder / ".office/held").iterdir()]
            assert sorted(mails) == wanted.mails
    # Fixed author and dates: the same work makes the same commits.
    assert hashes[0] == hashes[1] and len(hashes[0]) == 2
    assert hashes[0][0].split("|")[1:] == ["Office", "office@example.org", "2024-01-02T03:04:05+00:00", f"{goal} report"]


# The sandbox.


@pytest.mark.parametrize("name", ["../x.csv", "/etc/passwd", "reports/../../x", "..", "reports//x.csv", "reports/.git", ".office/office.db",
                                  "c:\\x", "reports\\x.csv", "reports/x.csv\n", "", "Reports/x.csv", "-x", "reports/" + "x" * 200])
@pytest.mark.parametrize("backend", ["memory", "disk"])
def test_names_that_leave_the_folder_are_refused(name, backend, tmp_path):
    (tmp_path / "x.csv").write_text("outside")
    with SUITE.make(SUITE.variants[0], backend=backend, root=tmp_path) as episode:
        play(episode, plan(SUITE.variants[0])[:6])
        table = next(call.args["into"] for call, _ in episode.trace if "into" in call.args)
        for call in (
            Call("read", {"path": name}), Call("list", {"folder": name}), Call("write", {"table": table, "path": name}),
            Call("commit", {"files": name, "message": "x"}), Call("send", {"to": "x", "file": name}), Call("sign", {"path": name, "by": "x"}),
            Call("purge", {"folder": name, "keep": "maps", "note": "reports/n.txt"}), Call("lookup", {"path": name, "into": "x"}),
            Call("purge", {"folder": "old", "keep": name, "note": "reports/n.txt"}),
            Call("load", {"path": name, "into": "x", "key": "id", "value": "id"}),
        ):
            observation = episode.step(call)
            assert not observation.ok and observation.text.startswith("refused: "), call
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.csv", "outside")]


@pytest.mark.parametrize("name", ["a b", "x;drop", 'x"', "sqlite_master", "_posted", "X", "1x", "x" * 61])
def test_table_names_are_plain(name):
    with SUITE.make(SUITE.variants[0]) as episode:
        assert "bad into" in episode.step(Call("lookup", {"path": "lists/audit_owners.csv", "into": name})).text


def test_links_are_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.csv").write_text("code,owner\nc1,me\n")
    (outside / "papers.txt").write_text("mine")
    variant = by_id(FREE, "payroll-goal")
    with FREE.make(variant, backend="disk", root=tmp_path) as episode:
        for place in ("reports/link.csv", "lists/link.csv"):
            (episode.folder / place).symlink_to(outside / "secret.csv")
        (episode.folder / "old/link").symlink_to(outside)
        (episode.folder / "incoming/link").symlink_to(outside)
        play(episode, plan(variant)[:7])
        table = next(call.args["into"] for call, _ in episode.trace if "into" in call.args)
        for call in (
            Call("read", {"path": "reports/link.csv"}), Call("write", {"table": table, "path": "reports/link.csv"}),
            Call("list", {"folder": "old/link"}), Call("sign", {"path": "reports/link.csv", "by": "x"}),
            Call("lookup", {"path": "lists/link.csv", "into": "x"}),
            Call("read", {"path": "incoming/link/papers.txt"}), Call("commit", {"files": "link.csv", "message": "x"}),
            Call("purge", {"folder": "old", "keep": "link", "note": "reports/n.txt"}),
        ):
            assert not episode.step(call).ok, call
        assert episode.step(Call("purge", {"folder": "old", "keep": "maps", "note": "reports/n.txt"})).ok
    assert sorted(path.name for path in outside.iterdir()) == ["papers.txt", "secret.csv"]
    assert (outside / "secret.csv").read_text() == "code,owner\nc1,me\n" and list(tmp_path.iterdir()) == [outside]


def test_user_settings_and_hooks_of_git_play_no_part(tmp_path, monkeypatch):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-commit").write_text("#!/bin/sh\ntouch ran\nexit 1\n")
    (hooks / "pre-commit").chmod(0o755)
    settings = tmp_path / "gitconfig"
    settings.write_text(f"[core]\n\thooksPath = {hooks}\n\tautocrlf = true\n[commit]\n\tgpgsign = true\n[user]\n\tname = Somebody\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    monkeypatch.setenv("HOME", str(tmp_path))
    variant = SUITE.variants[2]
    with SUITE.make(variant, backend="disk", root=tmp_path) as episode:
        assert all(play(episode, plan(variant))) and episode.check().passed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gitconfig", "hooks"] and [path.name for path in hooks.iterdir()] == ["pre-commit"]


def test_folder_goes_away_whatever_happens(tmp_path, monkeypatch):
    variant = SUITE.variants[0]
    with pytest.raises(ZeroDivisionError):
        with SUITE.make(variant, backend="disk", root=tmp_path) as episode:
            play(episode, plan(variant)[:8])
            assert list(tmp_path.iterdir()) == [episode.folder]
            raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    episode = SUITE.make(variant, backend="disk", root=tmp_path)
    first = episode.folder
    episode.reset(1)
    assert list(tmp_path.iterdir()) == [episode.folder] != [first]
    del episode
    gc.collect()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingResourceError, match="program 'git'"):
        SUITE.make(variant, backend="disk", root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_closed_episode_says_so():
    episode = SUITE.make(SUITE.variants[0])
    episode.close()
    episode.close()
    for action in (lambda: episode.step(Call("tables")), episode.check, lambda: episode.tell("x"), lambda: episode.pending):
        with pytest.raises(RunError, match="closed"):
            action()
    episode.reset()
    assert episode.step(Call("tables")).text == "tables: none"
    with pytest.raises(RunError, match="no folder"):
        _ = episode.folder


def test_programs_fail_loudly(tmp_path):
    assert run_program(["git", "--version"], cwd=tmp_path).startswith(b"git version")
    assert run_program(["cat"], cwd=tmp_path, stdin=b"x") == b"x"
    assert b"SECRET" not in run_program(["env"], cwd=tmp_path, env={"MORE": "1"})
    with pytest.raises(RunError, match="status 1"):
        run_program(["git", "no-such-command"], cwd=tmp_path)
    with pytest.raises(RunError, match="longer than"):
        run_program(["sleep", "5"], cwd=tmp_path, timeout=0.05)
    with pytest.raises(MissingResourceError, match="no-such-program"):
        run_program(["no-such-program"], cwd=tmp_path)


def test_sandbox_paths(tmp_path):
    with Sandbox(parent=tmp_path) as box:
        assert box.path("a/b.txt") == box.root / "a/b.txt"
        for name in ("../x", "/x", ".x", "a/", 3):
            with pytest.raises(InputError, match="name in the folder"):
                box.path(name)
        (box.root / "link").symlink_to(tmp_path)
        with pytest.raises(InputError, match="symbolic link"):
            box.path("link/x")
    assert tmp_path.exists() and not box.root.exists()


# Wrong input.


@pytest.mark.parametrize(("options", "what"), [
    ({"n_templates": 0}, "templates: got 0, allowed 1 to 21"), ({"n_templates": 22}, "templates"),
    ({"dims": ("goal", "time")}, "dimensions: got goal, time"),
    ({"dims": ()}, "dimensions: got none"), ({"dims": ("goal", "goal")}, "dimensions"), ({"options": 0}, "options of the hidden slot"),
    ({"options": 9}, "1 to 8"), ({"options": {"time": 3}}, "1 to 8 per dimension"), ({"irreversible": 1.1}, "irreversible share"),
    ({"irreversible": -0.1}, "0 to 1"), ({"reverify": -1}, "re-verify cost"), ({"reverify": 0.5}, "re-verify cost"),
    ({"backend": "cloud"}, "memory or disk"), ({"relabel": {"goal": "input"}}, "permutation"), ({"relabel": {"time": "goal"}}, "permutation"),
])
def test_suite_refuses(options, what):
    with pytest.raises(InputError, match=what):
        OfficeOps(**options)


@pytest.mark.parametrize(("options", "what"), [
    ({"backend": "cloud"}, "back end: got cloud"), ({"budget": 0}, "budget: got 0"),
    ({"backend": "disk", "root": "/no/such/folder"}, "folder that exists"),
])
def test_episode_refuses(options, what):
    with pytest.raises(InputError, match=what):
        SUITE.make(SUITE.variants[0], **options)


def test_calls_and_values_are_checked():
    variant = SUITE.variants[0]
    with pytest.raises(InputError, match="hidden value: got mars"):
        plan(variant, "mars")
    with pytest.raises(InputError, match="hidden value"):
        intervene(variant, "mars")
    for name, args in ((3, {}), ("read", {"path": ["x"]}), ("read", {1: "x"}), ("read", "path")):
        with pytest.raises(InputError, match="call"):
            Call(name, args)
    with SUITE.make(variant) as episode, pytest.raises(InputError, match="a Call"):
        episode.step("read")


@pytest.mark.parametrize(("call", "answer"), [
    (Call("shell", {"text": "ls"}), "no tool shell"), (Call("read"), "read takes path"), (Call("read", {"path": 3}), "path must be text"),
    (Call("tables", {"x": "y"}), "tables takes nothing"), (Call("read", {"path": "notes/none.txt"}), "no file"),
    (Call("list", {"folder": "none"}), "no folder"),
    (Call("peek", {"table": "none"}), "no table none"), (Call("convert", {"table": "x", "into": "y", "unit": "miles"}), "bad unit"),
    (Call("load", {"path": "notes/rules.txt", "into": "x", "key": "id", "value": "id"}), "no column"),
    (Call("load", {"path": "incoming/jan.csv", "into": "x", "key": "product", "value": "mark"}), "no whole numbers"),
    (Call("lookup", {"path": "incoming/jan.csv", "into": "x"}), "not a list of codes"),
    (Call("send", {"to": "x", "file": "reports/x.csv"}), "no file"),
    (Call("commit", {"files": "readme.txt", "message": "--amend"}), "bad message"),
    (Call("purge", {"folder": "incoming", "keep": "maps", "note": "reports/n.txt"}), "only the folder old"),
    (Call("purge", {"folder": "old", "keep": "maps", "note": "notes/n.txt"}), "directly into reports"),
], ids=lambda value: value.name if isinstance(value, Call) else None)
def test_refusals_say_why(call, answer):
    with SUITE.make(by_id(SUITE, "sales-goal")) as episode:
        observation = episode.step(call)
        assert not observation.ok and answer in observation.text and episode.observe() == observation and episode.actions == 1


def test_refused_table_work_says_why():
    variant = by_id(SUITE, "sales-goal")
    goal = variant.answer
    with SUITE.make(variant) as episode:
        play(episode, plan(variant))
        for call, answer in (
            (Call("stack", {"left": f"{goal}_jan", "right": f"{goal}_owners", "into": "x"}), "different columns"),
            (Call("join", {"left": f"{goal}_owners", "right": f"{goal}_owners", "into": "x"}), "more columns in common"),
            (Call("join", {"left": f"{goal}_rank", "right": f"{goal}_owners", "into": "x"}), "no column code"),
            (Call("total", {"table": f"{goal}_jan", "into": "x", "by": "amount"}), "by themselves"),
            (Call("rank", {"table": f"{goal}_rank", "into": "x"}), "has a place already"),
            (Call("tidy", {"table": f"{goal}_jan", "into": f"{goal}_jan"}), "from itself"),
            (Call("round", {"table": f"{goal}_final", "into": "x", "to": "tens"}), "no column amount"),
        ):
            observation = episode.step(call)
            assert not observation.ok and answer in observation.text, call
        assert episode.check().passed


def test_calls_compare_by_content_and_travel():
    one, other = Call("read", {"path": "a", "x": 1}), Call("read", {"x": 1, "path": "a"})
    assert one == other and hash(one) == hash(other) and one.key() == other.key() == ("read", '{"path":"a","x":1}')
    assert one != Call("read", {"path": "a", "x": "1"}) and one != "read"
    again = pickle.loads(pickle.dumps((SUITE.variants[5], one)))
    assert again == (SUITE.variants[5], one) and hash(again[0]) == hash(SUITE.variants[5])


def test_import_is_light():
    program = "import sys, nbkit.envs; print(*sorted(sys.modules.keys() & {'torch', 'numpy', 'sqlite3', 'transformers'}))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip() == ""
