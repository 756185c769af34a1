"""How plugins are asked: a pluggy manager that holds exactly the plugins that were named, and says whose answer is whose.

pluggy calls the implementations of a hook in turn and returns what they returned; it tells neither which of them raised nor
which returned what. So each implementation is registered in a function of its own that checks what it returns, and names its
plugin in whatever goes wrong. Wrappers, `tryfirst`, `trylast`, `optionalhook` and `specname` are pluggy's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import pluggy

from polydraft import hooks
from polydraft.backend import BackendInfo
from polydraft.errors import PluginError
from polydraft.plugins.checks import Implementation, accept, accept_wrapped, answered, check_info, implementations, named
from polydraft.plugins.loading import Loaded

_ENDED: Final = object()


class Manager(pluggy.PluginManager):
    """The plugins of one engine. A hook is called as ever, `manager.hook.polydraft_open_device(...)`; `gather` says as well who
    answered what."""

    def __init__(self, loaded: Sequence[Loaded]) -> None:
        """Register `loaded`, which are asked in this order. Raises `PluginError` where one is named twice."""
        super().__init__(hooks.PROJECT)
        self.add_hookspecs(hooks)
        self._loaded = {one.label: one for one in loaded}
        for one in reversed(loaded):  # pluggy asks first who was registered last
            self._enter(one)

    def _enter(self, one: Loaded) -> None:
        try:
            self.register(_Checked(one), one.label)
        except ValueError as error:
            raise PluginError(
                f"the {one.role.noun} {one.name!r} ({one.origin}) is named twice, or its module is also named as something else; "
                "name it once"
            ) from error
        except pluggy.PluginValidationError as error:  # whatever the checks did not foresee
            raise PluginError(
                f"plugin {one.name!r} does not fit a hook's signature: {' '.join(str(error).split())}; fix its arguments"
            ) from error

    def answering(self, hook: str) -> tuple[Loaded, ...]:
        """The plugins that answer `hook`, in the order in which they are asked. Those that only wrap it are not among them."""
        return self._of(hook, wraps=False)

    def _of(self, hook: str, *, wraps: bool) -> tuple[Loaded, ...]:
        found = reversed(getattr(self.hook, hook).get_hookimpls())  # pluggy's list ends with who is called first
        return tuple(self._loaded[one.plugin_name] for one in found if one.wrapper is wraps)

    def gather(self, hook: str, **arguments: Any) -> list[tuple[Loaded, Any]]:
        """Call a hook that many answer: each plugin with its answer, in the order in which they were asked."""
        results, owners = getattr(self.hook, hook)(**arguments), self.answering(hook)
        if len(results) != len(owners):  # none of them returned None, so a wrapper did it
            wrapping = " or ".join(repr(one.name) for one in self._of(hook, wraps=True))
            raise PluginError(
                f"plugin {wrapping}: {hook} made {len(results)} answers of the {len(owners)} that it wraps; replace answers in "
                "their places, and add one by another function without wrapper=True"
            )
        return list(zip(owners, results, strict=True))

    def identity(self, backend: Loaded, spec: str) -> BackendInfo:
        """Ask who the backend is on the device `spec`, which is not opened."""
        info: BackendInfo = self.hook.polydraft_backend_info(spec=spec)
        check_info(backend.name, answered(backend.plugin), info)
        if backend.entry and info.name != backend.entry:
            raise PluginError(
                f"plugin {backend.entry!r} ({backend.origin}): polydraft_backend_info names it {info.name!r}, wanted the name of "
                "its entry point; make the two equal"
            )
        return info


def identify(backend: Loaded, spec: str = "") -> BackendInfo:
    """Ask a backend that no engine has, alone, who it is on the device `spec`."""
    return Manager((backend,)).identity(backend, spec)


class _Checked:
    """What a manager holds of a plugin: its marked functions, checked."""

    def __init__(self, loaded: Loaded) -> None:
        self._plugin = loaded.plugin
        for one in implementations(loaded.plugin):
            setattr(self, one.attribute, _checked(loaded, one))

    def __eq__(self, other: object) -> bool:
        """Whether it is of the same plugin, which pluggy registers once only."""
        return isinstance(other, _Checked) and other._plugin is self._plugin

    def __hash__(self) -> int:
        return id(self._plugin)


def _checked(plugin: Loaded, one: Implementation) -> Callable[..., Any]:
    """`one` with its marker and the names of its arguments, which pluggy reads from the function that is wrapped here."""
    if not one.specified:
        return one.function
    function, hook = one.function, one.hook

    @functools.wraps(function)
    def answer(*arguments: Any) -> Any:
        with named(plugin.name, hook):
            return accept(plugin.name, hook, plugin.role, function(*arguments))

    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Generator[None, Any, Any]:
        with named(plugin.name, hook):
            running = function(*arguments)
            if next(running, _ENDED) is _ENDED:
                raise PluginError(f"plugin {plugin.name!r}: {hook} has wrapper=True and did not yield; yield once in every case")
            try:
                inner = yield
            except BaseException as error:  # noqa: BLE001  it belongs to who is wrapped, and the wrapper may handle it
                go_on = functools.partial(running.throw, error)
            else:
                go_on = functools.partial(running.send, inner)
            try:
                go_on()
            except StopIteration as end:
                return accept_wrapped(plugin.name, hook, end.value)
            running.close()
            raise PluginError(f"plugin {plugin.name!r}: {hook} has wrapper=True and yielded twice; yield once")

    chosen = wrapper if one.wraps else answer
    setattr(chosen, f"{hooks.PROJECT}_impl", one.options)
    return chosen
