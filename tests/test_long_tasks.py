"""Long prompts: exact lengths, evidence where it is said to be, splits that share nothing."""

import numpy as np
import pytest

import nbkit
from nbkit.errors import InputError
from nbkit.loaders import long_templates
from nbkit.loaders.long_makers import CONTINUATION, _entries
from nbkit.loaders.long_tasks import DEPTHS, TASKS

RETRIEVAL = [kind for kind, category in TASKS.items() if category == "retrieval"]
FREE = [kind for kind, category in TASKS.items() if category != "retrieval"]


@pytest.fixture(scope="module")
def decode():
    from tokenizers import Tokenizer

    from nbkit.loaders.models import tokenizer_file

    tokenizer = Tokenizer.from_file(str(tokenizer_file()))
    return lambda ids: tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("tokens", [512, 2048, 4096])
def test_every_prompt_has_the_length_asked_for_and_an_answer_that_starts_with_content(kind, tokens, decode):
    for split in ("calibration", "held-out"):
        tasks = nbkit.load_long_tasks(kind, n=2, tokens=tokens, split=split)
        assert len({p.id for p in tasks}) == 2
        for p in tasks:
            assert p.ids.shape == (tokens,)
            assert p.ids.dtype == p.answer_ids.dtype == np.int64
            assert p.tokens == tokens
            assert any(c.isalnum() for c in decode(p.answer_ids[:1]))
            assert decode(p.answer_ids) == p.answer


@pytest.mark.parametrize("kind", RETRIEVAL)
def test_evidence_spans_hold_the_answer_at_the_depth_asked_for(kind, decode):
    tasks = nbkit.load_long_tasks(kind, n=5, tokens=1024, split="held-out", seed=3)
    for p in tasks:
        said = "".join(decode(p.ids[a:b]) for a, b in p.evidence)
        assert p.answer.strip() in said
        assert all(0 <= a < b <= p.tokens for a, b in p.evidence)
        assert all(e[1] <= s[0] for e, s in zip(p.evidence, p.evidence[1:], strict=False))
        if kind != "aggregation":
            # Cut at the nearest line, so not exact.
            assert p.evidence[0][0] / p.tokens == pytest.approx(p.depth, abs=0.06)
            rest = decode(np.delete(p.ids, np.concatenate([np.arange(a, b) for a, b in p.evidence])))
            assert p.answer.strip() not in rest
    if kind != "aggregation":
        assert sorted(p.depth for p in tasks) == list(DEPTHS)


def test_number_questions_end_with_the_space_so_that_the_prefill_predicts_the_first_digit(decode):
    for kind in ("needle", "multikey", "tracking"):
        for p in nbkit.load_long_tasks(kind, n=4, tokens=512, digits=5):
            assert decode(p.ids).endswith(" ")
            assert len(p.answer) == len(p.answer_ids) == 5
            assert p.answer.isdigit()


def test_same_arguments_same_prompts_and_more_prompts_change_none():
    few, many = (nbkit.load_long_tasks("multikey", n=n, tokens=512, seed=1) for n in (2, 4))
    assert [p.id for p in few] == [p.id for p in many][:2]
    for a, b in zip(few, many, strict=False):
        assert np.array_equal(a.ids, b.ids)
    other = nbkit.load_long_tasks("multikey", n=2, tokens=512, seed=2)
    assert not np.array_equal(few[0].ids, other[0].ids)


def test_splits_share_no_wording_key_table_or_function():
    for table in (long_templates.KEYS, long_templates.OPTIONS, long_templates.NEEDLE, long_templates.TRACKING, long_templates.AGGREGATION,
                  long_templates.QA, long_templates.TABLES, long_templates.DELIMITERS, long_templates.LOGS):
        assert set(table) == set(long_templates.SPLITS)
        assert not set(table["calibration"]) & set(table["held-out"])
    assert not {name for name, _ in _entries("calibration")} & {name for name, _ in _entries("held-out")}


@pytest.mark.parametrize("kind", ["needle", "multikey", "qa", "code", "prose", "log"])
def test_splits_share_no_filler_and_no_template(kind):
    seen = {split: nbkit.load_long_tasks(kind, n=6, tokens=512, split=split) for split in ("calibration", "held-out")}
    templates = [{p.template for p in tasks} for tasks in seen.values()]
    if kind not in ("code", "prose"):
        assert not templates[0] & templates[1]
        assert len(templates[0]) == len(templates[1]) == 2
    if kind not in ("qa", "log"):
        fillers = [{p.filler for p in tasks} for tasks in seen.values()]
        assert not fillers[0] & fillers[1]


@pytest.mark.parametrize("kind", RETRIEVAL)
def test_without_evidence_the_question_stays_and_the_answer_is_not_in_the_prompt(kind, decode):
    asked = nbkit.load_long_tasks(kind, n=2, tokens=512)
    control = nbkit.load_long_tasks(kind, n=2, tokens=512, evidence=False)
    for a, c in zip(asked, control, strict=True):
        assert np.array_equal(a.ids[-8:], c.ids[-8:])
        assert c.evidence == ()
        assert np.array_equal(a.answer_ids, c.answer_ids)
        if kind != "aggregation":
            assert a.answer.strip() not in decode(c.ids)
        assert a.id != c.id


@pytest.mark.parametrize("kind", FREE)
def test_free_kinds_are_scored_on_their_own_continuation(kind):
    for p in nbkit.load_long_tasks(kind, n=2, tokens=512):
        assert len(p.answer_ids) == p.inside == CONTINUATION
        assert p.evidence == ()
        assert p.chance is None
        assert p.category in ("structure", "general")


def test_aggregation_has_one_most_frequent_option(decode):
    for p in nbkit.load_long_tasks("aggregation", n=4, tokens=1024, keys=3):
        text = decode(p.ids)
        options = [o for o in long_templates.OPTIONS["calibration"] if f" {o}.\n" in text]
        counts = {o: text.count(f" {o}.\n") for o in options}
        assert max(counts, key=counts.get) == p.answer.strip()
        assert sorted(counts.values()) == [1, 1, 8]
        assert p.chance == pytest.approx(1 / 3)


def test_tracking_sets_a_variable_before_it_is_used(decode):
    for p in nbkit.load_long_tasks("tracking", n=6, tokens=512, hops=3):
        said = [decode(p.ids[a:b]) for a, b in p.evidence]
        assert len(said) == 3
        assert p.answer in said[0]
        assert not any(c.isdigit() for text in said[1:] for c in text)


def test_other_tokenizer_gives_other_ids_of_the_same_kind():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    p = nbkit.load_long_tasks("needle", n=1, tokens=600, tokenizer=tokenizer)[0]
    text = tokenizer.decode(p.ids.tolist())
    assert len(text) == 600
    assert p.answer in text
    # A tokenizer of bytes starts words with a bare space.
    with pytest.raises(InputError, match="tokenizer"):
        nbkit.load_long_tasks("aggregation", n=1, tokens=1500, tokenizer=tokenizer)


@pytest.mark.parametrize(("kind", "options", "match"), [
    ("sums", {}, "kind"),
    ("needle", {"split": "test"}, "split"),
    ("needle", {"tokens": 100}, "tokens"),
    ("needle", {"tokens": 512.0}, "tokens"),
    ("needle", {"n": 0}, "n: got 0"),
    ("needle", {"digits": 0}, "digits"),
    ("needle", {"filler": "poems"}, "filler"),
    ("needle", {"depth": 1.5}, "depth"),
    ("multikey", {"keys": 1}, "keys"),
    ("tracking", {"hops": 5}, "hops"),
    ("tracking", {"hops": 4, "keys": 7}, r"keys \* hops"),
    ("multikey", {"tokens": 128, "keys": 7}, "tokens"),
    ("needle", {"tokens": 32_000}, "tokens"),
    ("prose", {"tokens": 32_000}, "tokens"),
    ("qa", {"tokens": 32_768, "split": "held-out"}, "tokens"),
    ("needle", {"seed": -1}, "seed"),
])
def test_wrong_arguments_are_named(kind, options, match):
    with pytest.raises(InputError, match=match):
        nbkit.load_long_tasks(kind, **options)


# The recipe that says which kinds count.


def _rows(exact=1, whole=1.0, short=2.0):
    from nbkit.recipes.long_tasks import cell_key, cells

    out = []
    for cell in cells():
        nll = (short if "short" in cell else whole) + np.linspace(0, 0.1, cell["n"]) * ("short" in cell)
        chance = None if TASKS[cell["kind"]] != "retrieval" else 0.5 if cell.get("keys") == 2 else 0.25
        out.append({"key": cell_key(cell), "cell": cell, "chance": chance, "exact": [exact] * cell["n"], "nll": nll.tolist()})
    return out


def test_a_kind_counts_only_clearly_above_chance():
    from nbkit.recipes.long_tasks import usable

    assert all(entry["usable"] for entry in usable(_rows()).values())
    none = usable(_rows(exact=0, short=1.0))
    assert not any(none[kind]["usable"] for kind in RETRIEVAL)
    rows = _rows()
    for row in rows:
        # 8 of 24 is above a chance of a quarter, but not clearly.
        row["exact"] = [int(i % 3 == 0) for i in range(len(row["exact"]))]
    assert not any(usable(rows)[kind]["usable"] for kind in RETRIEVAL)
    flat = [row | {"nll": [1.0, 2.0] * (row["cell"]["n"] // 2)} for row in _rows()]
    assert not any(usable(flat)[kind]["usable"] for kind in FREE)


def test_figures_of_held_out_prompts_and_of_rival_chains_do_not_decide():
    from nbkit.recipes.long_tasks import usable

    rows = _rows()
    for row in rows:
        if row["cell"]["split"] == "held-out" or row["cell"].get("keys"):
            row["exact"] = [0] * len(row["exact"])
    assert all(entry["usable"] for kind, entry in usable(rows).items() if kind in RETRIEVAL)


def test_every_cell_of_the_recipe_has_a_name_of_its_own():
    from nbkit.recipes.long_tasks import cell_key, cells

    keys = [cell_key(cell) for cell in cells()]
    assert len(set(keys)) == len(keys)
    assert {c["kind"] for c in cells() if c["split"] == "held-out" and c["tokens"] == 1024 and c["n"] >= 12} == set(TASKS)


def test_without_the_deciding_cells_there_is_no_verdict():
    from nbkit.errors import RunError
    from nbkit.recipes.long_tasks import usable

    for count in (3, 16):
        with pytest.raises(RunError, match="too little time"):
            usable(_rows()[:count])
