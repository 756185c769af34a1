"""Module declarations: what a module that takes part in a step needs, as data (slot columns, step buffers, parameters, stages).

The runtime collects the declarations of all modules of an engine, allocates what they name, and hands every launch its buffers by
those names (`ProgramBuilder.add`). Adding a module, or a column to one, therefore changes no other module.

Shapes are written as in contract records: symbols of `Limits.sizes` (B slots, K drafts, W window, R rows, NL logit rows, L tokens
of a history, MB blocks of a table, S stop tokens, V vocabulary), or numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from polydraft.contracts.base import Limits, Unit
from polydraft.device import DTYPES, Array
from polydraft.errors import ConfigError

if TYPE_CHECKING:
    from polydraft.host.request import Request
    from polydraft.sampling_params import SamplingParams


@dataclass(frozen=True)
class Admission:
    """A request that takes a slot: what the values of its columns are made from."""

    request: Request
    slot: int
    epoch: int
    """Requests that the slot has served, this one included."""
    known: Array
    """[known] int32: the prompt, and after it what had been generated before a preemption."""
    prefill_len: int
    """Tokens to prefill before decoding."""
    num_cached: int
    """Rows that exist already, in shared blocks."""
    blocks: Array
    """[n] int32: blocks granted so far, shared ones first."""

    @property
    def params(self) -> SamplingParams:
        """What the request asked for."""
        return self.request.params


@dataclass(frozen=True)
class Column:
    """One value, or one row of values, of every slot: a device buffer of its own, [B] or [B, width], called `name`."""

    name: str
    doc: str
    shape: str = "B"
    dtype: Literal["i32", "f32"] = "i32"
    empty: float = 0
    """What a slot holds that no request has filled, and what admission resets it to."""
    value: Callable[[Admission], Any] | None = None
    """What a request puts there when it is admitted: a number, or at most `width` of them. None: it is left `empty`, and the
    device fills it. Of a stage, it is asked when the request arrives, too, which is refused if the column cannot hold it."""
    resets: bool = True
    """Whether admission sets the places after the values to `empty`; without it they hold anything, and the values are written
    alone, if there are any."""

    def width(self, limits: Limits) -> int:
        """Words of one slot."""
        sizes = sizes_of(self.shape, limits)
        return sizes[1] if len(sizes) > 1 else 1


@dataclass(frozen=True)
class StepBuffer:
    """A device buffer that one step works in, called `name`. Its contents outlive its module's launches."""

    name: str
    shape: str
    dtype: str = "i32"
    """A name of `DTYPES`, or "act" for the dtype of activations."""
    initial: float | Array | None = None
    """What it holds before the first step; None: anything."""


@dataclass(frozen=True)
class Pass:
    """The rows of one kind of pass, by the names of the buffers that describe them. The backend makes metadata for each
    (`polydraft_init_forward_meta`), which attention finds under the pass's name."""

    name: str
    role: Literal["target", "draft"]
    unit: Unit
    """What a launch over these rows counts."""
    row_slot: str
    """[N] int32: slot of each row, PAD_SLOT for none."""
    positions: str
    """[N] int32: absolute position of each row."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a request, besides those of `SamplingParams`, that a module brings: `SamplingParams.extra[name]`."""

    name: str
    default: Any
    doc: str
    wanted: str
    """What a value has to be, for errors: "a number from 0 to 1"."""
    accepts: Callable[[Any], bool]

    def of(self, params: SamplingParams) -> Any:
        """What a request gives, or the default: what a column is filled with."""
        return params.extra.get(self.name, self.default)


class LogitRows(Protocol):
    """The rows of logits that a stage works on: those of the target, or of one draft pass."""

    def add(self, contract: str, **fields: Any) -> None:
        """Append a launch over these rows. `logits`, `row_slot`, `positions` and `ahead` (how far the token that a row
        chooses is after its position) are those of the rows where the contract has such fields."""


class LogitsStage(Protocol):
    """A stage of logits processing, between the model's logits and the choice of a token. A step in which some slot `wants` any
    stage launches all of them, over the rows of all slots; so the neutral value of a stage must leave logits as they are."""

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> tuple[Column, ...]: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Request parameters that are not in `SamplingParams`."""

    @property
    def contracts(self) -> tuple[str, ...]:
        """What it launches. A backend without one of them serves every request that does not want the stage."""

    def wants(self, params: SamplingParams) -> bool:
        """Whether a request needs the stage."""

    def prepare(self, params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int) -> Any:
        """Check a request that wants the stage when it arrives; raises `RequestError`. What is returned is
        `Request.prepared[name]`, for the values of columns."""

    def emit(self, rows: LogitRows) -> None:
        """Append the stage's launches over some rows; called once for the target and once for each draft pass of a kind of
        step."""


def wrong_declaration(module: object, kinds: Mapping[str, type]) -> str:
    """What is wrong with the declarations of a module of a plugin, "" where nothing is. `kinds`: which kind of declaration its
    attributes have, by name; one that it leaves out is empty."""
    if not isinstance(getattr(module, "name", ""), str):
        return f"the name {module.name!r}, wanted a text"  # type: ignore[attr-defined]
    for name, kind in kinds.items():
        found = getattr(module, name, ())
        if not isinstance(found, (tuple, list)) or not all(isinstance(one, kind) for one in found):
            return f"the {name} {found!r}, wanted a tuple of {kind.__name__}"
        wrong = next((wrong for one in found if (wrong := _wrong_field(one))), "")
        if wrong:
            return f"a {kind.__name__} with {wrong}"
    return ""


def _wrong_field(declared: object) -> str:
    fields = getattr(declared, "__dict__", {})
    for name, value in fields.items():
        if name in {"name", "doc", "shape", "wanted"} and not isinstance(value, str):
            return f"the {name} {value!r}, wanted a text"
        if name == "accepts" and not callable(value):
            return f"accepts {value!r}, wanted a function of a value"
        if name == "value" and value is not None and not callable(value):
            return f"the value {value!r}, wanted a function of an admission, or None"
    return wrong_dtype(declared) if isinstance(declared, StepBuffer) else ""


def wrong_dtype(buffer: StepBuffer) -> str:
    """What is wrong with the dtype of a buffer, "" where nothing is."""
    known = (*DTYPES, "act")
    return "" if buffer.dtype in known else f"the dtype {buffer.dtype!r}, wanted one of {', '.join(known)}"


def sizes_of(shape: str, limits: Limits) -> tuple[int, ...]:
    """Sizes of a declared shape. Raises `ConfigError` for an unknown symbol."""
    unknown = next((symbol for symbol in shape.split() if not symbol.isdigit() and symbol not in limits.sizes), None)
    if unknown is not None:
        raise ConfigError(
            f"a module declares the shape {shape!r}, wanted numbers and symbols ({', '.join(limits.sizes)}); correct {unknown!r}"
        )
    return tuple(int(symbol) if symbol.isdigit() else limits.sizes[symbol] for symbol in shape.split())


Prepared = Mapping[str, Any]
"""What stages keep of a request, by stage."""
