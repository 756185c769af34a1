"""The version: the only place that states it.

`pyproject.toml` reads it when a distribution is built, and `polydraft.__version__` at run time. This module imports nothing, so
that a build can read it without running polydraft.
"""

__version__ = "0.1.0.dev0"
