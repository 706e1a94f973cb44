"""Programs that run other projects' code in an environment of its own, for side-by-side rows of ``python -m nbkit bench``."""
