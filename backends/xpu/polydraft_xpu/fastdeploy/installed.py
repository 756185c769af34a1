"""The operators that an installed FastDeploy offers for Kunlun XPU: where they are, how they are called, which adaptors fit them.

The pack calls it when a device is open: importing FastDeploy takes seconds, and its operators are compiled. None is called here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from polydraft_paddle.installation import first_line

from polydraft.errors import PluginError
from polydraft_xpu.fastdeploy.adaptor import Adaptor

MODULE: Final = "fastdeploy.model_executor.ops.xpu"
GET_IT: Final = (
    "install FastDeploy for Kunlun XPU beside paddlepaddle-xpu (pip install fastdeploy-xpu -i "
    "https://www.paddlepaddle.org.cn/packages/stable/fastdeploy-xpu-p800/), or leave xpu/fastdeploy out of --kernels"
)
Operator = Callable[..., Any]


def operators(wanted: Sequence[str]) -> dict[str, Operator]:
    """Those of the operators called `wanted` that the installed FastDeploy has. Raises `PluginError` where it has none of them,
    or is not installed."""
    try:
        module = importlib.import_module(MODULE)
    except Exception as error:  # whatever a compiled package raises while it is imported
        raise PluginError(
            f"kernel pack 'xpu/fastdeploy' calls operators of {MODULE}, which cannot be imported "
            f"({type(error).__name__}: {first_line(error)}); {GET_IT}"
        ) from error
    found = {name: getattr(module, name) for name in wanted if callable(getattr(module, name, None))}
    if not found:
        raise PluginError(
            f"kernel pack 'xpu/fastdeploy' calls operators of {MODULE}, which has none of {', '.join(wanted)}: FastDeploy is "
            f"there without its operators; {GET_IT}"
        )
    return found


def version() -> str:
    """Name and version of the package that FastDeploy was installed from; "" where nobody knows."""
    for name in ("fastdeploy-xpu", "fastdeploy"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def parameters(operator: Operator) -> tuple[str, ...]:
    """The operator's parameters: of its Python function, or as the first line of a compiled function's docstring has them; ()
    where neither tells. A compiled function without names has `arg0` and so on."""
    try:
        found = inspect.signature(operator).parameters.values()
        if not any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in found):
            return tuple(one.name for one in found)
    except (TypeError, ValueError):
        pass
    head = (getattr(operator, "__doc__", None) or "").partition("\n")[0]
    return tuple(re.findall(r"[(,]\s*(\w+): ", head))


def are_names(found: Sequence[str]) -> bool:
    """Whether parameters can be given by these names."""
    return bool(found) and not all(re.fullmatch(r"arg\d+", name) for name in found)


def unfit(adaptor: Adaptor, found: Mapping[str, Operator]) -> str:
    """Why `adaptor` cannot call what is installed, as a clause; "" where it can. Names decide, not their order: the compiled
    function and Paddle's form of one operator have the same parameters in different places. Where there are no names their number
    does, and where nothing can be read the operator is tried."""
    if adaptor.operator not in found:
        return f"{adaptor.operator} is not there"
    there = parameters(found[adaptor.operator])
    if not there or (set(there) == set(adaptor.takes) if are_names(there) else len(there) == len(adaptor.takes)):
        return ""
    return f"{adaptor.operator} takes ({', '.join(there)}), wanted ({', '.join(adaptor.takes)})"
