"""Checks whether installed runtimes of custom devices fit the installed Paddle, which loads every one it finds.

The identity hook and the import of Paddle call it: a single runtime built for another Paddle makes `import paddle` fail for every
place, the CPU included. It reads files and metadata, and loads nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from polydraft.environment import given

FOLDER = "paddle_custom_device"
"""Beside the packages: where Paddle looks, unless CUSTOM_DEVICE_ROOT names another folder."""
BUILT_FOR = ".paddle-version"
"""Beside a library of ours, in place of `.so`: the Paddle it was built against. Vendors' wheels carry it in their version."""
BROKEN = re.compile(r"Fail to open library: (\S+) with error: (.+?)(?:\[Hint|\n|$)")
"""What Paddle says when it could not load a runtime."""


def folders() -> tuple[Path, ...]:
    """Where Paddle looks for runtimes."""
    root = given("CUSTOM_DEVICE_ROOT")
    if root:
        return (Path(root),)
    site = importlib.util.find_spec("paddle")
    beside = Path(site.origin).parents[1] / FOLDER if site is not None and site.origin else None
    return (beside,) if beside is not None and beside.is_dir() else ()


def libraries() -> tuple[Path, ...]:
    """The runtimes that Paddle loads when it is imported."""
    return tuple(library for folder in folders() for library in sorted(folder.glob("libpaddle-*.so")))


def serves(library: Path, kind: str) -> bool:
    """Whether a runtime is that of a kind of custom device, as far as its name tells: `libpaddle-custom-npu.so` is that of `npu`,
    `libpaddle-custom-cpu.so` that of `custom_cpu`."""
    return kind not in OWN_KINDS and _plain(library.stem.removeprefix("libpaddle-")) == _plain(kind)


OWN_KINDS = ("cpu", "gpu", "xpu")
"""Kinds of place that Paddle has without a runtime."""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").removeprefix("custom_")


def misfits(paddle: str) -> dict[Path, str]:
    """Runtimes of custom devices that were built for another Paddle than the installed version `paddle`, each with a sentence."""
    found = {}
    for library in libraries():
        name, built = library.stem.removeprefix("libpaddle-"), _built_for(library)
        if built and built != paddle and not (built.count(".") < 2 and paddle.startswith(f"{built}.")):
            found[library] = (
                f"the runtime of device {name} was built for Paddle {built}, but {paddle} is installed; build or install the "
                f"runtime for {paddle}, or remove {library}"
            )
    return found


def _built_for(library: Path) -> str:
    """The Paddle version, as far as it is known, that a runtime was built for; "" where nobody says."""
    note = library.with_suffix(BUILT_FOR)
    if note.is_file():
        return note.read_text(encoding="utf-8").strip()
    name = f"{FOLDER}/{library.name}"
    for distribution in importlib.metadata.distributions():
        vendors = (distribution.metadata["Name"] or "").lower().replace("_", "-").startswith("paddle-custom")
        if vendors and name in (distribution.read_text("RECORD") or ""):
            version = ".".join(distribution.version.split(".")[:2])
            return "" if version.startswith("0.") else version  # no Paddle that is supported: a number of the wheel's own
    return ""


def load_problem(error: BaseException) -> str:
    """What Paddle's complaint about a runtime means, in one sentence; "" when it complains of something else."""
    broken = BROKEN.search(str(error))
    if not broken:
        return ""
    why = broken[2].strip().removeprefix(f"{broken[1]}: ")
    return f"the runtime {broken[1]} does not load with the installed Paddle ({why}); build it for this Paddle, or remove it"
