"""Answers questions about the installed Paddle: which distribution it is, whether it can be used, and how to import it quietly.

The identity hook calls it before anything is imported, and `open_device` imports through it. It does not change an installation.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polydraft.environment import given, suggest
from polydraft.errors import DeviceError
from polydraft_paddle import companions, runtimes, threads
from polydraft_paddle.device_name import take_apart

DISTRIBUTIONS = ("paddlepaddle", "paddlepaddle-gpu", "paddlepaddle-xpu")
"""Distributions that own the import package `paddle`."""
OLDEST, NEWEST = (3, 2), (3, 3)
"""The Paddles that the suite runs on; `pyproject.toml` asks pip for the same. Before 3.2 a copy into a strided view writes beside
it. Behind the newest nothing is known, and an operation whose arguments have changed would end the process."""
INSTALL = "pip install 'polydraft[paddle]'"


def installed() -> dict[str, str]:
    """Name to version of every installed distribution that owns `paddle`."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def unusable() -> str:
    """Why no Paddle can be used, as one sentence with the next step; "" when one can. Imports nothing."""
    found = installed()
    if len(found) > 1:
        return f"{' and '.join(sorted(found))} own the same import package; uninstall all of them, then install the one you want"
    if not found:
        if importlib.util.find_spec("paddle") is None:
            return f"Paddle is not installed; {INSTALL}"
        return ""  # built from source: no metadata to judge by
    (name, version), *_ = found.items()
    if name == "paddlepaddle-gpu" and _numbers(version) < (3,):
        return (
            f"paddlepaddle-gpu {version} has no machine code for GPUs of compute capability 9.0 or newer; "
            "install 3.2 or 3.3 from Paddle's own index"
        )
    if _numbers(version) < OLDEST:
        return f"{name} {version} is older than {'.'.join(map(str, OLDEST))}; {INSTALL}"
    if _numbers(version) > NEWEST:
        return f"{name} {version} is newer than {'.'.join(map(str, NEWEST))}, the newest that was tried; {INSTALL}"
    return ""


def has_graphs(kind: str) -> bool:
    """Whether the installed Paddle captures graphs on a kind of place that has streams: before 3.3 it does on `gpu` alone."""
    return kind == "gpu" or all(_numbers(version) >= (3, 3) for version in installed().values())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def import_paddle() -> None:
    """Import Paddle with its remarks about compilers, caches and OMP_NUM_THREADS kept off stderr; `DeviceError` when it does not
    load."""
    reason = unusable()
    if reason:
        raise DeviceError(reason)
    suggest("GLOG_minloglevel", "2")  # which libraries of custom devices were found is no news
    kind = mkl_type()
    if kind:
        suggest("MKL_DEBUG_CPU_TYPE", kind)
    suggest("KMP_BLOCKTIME", "10")  # milliseconds that an idle thread of Paddle spins; by itself 200, in everybody's way
    threads.note_wanted()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), standard_output_kept():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("paddle")
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            if problem := runtimes.load_problem(error):
                raise DeviceError(problem) from error
            raise DeviceError(f"the installed Paddle does not load ({first_line(error)}); reinstall it: {INSTALL}") from error
    warnings.filterwarnings("ignore", r"\s*Non compatible API")  # 3.2 compares itself with PyTorch, once for each operation
    logging.getLogger("paddle").setLevel(logging.ERROR)


@contextlib.contextmanager
def standard_output_kept() -> Iterator[None]:
    """Send to standard error what libraries write to standard output within the block, below Python too: runtimes of custom
    devices introduce themselves there, where a command's answer is read."""
    with contextlib.redirect_stdout(sys.stderr):
        flush: Callable[[Any], object] = ctypes.CDLL(None).fflush  # of all of C's streams, which a C++ library fills
        flush(None)
        try:
            kept = os.dup(OUTPUT)
        except OSError:  # there is no standard output
            yield
            return
        try:
            with contextlib.suppress(OSError):  # there is no standard error
                os.dup2(ERRORS, OUTPUT)
            yield
        finally:
            flush(None)
            os.dup2(kept, OUTPUT)
            os.close(kept)


OUTPUT, ERRORS = 1, 2
"""File descriptors of standard output and standard error."""
MKL_TYPES = (("7", {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}), ("5", {"avx2", "fma"}))
"""What MKL calls a processor that has these instructions, best first."""


CPUINFO = Path("/proc/cpuinfo")


def processor(cpuinfo: Path = CPUINFO) -> tuple[str, frozenset[str]]:
    """Vendor and instruction sets of the first processor, as Linux says them on x86; nothing of either elsewhere."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "", frozenset()
    said = {key.strip(): value for key, _, value in (line.partition(":") for line in reversed(lines))}
    return said.get("vendor_id", "").strip(), frozenset(said.get("flags", "").split())


def mkl_type(cpuinfo: Path = CPUINFO) -> str:
    """What to tell the MKL inside Paddle about a processor that is not Intel's, "" where it needs no telling: by itself it would
    use the instructions of 2008 there, four to five times slower in a matrix product."""
    vendor, flags = processor(cpuinfo)
    if vendor in ("", "GenuineIntel"):
        return ""
    return next((kind for kind, wanted in MKL_TYPES if wanted <= flags), "")


def set_fallback(*, allowed: bool) -> bool:
    """Say whether Paddle may copy an operation without a kernel on its place to the CPU and back, or has to refuse it; returns
    what was said before."""
    import paddle

    flag = "FLAGS_enable_api_kernel_fallback"
    before = bool(paddle.get_flags([flag])[flag])
    paddle.set_flags({flag: allowed})
    return before


def black_list(spec: str) -> str:
    """The variable that makes Paddle run operations of the place `spec` on the CPU whatever `set_fallback` says; "" when none
    is set."""
    kind = take_apart(spec).kind
    name = {"cpu": "", "gpu": "", "xpu": "XPU_BLACK_LIST"}.get(kind, "CUSTOM_DEVICE_BLACK_LIST")
    return name if name and given(name) else ""


def refuse_black_list(spec: str) -> None:
    """`DeviceError` where such a variable is set."""
    name = black_list(spec)
    if name:
        raise DeviceError(
            f"{name} is {given(name)!r} in the environment, which runs these operations of {spec} on the CPU in secret; "
            "unset it, or allow it with --allow-cpu-fallback"
        )


def places() -> tuple[str, ...]:
    """The places that the imported Paddle can open, as `--device` takes them."""
    import paddle

    found = [*paddle.device.get_available_device(), *paddle.device.get_available_custom_device()]
    whole = (place if ":" in place or place == "cpu" else f"{place}:0" for place in found)  # of one device Paddle leaves it out
    return tuple(dict.fromkeys(["cpu", *whole]))


def refuse_unknown_place(spec: str) -> None:
    """`DeviceError` when the imported Paddle has no such place."""
    known, place = places(), take_apart(spec).place
    if place not in known and f"{place}:0" not in known:
        if problem := companions.reason(spec):
            raise DeviceError(f"Paddle has no device {spec!r}: {problem}")
        raise DeviceError(f"Paddle has no device {spec!r}; it offers {', '.join(known)}; name one of these with --device")


def first_line(error: BaseException) -> str:
    """What an error says first, for a sentence; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
