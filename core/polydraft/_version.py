"""The version: the only place that states it.

Owns one string.
Read by `pyproject.toml` when a distribution is built and by `polydraft.__version__`.
Never imports anything, so that a build can read it without running polydraft.
"""

__version__ = "0.1.0.dev0"
