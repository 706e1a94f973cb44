"""The patterns as parts that a prefill can use: `attach(model, attention=get("attention", "a-shape"))`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

from nbkit.errors import InputError
from nbkit.inference.parts import register
from nbkit.inference.patterns import dynamic, heads, static
from nbkit.inference.patterns.attention import PatternAttention
from nbkit.inference.session import decoder_of

__all__ = [
    "AShape", "BlockTopK", "Dense", "Duo", "EntropyInfer", "FlexPrefill", "HeadSet", "RandomHeads", "TaskKV", "TriShape", "TriangleMix",
    "VerticalSlash", "XAttention",
]


SHAPE = {"sinks": "count", "window": "size"}


@register
@dataclasses.dataclass(frozen=True)
class Dense(PatternAttention):
    """Every earlier key.

    >>> Dense().name
    'dense'
    """

    name: ClassVar[str] = "dense"

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.dense`."""
        return static.dense(q, k)


@register
@dataclasses.dataclass(frozen=True)
class AShape(PatternAttention):
    """First keys and a local window.

    >>> AShape(window=32).window
    32
    """

    name: ClassVar[str] = "a-shape"
    checks: ClassVar[dict[str, str]] = SHAPE
    sinks: int = 4
    window: int = 64

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.a_shape`."""
        return static.a_shape(q, k, sinks=self.sinks, window=self.window)


@register
@dataclasses.dataclass(frozen=True)
class TriShape(PatternAttention):
    """A-shape with dense last rows.

    >>> TriShape().last
    64
    """

    name: ClassVar[str] = "tri-shape"
    checks: ClassVar[dict[str, str]] = SHAPE | {"last": "count"}
    sinks: int = 4
    window: int = 64
    last: int = 64

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.tri_shape`."""
        return static.tri_shape(q, k, sinks=self.sinks, window=self.window, last=self.last)


@register
@dataclasses.dataclass(frozen=True)
class TriangleMix(PatternAttention):
    """Dense lower layers, tri-shape above; dense_layers None = half of them.

    >>> TriangleMix(dense_layers=10).dense_layers
    10
    """

    name: ClassVar[str] = "trianglemix"
    checks: ClassVar[dict[str, str]] = SHAPE | {"last": "count", "dense_layers": "count"}
    dense_layers: int | None = None
    sinks: int = 4
    window: int = 64
    last: int = 64

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.triangle_mix`."""
        return static.triangle_mix(
            q, k, layer=layer, layers=run.layers, dense_layers=self.dense_layers, sinks=self.sinks, window=self.window, last=self.last
        )


def _table(value: Any, depth: int) -> Any:
    """Turn a tensor, array or nested list into nested tuples, so that a part can be a key."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value if depth == 0 else tuple(_table(item, depth - 1) for item in value)


@register
@dataclasses.dataclass(frozen=True)
class VerticalSlash(PatternAttention):
    """A-shape, top columns and top diagonals; one size for all heads, or ``table`` (layers, heads, 2) from ``fit_vertical_slash``.

    >>> VerticalSlash(table=[[[8, 152], [96, 64]]]).table
    (((8, 152), (96, 64)),)
    """

    name: ClassVar[str] = "vertical-slash"
    checks: ClassVar[dict[str, str]] = SHAPE | {"v": "count", "s": "count", "probe": "size", "last": "count"}
    v: int = 64
    s: int = 96
    sinks: int = 4
    window: int = 64
    probe: int = 64
    last: int = 0
    table: Any = None

    def __post_init__(self):
        super().__post_init__()
        if self.table is not None:
            object.__setattr__(self, "table", _table(self.table, 3))

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.vertical_slash`."""
        sizes = (self.v, self.s)
        if self.table is not None:
            if len(self.table) != run.layers or len(self.table[layer]) != q.shape[1]:
                got = f"{len(self.table)} layers of {len(self.table[0])} heads"
                raise InputError("table", got=got, allowed=f"{run.layers} layers of {q.shape[1]} heads", hint="fit the table on this model")
            sizes = tuple(zip(*self.table[layer], strict=True))
        return static.vertical_slash(
            q, k, scaling=scaling, v=sizes[0], s=sizes[1], sinks=self.sinks, window=self.window, probe=self.probe, dense_rows=self.last
        )


@register
@dataclasses.dataclass(frozen=True)
class BlockTopK(PatternAttention):
    """Best key blocks by mean-pooled scores.

    >>> BlockTopK(top=3).top
    3
    """

    name: ClassVar[str] = "block-topk"
    checks: ClassVar[dict[str, str]] = {"block": "size", "top": "count"}
    block: int | None = None
    top: int | None = None

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.block_topk`."""
        return dynamic.block_topk(q, k, scaling=scaling, block=self.block, top=self.top)


@register
@dataclasses.dataclass(frozen=True)
class FlexPrefill(PatternAttention):
    """Query-aware blocks or columns and diagonals, up to coverage gamma.

    >>> FlexPrefill().gamma
    0.9
    """

    name: ClassVar[str] = "flexprefill"
    checks: ClassVar[dict[str, str]] = {"gamma": "share", "tau": "fraction", "block": "size", "min_budget": "size", "max_budget": "size"}
    gamma: float = 0.9
    tau: float = 0.1
    block: int | None = None
    min_budget: int | None = None
    max_budget: int | None = None

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.flex_prefill`."""
        return dynamic.flex_prefill(
            q, k, scaling=scaling, gamma=self.gamma, tau=self.tau, block=self.block, min_budget=self.min_budget, max_budget=self.max_budget
        )


@register
@dataclasses.dataclass(frozen=True)
class XAttention(PatternAttention):
    """Blocks by anti-diagonal sums, up to a mass threshold.

    >>> XAttention(stride=16).threshold
    0.9
    """

    name: ClassVar[str] = "xattention"
    checks: ClassVar[dict[str, str]] = {"threshold": "share", "stride": "size", "block": "size"}
    threshold: float = 0.9
    stride: int = 8
    block: int | None = None

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.x_attention`."""
        return dynamic.x_attention(q, k, scaling=scaling, threshold=self.threshold, stride=self.stride, block=self.block)


@register
@dataclasses.dataclass(frozen=True)
class Duo(PatternAttention):
    """Retrieval heads dense, streaming heads A-shaped; gates (layers, heads or kv_heads) in [0, 1].

    >>> Duo(gates=[[0.9, 0.1]]).gates
    ((0.9, 0.1),)
    """

    name: ClassVar[str] = "duo"
    checks: ClassVar[dict[str, str]] = SHAPE | {"threshold": "fraction"}
    gates: Any = None
    threshold: float = 0.5
    sinks: int = 4
    window: int = 64

    def __post_init__(self):
        super().__post_init__()
        if self.gates is None:
            raise InputError("gates", got=None, allowed="numbers in [0, 1], (layers, heads or kv_heads)", hint="fit_duo_gates(model, prompts)")
        object.__setattr__(self, "gates", _table(self.gates, 2))

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.duo_attention`."""
        if len(self.gates) != run.layers:
            raise InputError("gates", got=f"{len(self.gates)} layers", allowed=f"{run.layers} layers", hint="fit the gates on this model")
        return heads.duo_attention(q, k, gates=self.gates[layer], threshold=self.threshold, sinks=self.sinks, window=self.window)


@register
@dataclasses.dataclass(frozen=True)
class TaskKV(PatternAttention):
    """Heads far from the semantic centre dense, the others sinks, window and middle keys.

    model: where given, heads are compared behind the output projections of its layers, which share one space; else as they are.

    >>> TaskKV().far
    0.25
    """

    name: ClassVar[str] = "taskkv"
    checks: ClassVar[dict[str, str]] = SHAPE | {"far": "fraction", "middle": "count", "probe": "size"}
    far: float = 0.25
    sinks: int = 4
    window: int = 64
    middle: int = 64
    probe: int = 64
    model: Any = dataclasses.field(default=None, compare=False, repr=False)

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.task_kv`."""
        projection = None if self.model is None else decoder_of(self.model).layers[layer].self_attn.o_proj.weight
        return heads.task_kv(
            q, k, v, scaling=scaling, projection=projection, far=self.far, sinks=self.sinks, window=self.window, middle=self.middle,
            probe=self.probe,
        )


@register
@dataclasses.dataclass(frozen=True)
class EntropyInfer(PatternAttention):
    """Segments with budgets that follow the entropy of the block scores.

    >>> EntropyInfer().alpha
    0.5
    """

    name: ClassVar[str] = "entropyinfer"
    checks: ClassVar[dict[str, str]] = {"segment": "size", "block": "size", "base": "size", "dense_until": "count", "sinks": "count"}
    segment: int | None = None
    block: int | None = None
    base: int | None = None
    dense_until: int | None = None
    rigid_below: float = 1e-5
    delta: float = 0.4
    alpha: float = 0.5
    sinks: int = 4

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.entropy_infer`."""
        return heads.entropy_infer(q, k, **dataclasses.asdict(self))


@register
@dataclasses.dataclass(frozen=True)
class HeadSet(PatternAttention):
    """The given (layer, head) pairs dense, or dense in their last ``last`` rows; the rest A-shaped. For oracles and rankings.

    >>> sorted(HeadSet(active=[(1, 0), (0, 2)]).active)
    [(0, 2), (1, 0)]
    """

    name: ClassVar[str] = "head-set"
    checks: ClassVar[dict[str, str]] = SHAPE | {"last": "count"}
    active: Iterable[tuple[int, int]] = ()
    sinks: int = 4
    window: int = 64
    last: int | None = None

    def __post_init__(self):
        super().__post_init__()
        try:
            object.__setattr__(self, "active", frozenset((int(layer), int(head)) for layer, head in self.active))
        except (TypeError, ValueError) as error:
            raise InputError("active", got=self.active, allowed="pairs (layer, head)") from error

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.head_set`."""
        beyond = sorted(p for p in self.active if not (0 <= p[0] < run.layers and 0 <= p[1] < q.shape[1]))
        if beyond:
            raise InputError("active", got=beyond[0], allowed=f"layer 0..{run.layers - 1}, head 0..{q.shape[1] - 1}")
        flags = [(layer, head) in self.active for head in range(q.shape[1])]
        return heads.head_set(q, k, active=flags, sinks=self.sinks, window=self.window, last=self.last)


@register
@dataclasses.dataclass(frozen=True)
class RandomHeads(PatternAttention):
    """A drawn share of all heads dense (or dense in their last rows), the rest A-shaped: the control of every ranking.

    >>> RandomHeads(share=0.2, seed=3).seed
    3
    """

    name: ClassVar[str] = "random-heads"
    checks: ClassVar[dict[str, str]] = SHAPE | {"share": "fraction", "last": "count", "seed": "count"}
    share: float = 0.2
    seed: int = 0
    sinks: int = 4
    window: int = 64
    last: int | None = None

    def pattern(self, run, layer, q, k, v, scaling):
        """See :func:`~nbkit.inference.patterns.random_flags`."""
        flags = heads.random_flags(run.layers, q.shape[1], share=self.share, seed=self.seed)[layer]
        return heads.head_set(q, k, active=flags, sinks=self.sinks, window=self.window, last=self.last)
