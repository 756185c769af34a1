"""The exceptions: every error that polydraft raises on purpose.

There is one class for each kind of cause, so that a caller can tell what to change without reading the sentence. All packages of
the project raise them; the command line catches them, prints the sentence and sets its status. The classes have no behaviour: the
place that raises chooses the words, and each sentence says what, got, wanted, next step.
"""

from collections.abc import Sequence

__all__ = [
    "CapabilityError",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DeviceError",
    "GraphBufferError",
    "HazardError",
    "OutOfBlocks",
    "PluginError",
    "PolydraftError",
    "RecordError",
    "RequestError",
    "UnknownPluginError",
]


class PolydraftError(Exception):
    """Base of all errors below; catching it catches everything that polydraft says about its input or surroundings."""


class ConfigError(PolydraftError):
    """A configuration value, option or environment variable is unknown, malformed or contradicts another one."""


class PluginError(PolydraftError):
    """A plugin cannot be loaded or registers something wrong; the sentence names plugin, hook and fix."""


class UnknownPluginError(PluginError):
    """A plugin is named that is not installed; lists those that are. The remedy is another name, or an installation."""


class CapabilityError(PolydraftError):
    """A valid option or request that this backend or this version cannot serve; raised before the first token."""


class ContractError(PolydraftError):
    """A kernel, buffer or `Args` record breaks the contract it is bound to: shape, dtype, version or rebinding."""


class CheckpointError(PolydraftError):
    """A model directory cannot be used as it is; names the file and, where there is one, the tensor or key."""


class RequestError(PolydraftError):
    """One generation request is wrong (prompt, token ids, parameters, duplicate id); the others are not affected.

    `param`: the one parameter that is wrong, as `SamplingParams` calls it, or `prompt`; "" where it is none, or several."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class OutOfBlocks(PolydraftError):  # noqa: N818  the established name, even if it is no mistake
    """The KV block ledger cannot grant what was asked for; fatal only where one request alone is too large."""


class DeviceError(PolydraftError):
    """A device cannot be opened, refuses memory, or reports a failed launch or copy."""


class GraphBufferError(DeviceError):
    """A captured graph would run on another address than it was captured with; names the buffer that moved or was freed."""


class RecordError(DeviceError):
    """A packed record is not what its header says, or a number does not fit the place it is packed into."""


class HazardError(PolydraftError):
    """The hazard checker (`sanitize`) found something; `hazards` holds its findings (`polydraft.instruments.sanitize.Hazard`)."""

    def __init__(self, message: str, hazards: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.hazards = tuple(hazards)
