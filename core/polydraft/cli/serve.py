"""The command `polydraft serve`: turns options into an engine's configuration and a server's settings, and runs both.

It needs the extra `serve`. It listens on loopback unless another address is given, and ends when it is asked to.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click

from polydraft.cli.options import ENGINE, common
from polydraft.cli.options import engine as engine_options
from polydraft.errors import ConfigError

EXAMPLES = """\b
Examples:
  polydraft serve
  polydraft serve --model path/to/MiMo-7B --backend cuda --port 8001 --api-key-file keys.txt
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def f(x):", "max_tokens": 32}'

The playground is at http://127.0.0.1:8000/, figures for Prometheus are at /metrics; docs/serving.md has the rest.
"""
NEEDED = ("starlette", "uvicorn", "msgspec", "zmq", "prometheus_client")
OWN = ("logprobs", "seed", "constraints", "enable_sleep_mode", "weights_digest")
"""Options that configure the engine besides those that it shares with other commands; what is left configures the server."""
RAY = {
    "ray_replicas": "replicas", "ray_ingresses": "ingresses", "ray_resources": "resources", "ray_no_prefixes": "prefixes",
    "ray_without_token": "insecure",
}  # fmt: skip
"""Options of a cluster, and the arguments of an application that they are."""
MAX_NUM_SEQS = 32
MOST_LOGPROBS = 20


@click.command("serve", epilog=EXAMPLES)
@click.option("--host", metavar="ADDRESS", help="Where to listen.  [default: 127.0.0.1]")
@click.option("--port", type=int, metavar="N", help="Port to listen on; 0 takes a free one.  [default: 8000]")
@engine_options(max_num_seqs=MAX_NUM_SEQS)
@click.option("--served-model-name", metavar="NAME", help="Name under which the model is served.  [default: its directory's]")
@click.option("--logprobs", type=int, metavar="N", help="Log probabilities beside a token at most; -1: none.  [default: 20]")
@click.option("--constraints", is_flag=True, default=None, help="Serve grammars; steps with one are split in two.")
@click.option("--enable-sleep-mode", is_flag=True, default=None, help="Let /admin/sleep give the device's memory back.")
@click.option("--weights-digest", is_flag=True, default=None, help="Tell a digest of the weights with every text.")
@click.option("--seed", type=int, metavar="S", help="Base of the seeds of requests that bring none.  [default: 0]")
@click.option("--max-requests", type=int, metavar="N", help="Running and waiting at most; then 429.  [default: 256]")
@click.option("--queue-timeout", "queue_s", type=float, metavar="S", help="Seconds to the first token at most.  [default: 60]")
@click.option("--max-connections", type=int, metavar="N", help="Connections at most.  [default: as descriptors allow]")
@click.option("--head-timeout", "head_s", type=float, metavar="S", help="Seconds a request's headers may take.  [default: 20]")
@click.option("--stall-timeout", "stall_s", type=float, metavar="S", help="Seconds a client may stall.  [default: 60]")
@click.option("--drain-timeout", "drain_s", type=float, metavar="S", help="Seconds to end in when stopped.  [default: 30]")
@click.option("--start-timeout", "start_s", type=float, metavar="S", help="Seconds to build an engine in.  [default: 1800]")
@click.option("--watchdog-timeout", "watchdog_s", type=float, metavar="S", help="Seconds a step may take.  [default: 300]")
@click.option("--max-body-bytes", type=int, metavar="N", help="Largest request.  [default: 4194304]")
@click.option("--max-new-tokens", type=int, metavar="N", help="Tokens of a text at most.  [default: the model's length]")
@click.option("--api-key-file", metavar="FILE", help="One key a line; a request then needs one of them.")
@click.option("--admin-key-file", metavar="FILE", help="Key of the administrative routes, which are closed without.")
@click.option(
    "--cors-origin", "cors_origins", multiple=True, metavar="URL", help="Let pages of this origin call; may be repeated."
)
@click.option("--chat-template", metavar="FILE", help="Jinja template for chat.  [default: the checkpoint's]")
@click.option("--reasoning-parser", metavar="NAME", help="How reasoning is marked, or none.  [default: by the chat template]")
@click.option("--tool-call-parser", metavar="NAME", help="How tools are called, or none.  [default: by the chat template]")
@click.option("--log-file", metavar="FILE", help="Write events there.  [default: standard error]")
@click.option("--log-prompts", is_flag=True, default=None, help="Write texts into the log, too.")
@click.option("--no-playground", is_flag=True, help="Do not serve the page at /.")
@click.option("--ray", is_flag=True, help="Serve on the Ray cluster of this machine, or of RAY_ADDRESS; see docs/ray.md.")
@click.option("--ray-replicas", metavar="N|MIN:MAX", help="Engines; between MIN and MAX by load.  [default: 1]")
@click.option("--ray-ingresses", type=int, metavar="N", help="Replicas of the HTTP side.  [default: 1]")
@click.option("--ray-resources", metavar="NAME=AMOUNT,...", help="What an engine takes of its node.  [default: CPU=1]")
@click.option("--ray-no-prefixes", is_flag=True, default=None, help="Choose engines by load alone.")
@click.option("--ray-without-token", is_flag=True, default=None, help="Accept a cluster that asks nobody for a token.")
@common
def command(as_json: bool, no_playground: bool, ray: bool, **options: Any) -> int:
    """Serve an OpenAI-compatible HTTP interface, metrics, and a playground page."""
    _check_extra("ray" if ray else "serve", NEEDED)
    from polydraft.config import EngineConfig
    from polydraft.serving.main import run
    from polydraft.serving.settings import ServerSettings, read_keys

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    of_ray = {name: given.pop(name) for name in RAY if name in given}
    if of_ray and not ray:
        raise ConfigError(f"--{next(iter(of_ray)).replace('_', '-')} was given without --ray; add it, or leave this out")
    engine = {name: given.pop(name) for name in (*ENGINE, *OWN) if name in given}
    engine.setdefault("max_num_seqs", MAX_NUM_SEQS)
    most = engine.pop("logprobs", MOST_LOGPROBS)
    engine |= {"logprobs": most} if most >= 0 else {}
    EngineConfig.from_mapping(engine)
    if ray:
        return _on_ray(engine, {**given, "playground": not no_playground}, of_ray, as_json=as_json)
    keys = read_keys(given.pop("api_key_file", None))
    file = given.pop("admin_key_file", None)
    admin = read_keys(file)
    if len(admin) > 1:
        raise ConfigError(f"--admin-key-file {file} has {len(admin)} lines, wanted one key; give a file with that alone")
    settings = ServerSettings(api_keys=keys, admin_key=admin[0] if admin else "", playground=not no_playground, **given)
    _warn(settings.host, bool(keys))
    return run(engine, settings, ready=partial(_ready, as_json))


def _check_extra(extra: str, packages: Sequence[str]) -> None:
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"polydraft serve needs {', '.join(lacking)}; install the extra: pip install 'polydraft[{extra}]'")


def _on_ray(engine: Mapping[str, Any], server: dict[str, Any], options: Mapping[str, Any], *, as_json: bool) -> int:
    """Serve on a cluster. Its options become arguments of the application; what a cluster has none of is refused."""
    from polydraft.ray.settings import NOT_OURS, Deployment, resources

    for name in (name for name in NOT_OURS if name in server):
        raise ConfigError(NOT_OURS[name])
    keys = server.pop("api_key_file", None)
    given = {name: options[option] for option, name in RAY.items() if option in options}
    if "resources" in given:
        given["resources"] = resources(given["resources"])
    if "prefixes" in given:
        given["prefixes"] = False
    wanted = Deployment.from_mapping({**given, "engine": engine, "server": server, "api_key_file": keys})
    _check_extra("ray", ("ray",))
    from polydraft.ray.application import run

    host, port = server.get("host", "127.0.0.1"), server.get("port", 8000)
    _warn(host, keyed=keys is not None)
    return run(wanted, host=host, port=port, ready=partial(_ready, as_json))


def _ready(as_json: bool, url: str, chosen: Mapping[str, str]) -> None:
    """Say that requests are served."""
    lines = [f"serving at {url}", *(f"{name.replace('_', ' ')}: {why}" for name, why in chosen.items())]
    click.echo(json.dumps({"schema": "polydraft.serve/1", "url": url, **chosen}) if as_json else "\n".join(lines))


def _warn(host: str, keyed: bool) -> None:
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not keyed:
        click.echo(f"polydraft: {host} can be reached from other machines and no key is asked for; see --api-key-file", err=True)
