"""How many GPUs a test needs."""

import pytest

from polydraft_cuda.probe import look

on_two = pytest.mark.skipif(len(look().devices) < 2, reason="needs two GPUs that reach each other's memory")
