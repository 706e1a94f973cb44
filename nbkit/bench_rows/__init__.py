"""Rows of ``python -m nbkit bench``: each file here has a tuple ``ROWS`` of :class:`nbkit.bench.Row`."""
