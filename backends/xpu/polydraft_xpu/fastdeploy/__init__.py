"""The kernel pack `xpu/fastdeploy`: contracts served by the operators of an installed FastDeploy, by adaptors that are data.

`--kernels xpu/fastdeploy` enables it. Where an operator is not there, or has other parameters than those that were read, its
contract stays with the backend, and reports say so. Nothing here imports FastDeploy or Paddle before a device is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from polydraft.backend import PackNotes
from polydraft.errors import ContractError
from polydraft.hooks import hookimpl
from polydraft_xpu.fastdeploy.adaptor import Adaptor, Fill, Given, HostFlag, Source
from polydraft_xpu.fastdeploy.adaptors import ADAPTORS, EVIDENCE

if TYPE_CHECKING:
    from polydraft_paddle.provider import Kernel, Run

    from polydraft.contracts.base import Limits

NAME: Final = "xpu/fastdeploy"


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """Whatever the installed operators serve; `PluginError` where there are none."""
    from polydraft_paddle.variants import pack

    from polydraft_xpu.fastdeploy.installed import are_names, operators, parameters, unfit, version

    found = operators(list(dict.fromkeys(one.operator for one in ADAPTORS)))
    calls: dict[str, list[Call]] = {}
    against: dict[str, list[str]] = {}
    for one in ADAPTORS:
        problem = unfit(one, found)
        if problem:
            against.setdefault(one.contract, []).append(problem)
        else:
            operator = found[one.operator]
            calls.setdefault(one.contract, []).append(Call(one, operator, by_name=are_names(parameters(operator))))
    served = {name: mine for name, mine in calls.items() if any(call.adaptor.fits is None for call in mine)}
    table = pack(NAME, device, {name: kernel_of(mine) for name, mine in served.items()})
    table.notes = PackNotes(
        computed_by={name: ", ".join(dict.fromkeys(call.adaptor.operator for call in mine)) for name, mine in served.items()},
        left_out={
            name: f"{version() or 'the installed FastDeploy'} does not fit: {'; '.join(dict.fromkeys(why))}"
            for name, why in against.items()
            if name not in served
        },
        uncapturable=tuple(name for name, mine in served.items() if any(call.adaptor.waits for call in mine)),
        evidence=EVIDENCE,
        library=version(),
    )
    return table


@dataclass
class Call:
    """An operator with its adaptor: called with the tensors of a step, it gives results by name."""

    adaptor: Adaptor
    operator: Callable[..., Any]
    by_name: bool
    """Whether it is known by which names it takes its arguments; else they go in the order of its C++ function."""
    _filled: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Tensors that are the same in every call, by value, dtype, shape and place."""

    def __call__(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the operator returns and what it has written. Raises `ContractError` where it does not take its arguments or
        returns something else than was read of it."""
        given = dict(self._arguments(values))
        answer = self._called(given)
        came = () if answer is None else tuple(answer) if isinstance(answer, (list, tuple)) else (answer,)
        returns = self.adaptor.returns
        if len(came) < len(returns):
            raise ContractError(
                f"{NAME}: {self.adaptor.operator} returned {len(came)} tensors, wanted {', '.join(returns)}; leave the pack out "
                "of --kernels and report it"
            )
        return {**dict(zip(returns, came, strict=False)), **{name: given[name] for name in self.adaptor.writes}}

    def _called(self, given: Mapping[str, Any]) -> Any:
        try:
            return self.operator(**given) if self.by_name else self.operator(*given.values())
        except TypeError as error:
            raise ContractError(
                f"{NAME}: {self.adaptor.operator} does not take {', '.join(given)} ({error}); leave the pack out of --kernels "
                "and report it"
            ) from error

    def _arguments(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, source in self.adaptor.takes.items():
            value = self._made(source, values)
            yield name, value.clone() if name in self.adaptor.writes else value

    def _made(self, source: Source, values: Mapping[str, Any]) -> Any:
        if isinstance(source, Given):
            value = values[source.name]
            return value.astype(source.dtype) if source.dtype and str(value.dtype) != f"paddle.{source.dtype}" else value
        if not isinstance(source, (Fill, HostFlag)):
            return source
        import paddle

        if isinstance(source, HostFlag):
            return paddle.to_tensor([source.value], place=paddle.CPUPlace())
        like = values[source.like]
        key = source.value, source.dtype, tuple(like.shape), str(like.place)
        if key not in self._filled:
            self._filled[key] = paddle.full_like(like, source.value, dtype=source.dtype)
        return self._filled[key]


def kernel_of(calls: Sequence[Call]) -> Kernel:
    """The kernel of one contract: the first call that fits what it is bound to, with the arithmetic around it."""

    def bind(a: Any, limits: Limits) -> Run:
        from polydraft_xpu.fastdeploy import steps

        call = next(one for one in calls if one.adaptor.fits is None or one.adaptor.fits(a))
        step = getattr(steps, call.adaptor.step)

        def run(n: int) -> None:
            going = step(a, limits, n)
            values = next(going, None)
            if values is not None:
                with suppress(StopIteration):
                    going.send(call(values))

        return run

    return bind
