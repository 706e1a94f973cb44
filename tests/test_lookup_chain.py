"""The lookup chain against a simulator that reads the tokens as a person would."""

import numpy as np
import pytest

from nbkit.models import lookup_chain as task

NAMES = {"k": 0, "+": 1, "v": 2, "t": 3}


def token(kind, n):
    return 1 + NAMES[kind] * task.KEYS + n


def simulate(prompt, lines):
    """The only correct continuation of a prompt, and how far back each key was last seen."""
    assert prompt[0] == task.BOS and len(prompt) == task.PROMPT_TOKENS
    table = {}
    for key, step in zip(prompt[1:-1:2], prompt[2:-1:2], strict=True):
        assert token("k", 0) <= key < token("+", 0) <= step < token("v", 0)
        table[key - token("k", 0)] = step - token("+", 0)
    assert sorted(table) == list(range(task.KEYS))
    value, text, distance = prompt[-1] - token("v", 0), list(prompt), []
    for line in range(lines):
        tick = line % task.KEYS
        key = (value + 5 * sum(range(tick + 1))) % task.KEYS
        value = (value + table[key]) % task.KEYS
        name = token("k", key)
        here = len(text) + 1
        distance.append(here - max(i for i, t in enumerate(text) if t == name))
        text += [token("t", tick), name, token("+", table[key]), token("v", value)]
    return text[len(prompt) :], distance


@pytest.mark.parametrize("lines", [1, 5, 90])
def test_chains_follow_their_rule(lines):
    chains = task.sample_chains(12, lines, seed=3)
    assert chains.prompt.shape == (12, task.PROMPT_TOKENS) and chains.answer.shape == (12, task.LINE * lines)
    for prompt, answer, distance in zip(chains.prompt.tolist(), chains.answer.tolist(), chains.distance.tolist(), strict=True):
        assert (answer, distance) == simulate(prompt, lines)


def test_tokens_are_prompt_then_answer_within_the_vocabulary():
    chains = task.sample_chains(3, 40, seed=0)
    assert np.array_equal(chains.tokens, np.concatenate([chains.prompt, chains.answer], 1))
    assert chains.tokens.dtype == np.int64 and 0 <= chains.tokens.min() and chains.tokens.max() < task.VOCAB == token("t", task.KEYS - 1) + 1


def test_same_seed_same_chains_and_prompts_do_not_depend_on_their_length():
    a, b, c = (task.sample_chains(4, n, seed=s) for n, s in ((20, 1), (50, 1), (20, 2)))
    assert np.array_equal(a.tokens, task.sample_chains(4, 20, seed=1).tokens)
    assert np.array_equal(a.answer, b.answer[:, :80]) and not np.array_equal(a.prompt, c.prompt)


def test_chains_reach_far_back_and_use_most_of_the_table():
    chains = task.sample_chains(200, 96, seed=5)
    used = [len(set(row)) for row in chains.answer[:, 1 :: task.LINE].tolist()]
    assert np.mean(used) > task.KEYS / 2
    assert np.median(chains.distance) > 48 and (chains.distance > 150).mean() > 0.04 and chains.distance.min() >= task.LINE


def test_scores_of_right_wrong_short_and_long_continuations():
    chains = task.sample_chains(6, 10, seed=2)
    out = chains.answer.copy()
    out[1, 4 * 3 + 2] += 1  # wrong step in the fourth line, then right again
    out[2, -1] = 0  # wrong final value
    out[3, 0] = 0
    result = task.score_chains(chains, out)
    assert result["passed"].tolist() == [True, False, False, False, True, True]
    assert result["final"].tolist() == [True, True, False, True, True, True]
    assert result["correct_lines"].tolist() == [10, 3, 9, 0, 10, 10]
    longer = np.concatenate([out, np.zeros((6, 5), int)], 1)
    assert all(np.array_equal(result[k], v) for k, v in task.score_chains(chains, longer).items())
    cut = task.score_chains(chains, chains.answer[:, :-2])
    assert not cut["passed"].any() and cut["correct_lines"].tolist() == [9] * 6
    assert task.score_chains(chains, np.zeros((6, 0), int))["correct_lines"].tolist() == [0] * 6


def test_names_of_tokens_are_unambiguous():
    names = task.to_text(np.arange(task.VOCAB))
    assert len(set(names)) == task.VOCAB
    assert [names[token(kind, 7)] for kind in NAMES] == ["k7", "+7", "7", "t7"]


@pytest.mark.parametrize("n, lines", [(0, 3), (3, 0), (-1, 3)])
def test_sizes_must_be_positive(n, lines):
    with pytest.raises(ValueError, match=f"n={n}, lines={lines}"):
        task.sample_chains(n, lines, seed=0)
