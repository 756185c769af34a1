"""polydraft: multi-token-prediction speculative decoding, one runner for every accelerator.

The public names of the package; each is imported when it is first used, so that `import polydraft` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polydraft._version import __version__

if TYPE_CHECKING:
    from polydraft import contracts
    from polydraft.backend import Backend, BackendInfo, Capabilities
    from polydraft.config import EngineConfig
    from polydraft.engine import Engine
    from polydraft.hooks import hookimpl
    from polydraft.llm import LLM
    from polydraft.output.request_output import RequestOutput
    from polydraft.sampling_params import SamplingParams

_HOME = {
    "Backend": "polydraft.backend",
    "BackendInfo": "polydraft.backend",
    "Capabilities": "polydraft.backend",
    "Engine": "polydraft.engine",
    "EngineConfig": "polydraft.config",
    "LLM": "polydraft.llm",
    "RequestOutput": "polydraft.output.request_output",
    "SamplingParams": "polydraft.sampling_params",
    "hookimpl": "polydraft.hooks",
}

__all__ = [
    "LLM", "Backend", "BackendInfo", "Capabilities", "Engine", "EngineConfig", "RequestOutput", "SamplingParams", "__version__",
    "contracts", "hookimpl",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "contracts":
        return import_module("polydraft.contracts")
    if name not in _HOME:
        raise AttributeError(f"module 'polydraft' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
