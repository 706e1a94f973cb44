"""A task that is answered only by remembering: the register chain.

Sixteen registers hold values 0..15. Register ``p`` also owns an odd step ``d_p``. A line ``R_p v d_p w`` reads the register
(``v``), recalls its step and writes ``w = (v + d_p) mod 16``. The prompt holds one such line for every register, in random order; then the
chain follows its own pointer: the value just written names the next register.

    prompt    R3 9 +5 14   R9 11 +7 2   ...   R0 5 +1 6
    chain     R6 v +d w    R_w ...                         v: the value last written to R6, d: its step

Every line has four tokens. To continue, the model needs two facts about one register, its value and its step, and both stand
in that register's latest line, which may be four or four hundred tokens back: a cache that has lost the line
cannot go on correctly. Odd steps make each register's pointer visit all sixteen values (a rotor-router walk), so no register
stays unused and the chain never falls into a short loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

REGISTERS = 16
LINE = 4
BOS = 0
_REGISTER0, _STEP0, _VALUE0 = 1, 17, 33
VOCAB = 49
PROMPT_TOKENS = 1 + LINE * REGISTERS


@dataclass(frozen=True)
class Chains:
    """A batch of register chains.

    Attributes:
        prompt: (chains, 65) int64, the BOS token and one line for every register.
        answer: (chains, 4 * lines) int64, the correct continuation.
        distance: (chains, lines) int64, for each chain line the number of tokens between its register token and the
            latest earlier appearance of the same register.
    """

    prompt: np.ndarray
    answer: np.ndarray
    distance: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and answer in one array, (chains, 65 + 4 * lines)."""
        return np.concatenate([self.prompt, self.answer], axis=1)


def sample_chains(n: int, lines: int, *, seed: int | np.random.Generator) -> Chains:
    """Draw ``n`` chains of ``lines`` lines each.

    Raises:
        ValueError: if ``n`` or ``lines`` is not positive.

    >>> c = sample_chains(2, 4, seed=0)
    >>> c.prompt.shape, c.answer.shape
    ((2, 65), (2, 16))
    >>> bool((score_chains(c, c.answer)["passed"]).all())
    True
    """
    if n < 1 or lines < 1:
        raise ValueError(f"sample_chains needs n >= 1 and lines >= 1, got n={n}, lines={lines}")
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(REGISTERS), (n, 1)), axis=1)
    value = rng.integers(0, REGISTERS, (n, REGISTERS))
    step = 2 * rng.integers(0, REGISTERS // 2, (n, REGISTERS)) + 1
    row = np.arange(n)
    prompt = np.full((n, PROMPT_TOKENS), BOS, dtype=np.int64)
    prompt[:, 1::LINE] = _REGISTER0 + order
    prompt[:, 2::LINE] = _VALUE0 + np.take_along_axis((value - step) % REGISTERS, order, 1)
    prompt[:, 3::LINE] = _STEP0 + np.take_along_axis(step, order, 1)
    prompt[:, 4::LINE] = _VALUE0 + np.take_along_axis(value, order, 1)
    last_seen = np.empty((n, REGISTERS), dtype=np.int64)
    np.put_along_axis(last_seen, order, np.broadcast_to(1 + LINE * np.arange(REGISTERS), order.shape), 1)
    pointer = value[row, order[:, -1]]
    answer = np.empty((n, LINE * lines), dtype=np.int64)
    distance = np.empty((n, lines), dtype=np.int64)
    for i in range(lines):
        at = PROMPT_TOKENS + LINE * i
        distance[:, i] = at - last_seen[row, pointer]
        last_seen[row, pointer] = at
        answer[:, LINE * i] = _REGISTER0 + pointer
        answer[:, LINE * i + 1] = _VALUE0 + value[row, pointer]
        answer[:, LINE * i + 2] = _STEP0 + step[row, pointer]
        value[row, pointer] = (value[row, pointer] + step[row, pointer]) % REGISTERS
        answer[:, LINE * i + 3] = _VALUE0 + value[row, pointer]
        pointer = value[row, pointer]
    return Chains(prompt, answer, distance)


def score_chains(chains: Chains, generated: np.ndarray) -> dict[str, np.ndarray]:
    """Score generated continuations, one result per chain.

    Args:
        generated: (chains, tokens) int; shorter than the answer counts as wrong, longer is cut.

    Returns:
        ``passed`` (chains,) bool: the last line is right (pass@1; a chain that lost its way practically never comes back);
        ``exact`` (chains,) bool: every token is right;
        ``correct_lines`` (chains,) int: lines before the first wrong token.
    """
    want = chains.answer
    got = np.full_like(want, -1)
    width = min(want.shape[1], generated.shape[1])
    got[:, :width] = generated[:, :width]
    right = (got == want).reshape(len(want), -1, LINE).all(2)
    correct_lines = np.where(right.all(1), right.shape[1], right.argmin(1))
    return {"passed": right[:, -1], "exact": right.all(1), "correct_lines": correct_lines}


def to_text(tokens: np.ndarray) -> list[str]:
    """Readable names of token ids: ``·``, ``R0``..``R15``, ``+1``..``+15``, ``0``..``15``."""
    names = ["·"] + [f"R{i}" for i in range(16)] + [f"+{i}" for i in range(16)] + [str(i) for i in range(16)]
    return [names[int(t)] for t in tokens]
