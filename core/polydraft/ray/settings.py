"""What is deployed on a cluster: how many replicas of what size, and how they are reached.

Nothing here needs Ray. The command line and the arguments of an application become this record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from polydraft.config import EngineConfig
from polydraft.errors import ConfigError
from polydraft.serving.settings import ServerSettings

NAME = "polydraft"
"""Of the application, unless Serve's configuration gives another."""
LATER = "since a replica that starts later would have other weights; deploy again instead"
NOT_OURS = {
    "max_connections": "--max-connections was given with --ray, where Serve's proxy has the connections; leave it out",
    "head_s": "--head-timeout was given with --ray, where Serve's proxy has the connections; leave it out",
    "admin_key_file": f"--admin-key-file was given with --ray, which is refused {LATER}",
}
"""Options of the command that there are none of on a cluster, and why."""
BUSY = 0.75
"""Share of a replica's slots that are wanted busy, where their number follows the load."""


@dataclass(frozen=True)
class Deployment:
    """Settings of one application. `engine`: fields of `EngineConfig`; `server`: of `ServerSettings`, but keys."""

    engine: Mapping[str, Any]
    server: Mapping[str, Any] = field(default_factory=dict)
    api_key_file: str | None = None
    """Read where an ingress runs, so that no key is in the cluster's memory."""
    replicas: tuple[int, int] = (1, 1)
    """Replicas of the engine at least and at most; between them their number follows the load."""
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """How fast it does: fields of Serve's `AutoscalingConfig`."""
    ingresses: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    """What a replica takes of its node, by Ray's names: CPU, GPU, or those that nodes were started with."""
    prefixes: bool = True
    """Whether the router looks at prefixes, and not at loads alone."""
    insecure: bool = False
    """Whether a cluster without token authentication will do."""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Deployment:
        """Of the arguments of an application, as YAML has them. Raises `ConfigError` for wrong names and values."""
        known = {one.name for one in fields(cls)}
        unknown = [name for name in given if name not in known]
        if unknown or "engine" not in given:
            got = f"no argument {unknown[0]!r}" if unknown else "an argument `engine`, which is missing"
            raise ConfigError(f"an application on Ray has {got}, wanted some of {', '.join(sorted(known))}; correct it")
        named = dict(given)
        if "replicas" in named:
            named["replicas"] = replicas(str(named["replicas"]))
        return cls(**named)

    def __post_init__(self) -> None:
        known = {one.name for one in fields(ServerSettings)}
        for name in (name for name in self.server if name not in known):
            raise ConfigError(f"the server has no setting {name!r}, wanted some of {', '.join(sorted(known))}; correct it")
        ServerSettings(**self.server)
        EngineConfig.from_mapping(self.engine)
        if self.ingresses < 1:
            raise ConfigError(f"an application has {self.ingresses} ingresses, wanted at least 1; correct it")
        for name, amount in self.resources.items():
            if not 0 < amount < float("inf"):
                raise ConfigError(f"a replica takes {amount} of {name}, wanted more than 0; correct it or leave it out")
        refused = {
            "enable_sleep_mode": self.engine.get("enable_sleep_mode"), "admin_key": self.server.get("admin_key"),
            "api_keys": self.server.get("api_keys"), "port 0": self.server.get("port") == 0,
        }  # fmt: skip
        for name in (name for name, value in refused.items() if value):
            raise ConfigError(f"{name} was given and is not served on Ray, {REASONS[name]}")

    @property
    def slots(self) -> int:
        """Requests that a replica serves at once."""
        return int(self.engine.get("max_num_seqs") or EngineConfig.max_num_seqs)

    @property
    def slack(self) -> int:
        """Requests that a replica may have more than the least busy one, and still be preferred for what it has cached."""
        return max(self.slots // 4, 1)

    def actor_options(self) -> dict[str, Any]:
        """The resources as options of an actor."""
        own = dict(self.resources)
        options = {f"num_{name.lower()}s": own.pop(name) for name in ("CPU", "GPU") if name in own}
        return {**options, **({"resources": own} if own else {})}


REASONS = {
    "enable_sleep_mode": "where replicas are taken away by their number; leave it out",
    "admin_key": LATER,
    "port 0": "whose proxies on all nodes have one port; give its number",
    "api_keys": "where arguments lie in the cluster's memory; give api_key_file",
}


def replicas(value: str) -> tuple[int, int]:
    """Of N, or MIN:MAX. Raises `ConfigError` for anything else."""
    least, _, most = value.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"the number of replicas is {value!r}, wanted N or MIN:MAX, 1 or more; correct it")
    return found


def resources(value: str) -> dict[str, float]:
    """Of NAME=AMOUNT,... Raises `ConfigError` for anything else."""
    try:
        return {name.strip(): float(amount) for name, amount in (part.split("=") for part in value.split(","))}
    except ValueError:
        raise ConfigError(f"the resources are {value!r}, wanted NAME=AMOUNT,..., such as CPU=8,GPU=1; correct them") from None
