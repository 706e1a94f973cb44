"""Measurements behind the recordings of attention_drift, and the rules that were fixed before any trained drafter had been measured.

Format of the recordings (JSON; a list of lists "P x K" holds one row a prompt and one column a chain step k = 1..K):

``drift-grid`` (trained toys: drafters for drift-target)
    ``prompts`` P, ``depth`` 16, ``aux_rms`` P x 3 (streams low, middle, high of the target), ``target_sinks`` (layers x heads: position of each
    head's largest mean attention, and ``target_sink_mass``, that mean), ``first_repeat`` (P,) token index at which a greedy text starts to repeat
    itself, ``cells``: one dict for each of variant x ttt x seed:
    ``variant``, ``ttt``, ``seed``, ``norm_bound`` (largest weight of the final norm: an upper bound of rms in post-norm),
    ``accuracy`` P x 16: share of chain starts at which step k proposes the target's greedy token while the chain reads the target's *sampled* text
        (conditional acceptance alpha_k free of survivor selection), ``rms``, ``cos``, ``update`` P x 16 on the same starts,
    ``tau`` (P,) and ``rates`` P x 8: accepted drafts a chain, *without* the bonus token, over starts in greedy text before ``first_repeat``,
        NaN written as null where a prompt has none,
    ``drift``: {measure: P x 12} of the measures of a `Chain` and ``control_<measure>`` (prefill of the same tokens with true features),
    ``tau_pin`` (P,), ``tau_scaled`` (P,): with the high stream multiplied by 10,
    ``noise`` (pre and post at ttt 2 and 4): {path: {alpha: tau (P,)}}.
    The small target's greedy text loops early, so here ``tau`` and ``rates`` (P x 12) start in sampled text and the target's greedy continuation of
    each start decides; no ``first_repeat`` then. This and further keys: nbkit/recipes/drift_eval.py.
``drift-smollm2`` (real target: SmolLM2-135M-Instruct; one seed, so intervals are over prompts alone)
    the same keys with ``prompts`` 32, ``depth`` 12, cells ``pre`` and ``post``, ``tau`` and ``rates`` P x 8 of greedy answers. Rows of ``accuracy``,
    ``rms``, ``cos``, ``update`` are 48 sampled answers, ``drift_rows`` (indices into these) the rows of ``drift``: answers that hold every start.
    And: ``documents`` (64,) of the held-out prompts (greedy row p is document p; sampled row i is document i + 1 + i // 3), ``aux_rms_first_token``;
    ``template_first_repeat``, ``long_first_repeat``: index where a text ends or starts to repeat 8 tokens, chains count before it alone; in cells
    ``templates`` {name: {"tau": (P,), "rates": P x 8, "starts": (P,)}}, ``coverage`` {name: share of the answers' tokens in the draft vocabulary},
    ``noise`` for the first 24 prompts, ``long`` {"full" | "window" | "window+sink": {"tau", "rates" 24 x 5, "starts"}} (windows of 256, sink of 4),
    ``drafter_sinks`` and ``drafter_sink_mass`` (heads,), ``fused_rms`` (48,); and ``speculative``: one dict a prompt and variant (equal, rounds,
    accepted, tau_without_bonus, seconds, plain_seconds, draft_seconds).

Step 1 of a chain reads a true feature and is therefore a prefill query: what drafting changes begins at step 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError

from .chain import draft_chain, measures, prefill_control
from .drafter import Drafter
from .intervention import NOTHING, Intervention, rms

CRITERIA: dict[str, str] = {
    "C1": "SmolLM2, pre: slope over k = 1..8 of the sink share below 0, and of (recent - control) above 0; both 95 % intervals exclude 0. The small "
          "target only counts where it has a sink (a mean attention of at least 0.2 on one position in at least a quarter of its heads).",
    "C2": "MTP head on the small target: sink share at step 2 minus step 1 below 0 (interval excludes 0), and |slope over k = 2..8| smaller than a "
          "tenth of that jump a step.",
    "C3": "pre, ttt 4: slope of log rms over k = 1..12 has an interval above 0 in at least 4 of 5 seeds; on SmolLM2 over k = 1..8.",
    "C4": "aux streams rise in magnitude from low to high; with fc_norm the high stream times 10 leaves tau exactly as it was, with plain fc tau "
          "falls (interval of the relative change below 0).",
    "C5": "ttt 2: mean accuracy over k = 3..6, post minus pre, has an interval above 0; pre falls from k = 2 to k = 6 (interval below 0).",
    "C6": "post, ttt 4: |slope of log rms over k = 1..12| < 0.01 and rms <= norm_bound everywhere; and the slope of the sink share is flatter than "
          "in pre on SmolLM2 (interval of the difference of absolute slopes above 0).",
    "C7": "gate: the sink share at k = 1 is below that of pre and the slope of log rms stays above 0 (intervals); entropy of gate+post is reported.",
    "C8": "area under tau(alpha) / tau(0) over alpha = 0..1 on the hidden path, post minus pre, has an interval above 0.",
    "C9": "pinning lowers tau in pre and in post (both intervals of the relative change below 0), and more in pre (interval of the difference).",
    "C10": "SmolLM2: (tau without template and first token / tau as trained), post over pre, has an interval above 1.",
    "C11": "SmolLM2, prompts of 768 tokens: full attention has a lower tau than prompts of 128 tokens in both; the window with sink raises it in "
           "both; post >= pre with the window (intervals).",
    "C12": "SmolLM2, as trained: tau of post over pre within 0.97..1.10 (interval above 0.97).",
    "C13": "post at ttt 4 keeps at least 97 % of the accuracy of post at ttt 8 over k = 1..8 (interval of the ratio above 0.97).",
    "C14": "at least half of the drafter's heads have their largest mean attention where the largest number of the target's heads has it (SmolLM2).",
}
"""What must be seen for a claim to count as reproduced; intervals are 95 % bootstrap over prompts, with seeds as outer level on the small target."""

ALPHAS = (0.1, 0.2, 0.5, 1.0)


def first_repeat(tokens: Sequence[int], gram: int) -> int:
    """Index at which a ``gram``-gram of ``tokens`` starts that occurred before; the length if none does.

    Raises: InputError for a gram below 1.

    >>> first_repeat([1, 2, 3, 1, 2, 4], 2), first_repeat([1, 2, 3], 2)
    (3, 3)
    """
    if gram < 1:
        raise InputError("gram", got=gram, allowed=">= 1")
    seen, tokens = set(), list(tokens)
    for i in range(len(tokens) - gram + 1):
        piece = tuple(tokens[i : i + gram])
        if piece in seen:
            return i
        seen.add(piece)
    return len(tokens)


@torch.no_grad()
def forced_steps(
    drafter: Drafter, tokens: Tensor, feats: Tensor, best: Tensor, *, first: int, depth: int, ends: Tensor | None = None, rows: int = 8,
    intervention: Intervention = NOTHING,
) -> dict[str, Tensor]:
    """Chains from every start in the target's own text, each step reading that text: what they propose and how their states change.

    Args:
        tokens: (P, N) texts. feats: (P, N, channels). best: (P, N) the target's greedy token after each position. first: earliest start.
        ends: (P,) where texts end, default N; a chain that predicts past the end does not count. rows: texts at a time.

    Returns:
        ``accuracy`` (share of starts whose step k proposes ``best``), ``rms``, ``cos`` (fed-back state against the one read) and ``update``
        (|o - f| / |f|), (P, depth) each: means over starts, NaN for a text without one.

    Raises: InputError when no start is left.

    Source: arXiv 2605.09992 (acceptance by depth); teacher forcing avoids that only easy texts survive to great depth.
    """
    starts = _starts(tokens, first, depth)
    ends = torch.full((len(tokens),), tokens.shape[1]) if ends is None else ends
    counts = (torch.arange(starts.start, starts.stop) + depth + 1 < ends[:, None]).float()
    out: dict[str, list[Tensor]] = {"accuracy": [], "rms": [], "cos": [], "update": []}
    for at in range(0, len(tokens), rows):
        piece = slice(at, at + rows)
        weights = counts[piece] / counts[piece].sum(1, keepdim=True)
        f = drafter.fuse(feats[piece, starts].float())
        columns: dict[str, list[Tensor]] = {name: [] for name in out}
        for j, step in enumerate(_steps(drafter, tokens[piece], feats[piece], starts, depth, intervention), 1):
            proposed = drafter.propose(drafter.logits(step.normed))
            # Step j of start t predicts x_{t+j+1}: the target's choice after position t + j.
            truth = best[piece, starts.start + j : starts.stop + j]
            now, raw = step.feedback.float(), step.out.float()
            columns["accuracy"].append(((proposed == truth).float() * weights).sum(1))
            columns["rms"].append((rms(now) * weights).sum(1))
            columns["cos"].append((F.cosine_similarity(now, f.float(), dim=-1) * weights).sum(1))
            columns["update"].append(((raw - f).norm(dim=-1) / f.float().norm(dim=-1).clamp_min(1e-12) * weights).sum(1))
            f = now
        for name in out:
            out[name].append(torch.stack(columns[name], 1))
    return {name: torch.cat(parts) for name, parts in out.items()}


@torch.no_grad()
def accepted_drafts(
    drafter: Drafter, tokens: Tensor, feats: Tensor, *, first: int, depth: int, rows: int = 8, intervention: Intervention = NOTHING,
) -> Tensor:
    """Accepted drafts of a chain from every start in *greedy* text of the target, (P, starts) from 0 to ``depth``.

    A chain's own proposals and the target's text agree up to the first refusal, so one pass with teacher tokens gives exactly what real chains do.

    Args:
        tokens: (P, N) greedy texts. feats: (P, N, channels). first: earliest start; the last one is N - 1 - depth.

    Raises: InputError when no start is left.
    """
    starts = _starts(tokens, first, depth)
    counts = []
    for at in range(0, len(tokens), rows):
        piece = slice(at, at + rows)
        alive, total = None, 0
        for j, step in enumerate(_steps(drafter, tokens[piece], feats[piece], starts, depth, intervention), 1):
            proposed = drafter.propose(drafter.logits(step.normed))
            right = proposed == tokens[piece, starts.start + j + 1 : starts.stop + j + 1]
            alive = right if alive is None else alive & right
            total = total + alive.long()
        counts.append(total)
    return torch.cat(counts)


def acceptance_by_prompt(counts: Tensor, depth: int, *, first: int, ends: Iterable[int]) -> dict[str, list]:
    """``tau`` (P,) without bonus and ``rates`` P x depth from `accepted_drafts`, over the starts whose whole chain lies before ``ends`` (P,).

    A prompt without such a start has None.

    >>> acceptance_by_prompt(torch.tensor([[2, 0, 1], [1, 1, 1]]), 2, first=4, ends=[9, 6])
    {'tau': [1.0, None], 'rates': [[0.5, 0.5], [None, None]], 'starts': [2, 0]}
    """
    tau, rates, number = [], [], []
    for row, end in zip(counts, ends, strict=True):
        kept = row[: max(0, int(end) - depth - 1 - first)]
        number.append(len(kept))
        share = [round(float((kept >= k).float().mean()), 4) if len(kept) else None for k in range(1, depth + 1)]
        rates.append(share)
        tau.append(round(float(kept.float().mean()), 4) if len(kept) else None)
    return {"tau": tau, "rates": rates, "starts": number}


@torch.no_grad()
def drift_measures(
    drafter: Drafter, tokens: Tensor, feats: Tensor, *, starts: Iterable[int], depth: int, rows: int = 8, intervention: Intervention = NOTHING,
) -> dict[str, Tensor]:
    """All measures of chains that read the target's text, and the prefill control on the same tokens: {name: (P, depth)}, means over ``starts``.

    Args:
        tokens: (P, N). feats: (P, N, channels). starts: positions t at which chains start, t + depth <= N - 1.

    Raises: InputError for a start too close to the end.
    """
    starts = list(starts)
    if not starts or max(starts) + depth > tokens.shape[1] - 1:
        raise InputError("starts", got=starts, allowed=f"<= {tokens.shape[1] - 1 - depth} for depth {depth}")
    out: dict[str, list[Tensor]] = {}
    for at in range(0, len(tokens), rows):
        text, states = tokens[at : at + rows], feats[at : at + rows].float()
        sums: dict[str, Tensor] = {}
        for t in starts:
            teacher = text[:, t + 2 : t + 1 + depth]
            chain = draft_chain(drafter, text[:, : t + 2], states, depth, teacher=teacher, intervention=intervention)
            beside = prefill_control(drafter, text[:, : t + 1 + depth], states, depth, sink_at=chain.sink_at, intervention=intervention)
            for prefix, source in (("", chain), ("control_", beside)):
                for name, value in measures(source).items():
                    sums[prefix + name] = sums.get(prefix + name, 0) + value.float() / len(starts)
        for name, value in sums.items():
            out.setdefault(name, []).append(value)
    return {name: torch.cat(parts) for name, parts in out.items()}


@torch.no_grad()
def drafter_sinks(drafter: Drafter, tokens: Tensor, feats: Tensor) -> tuple[Tensor, Tensor]:
    """Position of the largest mean attention of each head in a prefill, and that mean, (heads,) each; means over texts (P, N) and queries."""
    steps = drafter.ttt(tokens, feats.float(), 1, attention=True, logits=False)
    return head_sinks(steps[0].attention[..., : tokens.shape[1] - 1])


def head_sinks(attention: Tensor) -> tuple[Tensor, Tensor]:
    """Position and mean attention of each head's sink: (..., heads) from causal weights (texts, ..., heads, T, T).

    Queries before a key cannot see it, so each key's mean is over the queries of the second half of the text.

    >>> position, mass = head_sinks(torch.tensor([[[[1.0, 0], [0.25, 0.75]]]]))
    >>> position.tolist(), mass.tolist()
    ([1], [0.75])
    """
    late = attention[..., attention.shape[-2] // 2 :, :].float().mean(-2).mean(0)
    return late.argmax(-1), late.max(-1).values


@torch.no_grad()
def target_sinks(model, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sinks of the target's heads, position and mean attention (layers, heads) each, see `head_sinks`; one text (row of (P, N)) at a time."""
    before = model.config._attn_implementation
    # Only the plain implementation returns weights.
    model.set_attn_implementation("eager")
    try:
        total = 0
        for row in tokens:
            maps = model(row[None], output_attentions=True, use_cache=False, logits_to_keep=1).attentions
            late = [layer[0, :, layer.shape[-2] // 2 :].float().mean(-2) for layer in maps]
            total = total + torch.stack(late) / len(tokens)
    finally:
        model.set_attn_implementation(before)
    return total.argmax(-1), total.max(-1).values


def scaled_stream(feats: Tensor, factor: float) -> Tensor:
    """Features (.., 3d) whose high stream, the last third, is multiplied by ``factor``."""
    low, middle, high = feats.chunk(3, -1)
    return torch.cat([low, middle, high * factor], -1)


def numbers(value: Tensor, digits: int = 4) -> list:
    """A tensor as JSON values; NaN becomes None."""
    if value.ndim == 0:
        number = value.item()
        return None if number != number else round(number, digits)
    return [numbers(part, digits) for part in value]


def _steps(drafter: Drafter, tokens: Tensor, feats: Tensor, starts: slice, depth: int, what: Intervention):
    """The chain steps of these starts alone."""
    index = torch.arange(starts.start, starts.stop).expand(len(tokens), -1)
    return drafter.ttt(tokens, feats.float(), depth, starts=index, intervention=what, logits=False)


def _starts(tokens: Tensor, first: int, depth: int) -> slice:
    """Chain starts whose last prediction lies inside the text."""
    stop = tokens.shape[1] - 1 - depth
    if not 0 <= first < stop:
        raise InputError("first", got=first, allowed=f"0..{stop - 1} for {tokens.shape[1]} tokens and depth {depth}")
    return slice(first, stop)
