"""Reading a prompt in another way: one mechanism for rules that drop rows, thin out attention or shrink the cache of a transformers LM.

    with attach(model, rows=..., attention=..., eviction=...) as run:
        out = model.generate(ids, max_new_tokens=32)
    run.kept, run.density, run.macs, run.cache.nbytes
"""

from nbkit.inference.cache import RaggedCache
from nbkit.inference.parts import KINDS, PARTS, Attention, Eviction, Part, Rows, get, register
from nbkit.inference.run import Run
from nbkit.inference.session import attach

__all__ = ["KINDS", "PARTS", "Attention", "Eviction", "Part", "RaggedCache", "Rows", "Run", "attach", "get", "register"]
