"""A task that is answered only by remembering: the lookup chain.

The prompt is a map: up to 32 places in random order, each followed by its two successors, then the place to start from. The chain walks
the map and writes out every step, four tokens a line:

    prompt    p7 a12 b3   p3 a0 b30   p19 a25 b8  ...   p5
    chain     t0 p5 a31 b4    t1 p31 a9 b8    t2 p8 ...       tick, place, its successors

The next place is the first or the second successor of the line before; which one, the tick says (32 fixed directions that the model
learns by heart). So tick and place follow from the last line, but both successors have to be recalled from wherever the place was last
written out: on the map, or in an earlier line of the chain. Which place comes next depends on everything before, so nothing can be
thrown away safely: a cache that has lost every copy of one place fails at the first line that needs it, and the wrong step leads the
rest of the chain astray. Both successor maps are permutations, so the walk visits all places about equally often: with 32 places, half of
them were last seen more than about 80 tokens ago, one in twenty more than about 270.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbkit.errors import InputError

PLACES = 32
LINE = 4
BOS = 0
_PLACE0, _FIRST0, _SECOND0, _TICK0 = 1, 1 + PLACES, 1 + 2 * PLACES, 1 + 3 * PLACES
VOCAB = 1 + 4 * PLACES
PROMPT_TOKENS = 2 + 3 * PLACES
# Direction of every tick; any fixed sequence of both kinds would do.
SECOND = np.array([int(bit) for bit in "01101000110101110010110001011101"], dtype=bool)


@dataclass(frozen=True)
class Chains:
    """A batch of lookup chains.

    Attributes:
        prompt: (chains, 98) int64: BOS, the map, the place to start from.
        answer: (chains, 4 * lines) int64, the correct continuation.
        distance: (chains, lines) int64, tokens between each line's place and the latest earlier place where its
            successors were written out.
    """

    prompt: np.ndarray
    answer: np.ndarray
    distance: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and answer in one array, (chains, 98 + 4 * lines)."""
        return np.concatenate([self.prompt, self.answer], axis=1)


def sample_chains(n: int, lines: int, *, seed, places: int = PLACES) -> Chains:
    """Draw ``n`` chains of ``lines`` lines each.

    Args:
        seed: anything ``numpy.random.default_rng`` takes.
        places: places on the map; fewer give a shorter prompt of ``2 + 3 * places`` tokens.

    Raises:
        InputError: if ``n`` or ``lines`` is not positive or ``places`` is not in 2..32.

    >>> c = sample_chains(2, 4, seed=0)
    >>> c.prompt.shape, c.answer.shape
    ((2, 98), (2, 16))
    >>> bool(score_chains(c, c.answer)["passed"].all())
    True
    """
    if n < 1 or lines < 1:
        raise InputError("n, lines", got=(n, lines), allowed=">= 1")
    if not 2 <= places <= PLACES:
        raise InputError("places", got=places, allowed=f"2..{PLACES}")
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(PLACES), (n, 1)), axis=1)[:, :places]
    first, second = np.zeros((2, n, PLACES), dtype=np.int64)
    for successor in (first, second):
        np.put_along_axis(successor, order, rng.permuted(order, axis=1), 1)
    row = np.arange(n)
    place = order[row, rng.integers(0, places, n)]
    prompt_tokens = 2 + 3 * places
    prompt = np.full((n, prompt_tokens), BOS, dtype=np.int64)
    prompt[:, 1:-1:3] = _PLACE0 + order
    prompt[:, 2:-1:3] = _FIRST0 + np.take_along_axis(first, order, 1)
    prompt[:, 3:-1:3] = _SECOND0 + np.take_along_axis(second, order, 1)
    prompt[:, -1] = _PLACE0 + place
    last_seen = np.empty((n, PLACES), dtype=np.int64)
    np.put_along_axis(last_seen, order, np.broadcast_to(1 + 3 * np.arange(places), order.shape), 1)
    answer = np.empty((n, LINE * lines), dtype=np.int64)
    distance = np.empty((n, lines), dtype=np.int64)
    for i in range(lines):
        tick = i % PLACES
        if i:
            place = np.where(SECOND[tick], second[row, place], first[row, place])
        at = prompt_tokens + LINE * i + 1
        distance[:, i] = at - last_seen[row, place]
        last_seen[row, place] = at
        line = np.full(n, _TICK0 + tick), _PLACE0 + place, _FIRST0 + first[row, place], _SECOND0 + second[row, place]
        answer[:, LINE * i : LINE * i + LINE] = np.stack(line, 1)
    return Chains(prompt, answer, distance)


def score_chains(chains: Chains, generated: np.ndarray) -> dict[str, np.ndarray]:
    """Score generated continuations, one result per chain.

    Args:
        generated: (chains, tokens) int; shorter than the answer counts as wrong, longer is cut.

    Returns:
        ``passed`` (chains,) bool: every line is right, the last one included (pass@1); ``final`` (chains,) bool: the last line alone is right, which
        a lost chain reaches by luck about once in 32; ``correct_lines`` (chains,) int: lines before the first wrong token.
    """
    want = chains.answer
    got = np.full_like(want, -1)
    width = min(want.shape[1], generated.shape[1])
    got[:, :width] = generated[:, :width]
    right = (got == want).reshape(len(want), -1, LINE).all(2)
    correct_lines = np.where(right.all(1), right.shape[1], right.argmin(1))
    return {"passed": right.all(1), "final": right[:, -1], "correct_lines": correct_lines}


def to_text(tokens: np.ndarray) -> list[str]:
    """Readable names of token ids: ``·``, ``p0``.., ``a0``.., ``b0``.., ``t0``...

    >>> to_text([0, 1, 33, 65, 97])
    ['·', 'p0', 'a0', 'b0', 't0']
    """
    names = ["·"] + [f"{mark}{i}" for mark in "pabt" for i in range(PLACES)]
    return [names[int(t)] for t in tokens]
