"""OfficeOps: office jobs on real CSV files, a sqlite3 database, a git repository and an append-only outbox, with one fact missing."""

from nbkit.envs.office.plans import plan
from nbkit.envs.office.suite import Episode, OfficeOps, intervene
from nbkit.envs.office.types import DIMENSIONS, Call, Check, Observation, Step, Variant

__all__ = ["DIMENSIONS", "Call", "Check", "Episode", "Observation", "OfficeOps", "Step", "Variant", "intervene", "plan"]
