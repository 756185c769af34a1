"""The application of Ray Serve, made of settings: deployments of ingresses and of engines, and how Serve is to run them.

Serve's own configuration names `polydraft.ray:application`, with arguments (`Deployment`); the command line calls `run`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.api import _get_global_client
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig

from polydraft.errors import ConfigError, DeviceError
from polydraft.ray.cluster import asks_tokens, check_tokens
from polydraft.ray.ingress import Ingress
from polydraft.ray.replica import EngineReplica
from polydraft.ray.router import PrefixRouter
from polydraft.ray.settings import BUSY, NAME, Deployment
from polydraft.serving.main import Ready
from polydraft.serving.settings import ServerSettings

HEALTH_S = 1.0
"""Seconds between two questions of Serve about a replica's health."""
WAIT_LOOP_S = 0.5
"""Seconds between two looks of Serve whether a replica that is to end still has requests."""
INGRESS_REQUESTS = 1000
"""Requests that one ingress serves at once; of those, engines take what they have slots for."""


def application(given: Mapping[str, Any]) -> serve.Application:
    """The application of `Deployment`'s fields, as Serve's configuration has them under `args`. Raises `ConfigError` for wrong
    ones."""
    return bound(Deployment.from_mapping(given))


def bound(wanted: Deployment) -> serve.Application:
    """The application: every limit of Serve follows one of ours."""
    settings = ServerSettings(**wanted.server)
    least, most = wanted.replicas
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        limits = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": max(BUSY * wanted.slots, 1.0)}
        scaling = {"autoscaling_config": AutoscalingConfig(**{**limits, **wanted.scaling})}
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"slack": wanted.slack})
    routing = {"request_router_config": router} if wanted.prefixes else {}
    ending = {
        "graceful_shutdown_timeout_s": settings.drain_s, "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
        "health_check_period_s": HEALTH_S,
    }  # fmt: skip
    engine = serve.deployment(
        EngineReplica, name="Engine", max_ongoing_requests=wanted.slots, max_queued_requests=settings.max_requests,
        ray_actor_options=wanted.actor_options(), **scaling, **ending, **routing,
    )  # fmt: skip
    ingress = serve.deployment(
        Ingress, name="Ingress", num_replicas=wanted.ingresses, max_ongoing_requests=INGRESS_REQUESTS, **ending
    )
    server = dict(wanted.server)
    return ingress.bind(engine.bind(dict(wanted.engine), server, insecure=wanted.insecure), server, wanted.api_key_file)


def run(wanted: Deployment, *, host: str, port: int, ready: Ready) -> int:
    """Deploy on the cluster that Ray finds (RAY_ADDRESS, or the one of this machine), call `ready(url, {})` when it serves, and
    take it away when a signal comes: texts may end within `drain_s`. Returns 0. Raises `ConfigError` where there is no cluster,
    or it asks for no token; `DeviceError` where the application cannot be started."""
    try:
        ray.init(address="auto", namespace=NAME, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise ConfigError(
            f"there is no Ray cluster: {error}; start one with `ray start --head`, or name it in RAY_ADDRESS"
        ) from None
    try:
        check_tokens(asked=ray.get(ray.remote(num_cpus=0)(asks_tokens).remote()), insecure=wanted.insecure)
        serve.start(http_options=HTTPOptions(host=host, port=port))
        if NAME in serve.status().applications:
            raise ConfigError(
                f"the cluster has an application {NAME!r} already; end its command first, or change it by Serve's configuration"
            )
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        try:
            serve.run(bound(wanted), name=NAME, route_prefix="/")
        except RuntimeError as error:
            told = [one.message.strip().splitlines() for one in serve.status().applications[NAME].deployments.values()]
            serve.delete(NAME)
            raise DeviceError("the application did not start: " + "; ".join(lines[-1] for lines in told if lines)) from error
        http = _get_global_client().http_config  # a Serve that ran before keeps its own
        ready(f"http://{http.host}:{http.port}", {})
        stop.wait()
        serve.delete(NAME)
    finally:
        ray.shutdown()
    return 0
