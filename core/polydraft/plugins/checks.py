"""Checks of a plugin: its hooks and their arguments, what each hook returned, and the claims of its identity.

They run while an engine is built, so that a wrong plugin fails before the first step with one sentence that names plugin,
hook and fix. Nothing here loads or registers a plugin, or calls one of its hooks.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Final, Protocol, get_args

from polydraft import hooks
from polydraft.backend import BackendInfo, Collectives, ForwardMeta, KernelTable, PackNotes, RowOrder
from polydraft.contracts import COLLECTIVES
from polydraft.contracts.base import Provider
from polydraft.contracts.kv_quant import KV_DTYPES
from polydraft.contracts.packing import PACKINGS
from polydraft.device import Buffer, Device, Event, GraphCapture, Staging, Stream
from polydraft.errors import PluginError, PolydraftError

ACTIVATION_DTYPES: Final = ("f32", "bf16", "f16")
EXTENSION_HOOKS: Final = tuple(hook for hook in hooks.HOOKS if hook not in hooks.FIRST_RESULT and hook != "polydraft_kernels")
"""Hooks that a plugin of any kind may answer."""


@dataclass(frozen=True)
class Role:
    """What a plugin is loaded as: the entry-point group, the hooks it must have and those that it may answer."""

    noun: str
    group: str
    required: tuple[str, ...]
    answers: tuple[str, ...]


BACKEND: Final = Role(
    "backend",
    "polydraft.backends",
    ("polydraft_backend_info", "polydraft_open_device", "polydraft_kernels", "polydraft_init_forward_meta"),
    hooks.HOOKS,
)
PACK: Final = Role("kernel pack", "polydraft.kernels", ("polydraft_kernels",), ("polydraft_kernels", *EXTENSION_HOOKS))
EXTENSION: Final = Role("extension", "polydraft.extensions", (), EXTENSION_HOOKS)
ROLES: Final = (BACKEND, PACK, EXTENSION)


class PartialTable(Protocol):
    """What a kernel pack returns: the part of a `KernelTable` that it replaces."""

    @property
    def providers(self) -> Mapping[str, Provider]: ...
    @property
    def versions(self) -> Mapping[str, int]: ...


# -- hooks -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Implementation:
    """A function of a plugin that is marked with `@hookimpl`, as pluggy sees it."""

    attribute: str
    hook: str
    """The hook it is for: `specname`, or the name of the attribute."""
    function: Callable[..., Any]
    options: Mapping[str, Any]
    """What `@hookimpl` was given."""

    @property
    def wraps(self) -> bool:
        """Whether it runs around what others answer."""
        return bool(self.options.get("wrapper"))

    @property
    def specified(self) -> bool:
        """Whether core has such a hook; `optionalhook` is for those that only another version has."""
        return self.hook in hooks.HOOKS


def implementations(plugin: object) -> tuple[Implementation, ...]:
    """What `plugin` has marked, in alphabetical order."""
    found = []
    for attribute, value in _hooklike(plugin):
        marker = _marker(value)
        if marker is not None:
            found.append(Implementation(attribute, str(marker.get("specname") or attribute), value, marker))
    return tuple(found)


def answered(plugin: object) -> frozenset[str]:
    """Names of the hooks that `plugin` answers itself; those that it only wraps are not among them."""
    return frozenset(one.hook for one in implementations(plugin) if not one.wraps and one.specified)


def check_hooks(name: str, plugin: object, role: Role) -> None:
    """Every hook is known, marked, takes the arguments it is given, and is one that this role may answer, or wraps.

    Errors: `PluginError` naming plugin, hook and fix."""
    for attribute, value in _hooklike(plugin):
        marker = _marker(value)
        hook = str((marker or {}).get("specname") or attribute)
        if hook not in hooks.HOOKS and (marker or {}).get("optionalhook"):
            continue
        _check_known(name, hook)
        if marker is None:
            _refuse_unmarked(name, hook, value)
        else:
            _check_implementation(name, Implementation(attribute, hook, value, marker), role)
    have = answered(plugin)
    missing = [hook for hook in role.required if hook not in have]
    if missing:
        raise PluginError(
            f"{role.noun} plugin {name!r} lacks the hook {' and the hook '.join(missing)}; implement it (see polydraft.hooks)"
        )
    if not any(one.specified for one in implementations(plugin)):
        raise PluginError(f"plugin {name!r} implements no hook; decorate its functions with @hookimpl (see polydraft.hooks)")


def _hooklike(plugin: object) -> Iterator[tuple[str, Any]]:
    """Attributes that are meant as hooks: those called like one, and whatever carries the marker."""
    for attribute in dir(plugin):
        value = inspect.getattr_static(plugin, attribute, None)
        if not isinstance(value, property):  # a property of a plugin object is no hook, and may raise
            value = getattr(plugin, attribute, None)
        called_like_one = attribute.startswith(f"{hooks.PROJECT}_") and inspect.isroutine(value)
        if attribute in hooks.HOOKS or called_like_one or _marker(value) is not None:
            yield attribute, value


def _marker(value: object) -> Mapping[str, Any] | None:
    marker = getattr(value, f"{hooks.PROJECT}_impl", None)
    return marker if isinstance(marker, Mapping) and inspect.isroutine(value) else None


def _check_known(name: str, hook: str) -> None:
    if hook not in hooks.HOOKS:
        near = difflib.get_close_matches(hook, hooks.HOOKS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PluginError(
            f"plugin {name!r} implements unknown hook {hook!r}; {hint}known hooks: {', '.join(hooks.HOOKS)}; "
            "rename or remove it, or mark it @hookimpl(optionalhook=True) if another version of polydraft has it"
        )


def _refuse_unmarked(name: str, hook: str, value: object) -> None:
    if not inspect.isroutine(value):
        raise PluginError(f"plugin {name!r}: {hook} is {_article(type(value).__name__)}, wanted a function; make it one")
    raise PluginError(f"plugin {name!r} defines {hook} without @hookimpl; decorate it with polydraft.hookimpl")


def _check_implementation(name: str, one: Implementation, role: Role) -> None:
    if one.options.get("hookwrapper"):
        raise PluginError(
            f"plugin {name!r}: {one.hook} is a wrapper of pluggy's old style, whose errors become warnings; use "
            "@hookimpl(wrapper=True) and return what its yield gave"
        )
    if one.wraps and not inspect.isgeneratorfunction(one.function):
        raise PluginError(
            f"plugin {name!r}: {one.hook} has wrapper=True and is no generator function; yield once in it, and return what the "
            "yield gave"
        )
    if not one.wraps and one.hook not in role.answers:
        right = next(r for r in reversed(ROLES) if one.hook in r.answers)
        raise PluginError(
            f"plugin {name!r} implements {one.hook}, which only {_article(right.noun)} answers, and this is "
            f"{_article(role.noun)}; wrap the hook with @hookimpl(wrapper=True), remove it, or register the plugin in "
            f"{right.group}"
        )
    _check_arguments(name, one.hook, one.function)


def _check_arguments(name: str, hook: str, function: Callable[..., Any]) -> None:
    """pluggy passes arguments by name, and silently none to a parameter that has a default or is variadic."""
    wanted = list(_signature(getattr(hooks, hook)).parameters)
    signature = inspect.signature(function)
    where = f"plugin {name!r}: {hook}{signature} does not fit the hook, which takes ({', '.join(wanted)})"
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise PluginError(f"{where}: {parameter} would never be passed; name the arguments you need")
        if parameter.name not in wanted:
            raise PluginError(f"{where}: unknown argument {parameter.name!r}; rename or remove it")
        if parameter.default is not inspect.Parameter.empty:
            raise PluginError(f"{where}: {parameter.name!r} has a default and would never be passed; remove the default")


# -- what hooks return -----------------------------------------------------------------------------
ANSWERS: Final[Mapping[str, type]] = {
    "polydraft_backend_info": BackendInfo,
    "polydraft_open_device": Device,
    "polydraft_graph_capture": GraphCapture,
    "polydraft_init_forward_meta": ForwardMeta,
    "polydraft_collectives": Collectives,
    "polydraft_visible_devices": Sequence,
    "polydraft_off_device": Mapping,
}
"""What the backend returns, by hook. Kernels depend on the role; every other hook returns an iterable."""


def accept(name: str, hook: str, role: Role, answer: Any) -> Any:
    """Return what a plugin answered to `hook`, with an iterable run through, once it is what the hook wants.

    Errors: `PluginError` naming plugin, hook, the type that came back and what it lacks."""
    if hook == "polydraft_kernels":
        check_result(name, hook, answer, KernelTable if role is BACKEND else PartialTable)
        return answer
    check_result(name, hook, answer, ANSWERS.get(hook, Iterable))
    if hook in hooks.FIRST_RESULT:
        return answer
    items = tuple(answer)
    for item in items:
        _check_item(name, hook, item)
    return items


def accept_wrapped(name: str, hook: str, answer: Any) -> Any:
    """As `accept`, for what a plugin made of the answers of others by wrapping `hook`."""
    if hook in hooks.FIRST_RESULT:
        return accept(name, hook, BACKEND, answer)
    check_result(name, hook, answer, list)
    return [accept(name, hook, PACK, one) for one in answer]


def _check_item(name: str, hook: str, item: object) -> None:
    """One item of an iterable that a hook returned."""
    if hook == "polydraft_step_observers":
        check_result(name, hook, item, hooks.StepObserver)
    elif hook == "polydraft_proposers":
        pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and callable(item[1])
        if not pair:
            raise PluginError(f"plugin {name!r}: {hook} returned {item!r}, wanted pairs of a name and a factory; make it one")


@contextmanager
def named(name: str, what: str) -> Iterator[None]:
    """Around a call of a plugin's code, a hook or `what` a hook returned: an error that is none of polydraft's becomes a
    `PluginError` that names it."""
    try:
        yield
    except PolydraftError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {name!r}: {what} raised {type(error).__name__}: {error}; repair the plugin, or raise a polydraft error with "
            "the next step"
        ) from error


def check_result(name: str, hook: str, value: object, wanted: type) -> None:
    """`value` has every member of the protocol `wanted`, and its methods take what core passes them. `hook`: what returned it.

    Errors: `PluginError` naming plugin, hook, the type that came back and what it lacks."""
    if value is None:
        raise PluginError(f"plugin {name!r}: {hook} returned None, wanted {_article(wanted.__name__)}; return it")
    problem = lacks(value, wanted)
    if problem:
        returned = f"plugin {name!r}: {hook} returned {_article(type(value).__name__)}, wanted {_article(wanted.__name__)}"
        if not _is_protocol(wanted):
            raise PluginError(f"{returned}; return one")
        raise PluginError(f"{returned}: {problem}; add it (see polydraft.backend and polydraft.device)")


def check_device(name: str, device: Device) -> None:
    """What an open device hands out has the members that core uses. It allocates, so the conformance kit calls it, and no engine.

    Errors: `PluginError` naming plugin, what the device was asked for, the type that came back and what it lacks."""
    handed: dict[str, tuple[Callable[[], object], type]] = {
        "stream": (lambda: device.stream, Stream),
        "event()": (device.event, Event),
        "empty()": (lambda: device.empty("members", (1,), "i32"), Buffer),
        "staging()": (lambda: device.staging("members", (1,), "i32"), Staging),
    }
    for what, (ask, wanted) in handed.items():
        check_result(name, f"{what} of the device of polydraft_open_device", ask(), wanted)


def lacks(value: object, protocol: type) -> str:
    """Say what keeps `value` from being a `protocol`: a missing member, or a method that refuses its arguments; else ""."""
    if not _is_protocol(protocol):
        return "" if isinstance(value, protocol) else "it is of another kind"
    for member, declared in _members(protocol).items():
        try:
            found = getattr(value, member)
        except AttributeError:
            return f"it has no {member}"
        if inspect.isfunction(declared) and not (callable(found) and _accepts(found, declared)):
            return f"its {member} does not take ({', '.join(list(_signature(declared).parameters)[1:])})"
    return ""


@functools.cache
def _members(protocol: type) -> Mapping[str, Any]:
    """What a protocol declares."""
    return {n: m for base in reversed(protocol.__mro__) for n, m in vars(base).items() if not n.startswith("_")}


def _is_protocol(wanted: type) -> bool:
    return bool(getattr(wanted, "_is_protocol", False))


_signature = functools.lru_cache(maxsize=256)(inspect.signature)
"""Of functions of core, which do not change."""


def _accepts(function: Callable[..., Any], declared: FunctionType) -> bool:
    """Whether `function` can be called with all parameters of the method `declared`, and with only those that have no default.
    That is found out once for the methods of a class, of which a kernel table has dozens of objects."""
    if inspect.ismethod(function) and inspect.isfunction(function.__func__):
        return _method_accepts(function.__func__, declared)
    return _takes(function, declared)


@functools.lru_cache(maxsize=1024)
def _method_accepts(function: FunctionType, declared: FunctionType) -> bool:
    return _takes(MethodType(function, object()), declared)


def _takes(function: Callable[..., Any], declared: FunctionType) -> bool:
    parameters = list(_signature(declared).parameters.values())[1:]
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a compiled method that does not tell; its first call will
        return True
    try:
        signature.bind(*parameters)
        signature.bind(*required)
    except TypeError:
        return False
    return True


def check_table(name: str, table: PartialTable, role: Role = BACKEND) -> None:
    """Every provider of a kernel table can be bound, names a known contract or composite, and is of the version that core
    serves; its pass over programs, if it brings one, can be run. A pack may have no kernel for the device that it was given."""
    hook = "polydraft_kernels"
    for member in ("providers", "versions"):
        if not isinstance(getattr(table, member), Mapping):
            got = type(getattr(table, member)).__name__
            raise PluginError(f"plugin {name!r}: {hook} returned {member} as {got}, wanted a mapping by contract; return a dict")
    if not table.providers and role is BACKEND:
        raise PluginError(f"plugin {name!r}: {hook} offers no kernel; return a table with providers")
    without = sorted(set(table.versions) - set(table.providers))
    if without:
        raise PluginError(f"plugin {name!r}: {hook} has versions without providers: {', '.join(without)}; drop those or add them")
    for contract, provider in table.providers.items():
        problem = lacks(provider, Provider)
        if problem:
            raise PluginError(f"plugin {name!r}: {hook} has no usable provider of {contract!r}: {problem}; implement it")
        check_version(name, hook, contract, table.versions.get(contract))
    notes = getattr(table, "notes", None)
    if notes is not None:
        _check_notes(name, notes, table)
    check_pass(name, hook, getattr(table, "program_pass", None))


def check_pass(name: str, hook: str, brought: Any) -> None:
    """A pass over programs, where `hook` brings one, can be run."""
    from polydraft.plugins.program_pass import ProgramPass

    problem = "" if brought is None else lacks(brought, ProgramPass)
    if problem:
        raise PluginError(f"plugin {name!r}: {hook} has no usable program_pass: {problem}; implement it or leave it out")


def check_version(name: str, hook: str, contract: str, version: int | None) -> None:
    """`contract` exists, and `version` is the one that core serves."""
    from polydraft.contracts import COMPOSITES, REGISTRY

    if contract not in COMPOSITES and contract not in REGISTRY:
        near = difflib.get_close_matches(contract, [*REGISTRY.names(), *COMPOSITES], 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PluginError(
            f"plugin {name!r}: {hook} names unknown contract {contract!r}; {hint}see `polydraft contracts` for the names"
        )
    served = 1 if contract in COMPOSITES else REGISTRY[contract].version
    if version != served:
        raise PluginError(
            f"plugin {name!r}: {hook} has version {version} of contract {contract!r}, core serves {served}; rebuild it for that"
        )


# -- identity --------------------------------------------------------------------------------------
def check_info(name: str, have: Collection[str], info: BackendInfo) -> BackendInfo:
    """Return `info` once every claim that can be checked without a device holds. `have`: the hooks that the backend answers."""
    hook = "polydraft_backend_info"
    caps = info.capabilities
    claims = {
        "available=False without a reason, wanted one sentence with the next step; give it": info.available or info.reason,
        f"dtypes {caps.dtypes!r}, wanted one or more of {', '.join(ACTIVATION_DTYPES)}; name those that its kernels compute in": (
            caps.dtypes and all(dtype in ACTIVATION_DTYPES for dtype in caps.dtypes)
        ),
        f"kv_dtypes {caps.kv_dtypes!r}, wanted some of {', '.join(KV_DTYPES)} or none; name those that its caches take": (
            all(kv in KV_DTYPES for kv in caps.kv_dtypes)
        ),
        f"weight_packings {caps.weight_packings!r}, wanted some of {', '.join(PACKINGS)} or none; name those that linear takes": (
            all(packing in PACKINGS for packing in caps.weight_packings)
        ),
        f"expert_packings {caps.expert_packings!r}, wanted some of {', '.join(PACKINGS)} or none; name what expert_mlp takes": (
            all(packing in PACKINGS for packing in caps.expert_packings)
        ),
        f"row_order {caps.row_order!r}, wanted one of {', '.join(get_args(RowOrder))}; correct it": (
            caps.row_order in get_args(RowOrder)
        ),
        f"max_window {caps.max_window!r} and max_seqs {caps.max_seqs!r}, wanted at least 1 each; correct them": (
            caps.max_window >= 1 and caps.max_seqs >= 1
        ),
        "capability graph_capture without the hook polydraft_graph_capture; implement the hook or drop the capability": (
            not caps.graph_capture or "polydraft_graph_capture" in have
        ),
        "capability ranks without the hook polydraft_collectives; implement the hook or drop the capability": (
            not caps.ranks or "polydraft_collectives" in have
        ),
        f"ranks {caps.ranks!r}, wanted threads or processes, or '' for none; correct it": (
            caps.ranks in ("", "threads", "processes")
        ),
        "bring_up beside asynchronous, graph_capture or a dtype other than f32; drop those until no kernel is delegated": (
            not caps.bring_up or (not caps.asynchronous and not caps.graph_capture and caps.dtypes == ("f32",))
        ),
    }
    for claim, holds in claims.items():
        if not holds:
            raise PluginError(f"plugin {name!r}: {hook} declares {claim}")
    for contract, version in info.contract_versions.items():
        check_version(name, hook, contract, version)
    exchanged = COLLECTIVES.names() if caps.ranks else ()
    strange = sorted(set(caps.uncapturable) - {*info.contract_versions, *exchanged, "forward_meta"})
    if strange:
        raise PluginError(
            f"plugin {name!r}: {hook} declares uncapturable {', '.join(strange)}, wanted contracts that it implements or "
            "forward_meta; correct the names"
        )
    return info


def check_withdrawn(name: str, info: BackendInfo, withdrawn: Mapping[str, str]) -> None:
    """What an open device takes back is a capability that is declared there, and it says why."""
    declared = info.capabilities.describe()
    for capability, reason in withdrawn.items():
        if declared.get(capability) is not True or not reason:
            raise PluginError(
                f"plugin {name!r}: its device withdraws {capability!r} for the reason {reason!r}, wanted a capability that it "
                "declares as true, and why it lacks it; correct it"
            )


def _check_notes(name: str, notes: object, table: PartialTable) -> None:
    """What a pack says of its kernels is about kernels: of those that it serves, or of contracts that there are."""
    from polydraft.contracts import COMPOSITES, REGISTRY

    where = f"plugin {name!r}: notes of what polydraft_kernels returned"
    if not isinstance(notes, PackNotes):
        raise PluginError(f"{where} are {type(notes).__name__}, wanted polydraft.backend.PackNotes; return that record or none")
    served = {*table.providers, *(part for contract in table.providers for part in contract.split("+"))}
    strange = sorted({*notes.computed_by} - {*table.providers}) + sorted({*notes.uncapturable} - served)
    if strange:
        raise PluginError(f"{where} tell of {', '.join(strange)}, wanted kernels that the table offers; leave these out")
    known = {*REGISTRY.names(), *COMPOSITES} - {*table.providers}
    strange = sorted({*notes.left_out} - known)
    if strange:
        raise PluginError(f"{where} leave out {', '.join(strange)}, wanted contracts that the table does not offer; correct them")


def check_claims(name: str, info: BackendInfo, table: KernelTable) -> None:
    """`contract_versions` and the kernel table say the same."""
    offered = {contract: table.versions[contract] for contract in table.providers}
    differing = sorted(
        contract
        for contract in {*offered, *info.contract_versions}
        if offered.get(contract) != info.contract_versions.get(contract)
    )
    if differing:
        each = ", ".join(
            f"{contract} (declared {info.contract_versions.get(contract, 'not at all')}, offered "
            f"{offered.get(contract, 'not at all')})"
            for contract in differing
        )
        raise PluginError(
            f"plugin {name!r}: contract_versions of polydraft_backend_info and the table of polydraft_kernels differ in {each}; "
            "make them equal"
        )


def check_bring_up(name: str, info: BackendInfo, table: KernelTable) -> None:
    """Kernels that run the reference on host copies are offered only where the capability `bring_up` says so."""
    from polydraft.plugins.bring_up import Delegated

    delegated = sorted(contract for contract, provider in table.providers.items() if isinstance(provider, Delegated))
    if delegated and not info.capabilities.bring_up:
        raise PluginError(
            f"plugin {name!r}: polydraft_kernels delegates {len(delegated)} kernels ({delegated[0]}, ...) to the reference "
            "without declaring bring_up; declare it, or write them"
        )


def _article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
