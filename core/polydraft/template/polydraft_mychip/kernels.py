"""Kernels of mychip, by contract: `kernel(a, n)` reads and writes the fields of the contract in place, rows below `n` alone."""

from __future__ import annotations

from polydraft.plugins.bring_up import OwnKernel

KERNELS: dict[str, OwnKernel] = {}
