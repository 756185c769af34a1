"""Rules of the kernels' sources that no compiler holds: every kernel may overlap with the one before it."""

import re

import pytest

from polydraft_cuda import compiler

SOURCES = sorted(compiler.all_sources())
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in [*SOURCES, *compiler.HEADERS.glob("*.cuh")]}
WAITS = ("enter();", "begin_dependent();", "wait_for_previous();", "norm_row(", "begin_norm(")  # the last two wait themselves


def code(text: str) -> str:
    """A source without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", [path.name for path in SOURCES])
def test_a_kernel_waits_for_the_one_before_it(name: str):
    kernels = re.split(r'extern\s+"C"\s+__global__', code(TEXTS[name]))[1:]
    assert kernels
    for kernel in kernels:
        assert any(wait in kernel for wait in WAITS), f"{name}: {kernel.split('(')[0].split()[-1]} never waits"


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_nothing_but_weights_goes_through_the_read_only_cache(name: str):
    """`const T* __restrict__` lets a compiler read before the wait: common.cuh takes the word away."""
    found = re.findall(r"__ldg|__restrict__", code(TEXTS[name]))
    if name == "common.cuh":
        assert re.search(r"^#define __restrict__$", TEXTS[name], flags=re.MULTILINE)
    elif found:
        assert re.search(r'#include "\w+\.cuh"', TEXTS[name])
        assert "__ldg" not in found
    explicit = re.findall(r"ld\.global\.nc", code(TEXTS[name]))
    assert not explicit or name == "tensor.cuh", "the loads of weights are written in one place"


@pytest.mark.parametrize("name", [path.name for path in SOURCES if "fetch_stages<STAGES, 1, EARLY>" in TEXTS[path.name]])
def test_whoever_runs_beside_the_launch_in_front_waits_for_it_in_the_end(name: str):
    """Whoever follows waits for this one alone."""
    fetches, multiplies = code(TEXTS[name]).split("fetch_stages<STAGES, 1, EARLY>")[1].split("if (!EARLY) wait_for_previous();")
    for part, end in ((fetches, "return"), (multiplies, "to_t* to = out")):
        assert "if (EARLY) wait_for_previous();" in part.split(end)[0]
