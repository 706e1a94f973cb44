"""The lookup chain against a walker that reads the tokens as a person would."""

import numpy as np
import pytest

from nbkit.errors import InputError
from nbkit.models import lookup_chain as task

KINDS = "pabt"


def token(kind, n):
    return 1 + KINDS.index(kind) * task.PLACES + n


def read(kind, t):
    n = t - token(kind, 0)
    assert 0 <= n < task.PLACES
    return n


def walk(prompt, lines):
    """The only correct continuation of a prompt, and how many tokens ago each place's successors were last written out."""
    assert prompt[0] == task.BOS and (len(prompt) - 2) % 3 == 0
    text, noted, successors, distance = list(prompt), {}, {}, []
    for i in range(1, len(prompt) - 1, 3):
        place = read("p", prompt[i])
        assert place not in noted
        noted[place], successors[place] = i, (read("a", prompt[i + 1]), read("b", prompt[i + 2]))
    here = read("p", prompt[-1])
    for line in range(lines):
        if line:
            here = successors[here][int(task.SECOND[line % task.PLACES])]
        text.append(token("t", line % task.PLACES))
        distance.append(len(text) - noted[here])
        noted[here] = len(text)
        text += [token("p", here), token("a", successors[here][0]), token("b", successors[here][1])]
    return text[len(prompt) :], distance, successors


@pytest.mark.parametrize("lines", [1, 5, 90])
@pytest.mark.parametrize("places", [2, 7, 32])
def test_chains_follow_their_rule(lines, places):
    chains = task.sample_chains(12, lines, seed=3, places=places)
    assert chains.prompt.shape == (12, 2 + 3 * places) and chains.answer.shape == (12, task.LINE * lines)
    for prompt, answer, distance in zip(chains.prompt.tolist(), chains.answer.tolist(), chains.distance.tolist(), strict=True):
        want, far, successors = walk(prompt, lines)
        assert (answer, distance) == (want, far)
        for which in (0, 1):
            assert {pair[which] for pair in successors.values()} == set(successors)


def test_the_full_map_is_the_default():
    assert task.sample_chains(2, 3, seed=0).prompt.shape[1] == task.PROMPT_TOKENS == 2 + 3 * task.PLACES
    assert np.array_equal(task.sample_chains(2, 3, seed=0).tokens, task.sample_chains(2, 3, seed=0, places=task.PLACES).tokens)


def test_tokens_are_prompt_then_answer_within_the_vocabulary():
    chains = task.sample_chains(3, 40, seed=0)
    assert np.array_equal(chains.tokens, np.concatenate([chains.prompt, chains.answer], 1))
    assert chains.tokens.dtype == np.int64 and chains.tokens.min() == task.BOS and chains.tokens.max() < task.VOCAB == token("t", task.PLACES - 1) + 1


def test_same_seed_same_chains_and_prompts_do_not_depend_on_their_length():
    a, b, c = (task.sample_chains(4, n, seed=s) for n, s in ((20, 1), (50, 1), (20, 2)))
    assert np.array_equal(a.tokens, task.sample_chains(4, 20, seed=1).tokens)
    assert np.array_equal(a.answer, b.answer[:, :80]) and not np.array_equal(a.prompt, c.prompt)


def test_places_recur_at_the_stated_distances_and_chains_do_not_loop():
    chains = task.sample_chains(400, 96, seed=5)
    places = chains.answer[:, 1 :: task.LINE]
    assert np.mean([len(set(row)) for row in places.tolist()]) > 0.8 * task.PLACES
    assert 70 < np.median(chains.distance) < 95 and 0.03 < (chains.distance > 270).mean() < 0.08
    assert np.bincount((places - 1).ravel(), minlength=task.PLACES).min() > 0.8 * places.size / task.PLACES
    looped = [np.array_equal(row[64:], row[32:64]) for row in places]
    assert np.mean(looped) < 0.1


def test_a_wrong_step_never_finds_back_by_itself():
    """Forgetting is fatal only if lost walks do not merge with the right one."""
    for prompt in task.sample_chains(20, 1, seed=6).prompt.tolist():
        right = walk(prompt, 80)[0][1 :: task.LINE]
        wrong_start = prompt[:-1] + [token("p", (read("p", prompt[-1]) + 1) % task.PLACES)]
        wrong = walk(wrong_start, 80)[0][1 :: task.LINE]
        assert not any(a == b for a, b in zip(right, wrong, strict=True))


def test_scores_of_right_wrong_short_and_long_continuations():
    chains = task.sample_chains(6, 10, seed=2)
    out = chains.answer.copy()
    out[1, 4 * 3 + 2] += 1  # a wrong successor in the fourth line, then right again
    out[2, -1] = 0  # the last token is wrong
    out[3, 0] = 0
    result = task.score_chains(chains, out)
    assert result["passed"].tolist() == [True, False, False, False, True, True]
    assert result["final"].tolist() == [True, True, False, True, True, True]
    assert result["correct_lines"].tolist() == [10, 3, 9, 0, 10, 10]
    longer = task.score_chains(chains, np.concatenate([out, np.zeros((6, 5), int)], 1))
    assert all(np.array_equal(result[k], v) for k, v in longer.items())
    cut = task.score_chains(chains, chains.answer[:, :-2])
    assert not cut["passed"].any() and not cut["final"].any() and cut["correct_lines"].tolist() == [9] * 6
    assert task.score_chains(chains, np.zeros((6, 0), int))["correct_lines"].tolist() == [0] * 6


def test_names_of_tokens_are_unambiguous():
    names = task.to_text(np.arange(task.VOCAB))
    assert len(set(names)) == task.VOCAB
    assert [names[token(kind, 7)] for kind in KINDS] == ["p7", "a7", "b7", "t7"]


@pytest.mark.parametrize("sizes", [dict(n=0), dict(lines=0), dict(n=-1), dict(places=1), dict(places=33)], ids=str)
def test_sizes_out_of_range_are_refused(sizes):
    with pytest.raises(InputError, match="n, lines" if "places" not in sizes else "places"):
        task.sample_chains(**(dict(n=2, lines=3, seed=0) | sizes))
