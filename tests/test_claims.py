"""Verdicts follow from numbers, nothing is missing from a card, and the README's table merges without surprises."""

import dataclasses
import html.parser
import json
import math

import numpy as np
import pytest

from nbkit import claims as module
from nbkit.claims import README_END, README_START, VERDICTS, Above, All, Below, Claims, Equals, Part, Within, merge_readme, tally
from nbkit.errors import ClaimError, InputError, MissingResourceError
from nbkit.metrics import Interval

YES, SOME, NO, UNTESTED = VERDICTS


@pytest.fixture(autouse=True)
def build(tmp_path, monkeypatch):
    """Every test has its own build folder and the preset smoke."""
    monkeypatch.setenv("NBKIT_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("NBKIT_PRESET", "smoke")
    return tmp_path / "build" / "claims"


def example(slug="ams", low=0.5, statement="more correct answers"):
    claims = Claims(slug, ids=["C1", "C2", "C3", "C4"])
    gain = Interval(2, low, 3.5, n=40, method="paired bootstrap")
    claims.add("C2", statement=statement, paper="+7.2 points", measured=gain, criterion=Above(0), unit="points")
    claims.add("C1", statement="no region is lost", paper="11.3 % -> 8.7 %", criterion=All(floor=True, budget=True), source="90 layer-heads")
    claims.add("C3", statement="helps every scorer", paper="5 of 5", parts=[
        Part("tova", Interval(1, 0.2, 2), Above(0), unit="points"), Part("keydiff", Interval(-1, -2, -0.2), Above(0), unit="points"),
    ])
    claims.skip("C4", statement="beats the full cache", paper="54.2 > 52.8", reason="no headroom on a small model")
    return claims


@pytest.mark.parametrize("criterion, measured, verdict", [
    (Above(0), Interval(2, 0.1, 4), YES), (Above(0), Interval(2, 0.0, 4), SOME), (Above(0), Interval(2, -1, 4), SOME),
    (Above(0), Interval(-1, -3, 1), NO),
    (Above(0), 2.0, SOME), (Above(0), 0.0, NO), (Above(0), np.float32(2), SOME), (Above(0), Interval.exact(2), YES),
    (Above(0, on="estimate"), Interval(2, 1, 3), SOME), (Above(0, on="estimate"), Interval(-2, -3, -1), NO),
    (Below(0.05), Interval(0.02, 0.01, 0.03), YES), (Below(0.05), Interval(0.02, 0.01, 0.05), SOME), (Below(0.05), Interval(0.06, 0.01, 0.1), NO),
    (Below(0.05), 0.01, SOME), (Below(0.05, on="estimate"), Interval(0.02, 0.01, 0.03), SOME),
    (Within(-1, 1), Interval(0, -1, 1), YES), (Within(-1, 1), Interval(0, -1.1, 1), SOME), (Within(-1, 1), Interval(2, 0, 3), NO),
    (Within(-1, 1), 0.0, SOME),
    (Within(-1, 1), Interval.exact(0.5), YES), (Within(-1, 1, on="estimate"), Interval.exact(0.5), SOME),
    (Equals(0), 0, YES), (Equals(0), 1e-12, NO), (Equals(1, 1e-6), 1 + 1e-7, YES), (Equals(1, 0.1), Interval(1.02, 0.95, 1.05), YES),
    (Equals(1, 0.1), Interval(1.02, 0.8, 1.05), SOME), (Equals(1, 0.1), Interval(1.2, 0.8, 1.3), NO),
    (All(a=True, b=np.bool_(True)), None, YES), (All({"a b": True, "c": False}), None, SOME), (All(a=False), None, NO),
])
def test_verdict_of_a_criterion(criterion, measured, verdict):
    assert Part("x", measured, criterion).verdict == verdict


@pytest.mark.parametrize("measured, verdict", [
    (Interval(2, 1.5, 3), YES), (Interval(2, 0.5, 3), SOME), (Interval(0.5, 0.1, 3), NO), (Interval(0.9, 0.5, 3), NO), (1.2, SOME), (0.9, NO),
])
def test_partly_replaces_the_default_rule(measured, verdict):
    # Reproduced needs the interval above 1; partly needs the estimate above 1 here, and nothing weaker counts.
    assert Part("x", measured, Above(1), partly=Above(1, on="estimate")).verdict == verdict


def test_partly_may_ask_for_less():
    assert Part("x", Interval(0.5, 0.1, 0.9), Above(1), partly=Above(0)).verdict == SOME
    assert Part("x", Interval(0.5, -0.1, 0.9), Above(1), partly=Within(2, 3)).verdict == NO


@pytest.mark.parametrize("grades, verdict", [((1, 1), YES), ((1, 0), SOME), ((0, 0), NO), ((1, -1), SOME), ((-1, -1), NO), ((0.0, -1), SOME)])
def test_verdict_of_parts(grades, verdict):
    shapes = {1: Interval(1, 0.5, 2), 0.0: Interval(1, -1, 2), -1: Interval(-1, -2, -0.5)}
    shapes[0] = shapes[-1] if verdict == NO else shapes[0.0]
    claims = Claims("x", ids=["C1"])
    assert claims.add("C1", statement="s", paper="p", parts=[Part(str(i), shapes[g], Above(0)) for i, g in enumerate(grades)]) == verdict


@pytest.mark.parametrize("measured", [
    math.nan, math.inf, Interval(math.nan, 0, 1), Interval(1, 0, math.inf), np.float32("nan"), Interval(0, math.nan, math.nan),
])
@pytest.mark.parametrize("criterion", [Above(0), Below(0), Within(0, 1), Equals(0)])
def test_nan_is_no_measurement(measured, criterion):
    claims = Claims("ams", ids=["C1"])
    with pytest.raises(ClaimError, match="C1.*finite"):
        claims.add("C1", statement="s", paper="p", measured=measured, criterion=criterion)


@pytest.mark.parametrize("measured", [True, "0.3", b"1", None, [0.1]])
def test_only_a_number_is_a_measurement(measured):
    with pytest.raises(InputError, match="measurement of 'recall'.*an Interval or a number"):
        Part("recall", measured, Above(0))


def test_card_needs_every_claim(build):
    claims = Claims("ams", ids=["C1", "C2", "C3"])
    claims.skip("C2", statement="s", paper="p", reason="r")
    with pytest.raises(ClaimError, match="nothing for C1, C3"):
        claims.card()
    assert not build.exists()


def test_expected_verdict_is_enforced_and_the_truth_is_still_written(build):
    claims = Claims("ams", ids=["C1"])
    claims.add("C1", statement="s", paper="p", measured=Interval(1, -1, 2), criterion=Above(0), expect="reproduced")
    with pytest.raises(ClaimError, match=r"C1 partly, expected reproduced.*1\.00 \[-1\.00, 2\.00\].*above 0") as caught:
        claims.card()
    assert isinstance(caught.value, AssertionError)
    assert json.loads((build / "ams.json").read_text())["entries"][0]["verdict"] == SOME
    claims.add("C1", statement="s", paper="p", measured=Interval(1, -1, 2), criterion=Above(0), expect="partly")
    claims.card()
    claims.add("C1", statement="s", paper="p", measured=Interval(-1, -1, 2), criterion=Above(0))
    claims.card()


def test_verdict_cannot_be_typed_in():
    claims = example()
    with pytest.raises(TypeError):
        claims.add("C1", statement="s", paper="p", measured=1.0, criterion=Above(0), verdict="reproduced")
    for thing in (claims.entries[0], claims.entries[0].parts[0]):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            thing.verdict = "reproduced"
    with pytest.raises(TypeError):
        Part("x", 1.0, Above(0), verdict="reproduced")


def test_json_record(build):
    example().card()
    record = json.loads((build / "ams.json").read_text(encoding="utf-8"))
    assert (record["schema"], record["slug"], record["preset"]) == (1, "ams", "smoke")
    assert [entry["id"] for entry in record["entries"]] == ["C1", "C2", "C3", "C4"]
    assert [entry["verdict"] for entry in record["entries"]] == [YES, YES, SOME, UNTESTED]
    assert Interval(**record["entries"][1]["parts"][0]["measured"]) == Interval(2, 0.5, 3.5, n=40, method="paired bootstrap")
    assert {"python", "numpy"} <= record["versions"].keys() and record["time"].endswith("Z")
    assert list(build.iterdir()) == [build / "ams.json"]


def test_text_says_everything():
    text = str(example().card())
    for words in (
        "Claims of ams, preset smoke: 2 reproduced, 1 partly, 1 not testable here", "2.00 [0.50, 3.50] points", "whole interval above 0",
        "95 % paired bootstrap, n = 40", "floor (true), budget (true)", "keydiff: -1.00 [-2.00, -0.20] points -> not reproduced at this scale",
        "no headroom on a small model", "90 layer-heads",
    ):
        assert words in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
    assert repr(example().card()) == text
    claims = Claims("ams", ids=["C1"])
    claims.add("C1", statement="s", paper="p", measured=2.0, criterion=Above(0))
    assert "no interval: partly at most" in str(claims.card())


class Tags(html.parser.HTMLParser):
    """Collects the tags, the classes and the text of a page, and checks that tags close in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.classes, self.text, self.open = [], [], "", []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_is_a_well_formed_accessible_table_without_requests():
    page = example().card()._repr_html_()
    seen = Tags(page)
    assert seen.classes[0] == "nbkit-claims"
    assert {"table", "caption", "thead", "tbody"} <= set(seen.tags) and not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert page.count('scope="col"') == 5 and page.count('scope="row"') == 4
    assert all(verdict in seen.text for verdict in (YES, SOME, NO, UNTESTED))
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert "var(--jp-content-font-color1, inherit)" in page


HOSTILE = '<script>alert("x")</script> & a|b `c` *d* </table> <!-- nbkit claims: end -->'


def test_all_text_is_escaped(tmp_path):
    claims = Claims("ams", ids=["C1", "<b>"])
    claims.add("C1", statement=HOSTILE, paper=HOSTILE, source=HOSTILE, parts=[
        Part(HOSTILE, Interval(1, 0, 2, method=HOSTILE), Above(0), unit=HOSTILE), Part("facts", None, All({HOSTILE: True}))])
    claims.skip("<b>", statement=HOSTILE, paper=HOSTILE, reason=HOSTILE)
    page = claims.card()._repr_html_()
    assert not {"script", "!--"} & set(Tags(page).tags) and page.count("</table>") == 1 and "<!--" not in page
    assert Tags(page).text.count('<script>alert("x")</script> & a|b') >= 8
    readme = tmp_path / "README.md"
    readme.write_text(f"{README_START}\n{README_END}\n")
    merge_readme(readme)
    merge_readme(readme)
    text = readme.read_text()
    assert text.count(README_END) == 1 and "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith(("| C1", "| &lt;b"))]
    assert len(rows) == 2 and all(len(row.replace("\\|", "").split("|")) == 7 for row in rows)


@pytest.mark.parametrize("call", [
    lambda c: c.add("C9", statement="s", paper="p", measured=1.0, criterion=Above(0)),
    lambda c: c.add("C1", statement=" ", paper="p", measured=1.0, criterion=Above(0)),
    lambda c: c.add("C1", statement="s", paper="", measured=1.0, criterion=Above(0)),
    lambda c: c.add("C1", statement="s", paper="p", measured=1.0),
    lambda c: c.add("C1", statement="s", paper="p", criterion=Above(0)),
    lambda c: c.add("C1", statement="s", paper="p", measured="good", criterion=Above(0)),
    lambda c: c.add("C1", statement="s", paper="p", measured=1.0, criterion=lambda x: True),
    lambda c: c.add("C1", statement="s", paper="p", measured=1.0, criterion=All(a=True)),
    lambda c: c.add("C1", statement="s", paper="p", measured=1.0, criterion=Above(0), parts=[Part("x", 1.0, Above(0))]),
    lambda c: c.add("C1", statement="s", paper="p", measured=1.0, parts=[Part("x", 1.0, Above(0))]),
    lambda c: c.add("C1", statement="s", paper="p", measured=1.0, criterion=Above(0), expect="great"),
    lambda c: c.skip("C1", statement="s", paper="p", reason=""),
    lambda c: Claims("AMS", ids=["C1"]), lambda c: Claims("../x", ids=["C1"]), lambda c: Claims("ams", ids=[]),
    lambda c: Claims("ams", ids=["C1", "C1"]), lambda c: Above("0"), lambda c: Above(math.nan), lambda c: Above(0, on="mean"),
    lambda c: Within(2, 1), lambda c: All(), lambda c: All(a=1.0), lambda c: All(a=0),
])
def test_bad_input(call):
    with pytest.raises(InputError):
        call(Claims("ams", ids=["C1"]))


# README


@pytest.fixture
def readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\ntext\n{README_START}\n{README_END}\n\nmore text\n")
    return path


def test_merge_is_idempotent_and_leaves_the_rest_alone(readme):
    example().card()
    example("taco").card()
    assert merge_readme(readme) == ["ams: not in the table yet", "taco: not in the table yet"]
    first = readme.read_bytes()
    assert first.startswith(b"# Title\n\ntext\n") and first.endswith(b"\n\nmore text\n")
    assert b"| C2 | more correct answers | +7.2 points | 2.00 \\[0.50, 3.50\\] points |" in first
    stamp = readme.stat().st_mtime_ns
    assert merge_readme(readme) == [] == merge_readme(readme, refresh=True) == merge_readme(readme, check=True)
    assert readme.read_bytes() == first and readme.stat().st_mtime_ns == stamp


def test_other_digits_leave_the_table_unless_refreshed(readme):
    example(low=0.5).card()
    merge_readme(readme)
    first = readme.read_text()
    example(low=0.6).card()
    assert merge_readme(readme) == [] and readme.read_text() == first
    assert merge_readme(readme, refresh=True) == ["ams: other digits, same verdicts"]
    assert "2.00 \\[0.60, 3.50\\]" in readme.read_text()


def test_changed_verdict_is_named_and_check_writes_nothing(readme):
    example(low=0.5).card()
    merge_readme(readme)
    first = readme.read_text()
    example(low=-0.5).card()
    want = ["ams C2: the table says reproduced, this run says partly"]
    assert merge_readme(readme, check=True) == want and readme.read_text() == first
    assert merge_readme(readme) == want and "◐ partly" in readme.read_text()
    assert merge_readme(readme, check=True) == []
    example(low=-0.5, statement="fewer wrong answers").card()
    assert merge_readme(readme) == ["ams: claims or rules are worded differently"]


def test_papers_without_a_record_keep_their_rows(readme, build):
    example("taco").card()
    merge_readme(readme)
    (build / "taco.json").unlink()
    example("ams").card()
    assert merge_readme(readme) == ["ams: not in the table yet"]
    text = readme.read_text()
    assert text.index("claims of ams") < text.index("claims of taco") and text.count("| C4 |") == 2


def test_smoke_never_replaces_a_larger_preset(readme, monkeypatch):
    monkeypatch.setenv("NBKIT_PRESET", "demo")
    example().card()
    merge_readme(readme)
    first = readme.read_text()
    monkeypatch.setenv("NBKIT_PRESET", "smoke")
    example(low=-0.5).card()
    assert merge_readme(readme) == [] and readme.read_text() == first
    monkeypatch.setenv("NBKIT_PRESET", "full")
    example().card()
    assert merge_readme(readme) == ["ams: the table is of preset demo, this run of full"]


def test_windows_line_ends_stay(readme):
    readme.write_bytes(readme.read_bytes().replace(b"\n", b"\r\n"))
    example().card()
    merge_readme(readme)
    first = readme.read_bytes()
    assert first.count(b"\n") == first.count(b"\r\n") > 10
    assert merge_readme(readme) == [] and readme.read_bytes() == first


@pytest.mark.parametrize("text", ["no markers", README_START, f"{README_END}{README_START}", f"{README_START}{README_END}" * 2])
def test_readme_without_proper_markers(readme, text):
    readme.write_text(text)
    with pytest.raises(InputError, match="markers in README.md"):
        merge_readme(readme)
    assert readme.read_text() == text


def test_missing_readme(tmp_path):
    with pytest.raises(MissingResourceError):
        merge_readme(tmp_path / "nothing.md")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "slug": "ams", "preset": "demo", "entries": []}',
                                  '{"schema": 1, "slug": "ams", "preset": "demo", "entries": [{"verdict": "great"}]}'])
def test_damaged_record(build, readme, text):
    build.mkdir(parents=True)
    (build / "ams.json").write_text(text)
    with pytest.raises(InputError, match=r"claims record ams\.json"):
        merge_readme(readme)


def test_tally_and_empty_build(readme):
    assert tally() == {} and merge_readme(readme) == []
    assert "No notebook has been run yet." in readme.read_text()
    example().card()
    assert tally() == {"ams": {YES: 2, SOME: 1, NO: 0, UNTESTED: 1}}


def test_running_a_cell_again_replaces_the_entry():
    claims = example()
    assert claims.skip("C1", statement="s", paper="p", reason="r") == UNTESTED
    assert repr(claims) == "claims of ams: 4 of 4 entered"
    assert claims.card().tally == {YES: 1, SOME: 1, NO: 0, UNTESTED: 2}


def test_public_names_exist():
    assert all(hasattr(module, name) for name in module.__all__)
