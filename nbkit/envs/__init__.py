"""Real sandboxes for experiments with agents: files, SQL and version control in a temporary folder, with fast twins in memory."""

from nbkit.envs.office import Call, Check, Episode, Observation, OfficeOps, Step, Variant, intervene, plan
from nbkit.envs.sandbox import Sandbox, inside, run_program

__all__ = [
    "Call", "Check", "Episode", "Observation", "OfficeOps", "Sandbox", "Step", "Variant", "inside", "intervene", "plan", "run_program",
]
