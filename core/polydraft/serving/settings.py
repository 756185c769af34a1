"""The settings of a server: one frozen record of addresses, limits, keys and what it shows.

The command line builds it, routes read it. It does not change, and nothing in it configures an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polydraft.errors import ConfigError
from polydraft.serving import reasoning, tool_calls
from polydraft.serving.markers import AUTO, check_name

SECONDS = ("queue_s", "head_s", "stall_s", "drain_s", "start_s", "watchdog_s")
"""Settings that are times; `queue_s` is the option `--queue-timeout`."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server. Seconds, bytes and counts are positive."""

    host: str = "127.0.0.1"
    """Address to listen on; anything else than loopback makes the server reachable from outside."""
    port: int = 8000
    served_model_name: str = ""
    """Name under which the model is served; "" is its directory's."""
    max_requests: int = 256
    """Requests in the engine at most, running and waiting; further ones are answered 429."""
    queue_s: float = 60.0
    """Seconds that a request may wait for its first token; then it is answered 503."""
    max_connections: int = 0
    """Connections at once at most; 0: as many as the process may have file descriptors for."""
    head_s: float = 20.0
    """Seconds that a client may take to send its request's line and headers."""
    stall_s: float = 60.0
    """Seconds that a client may take to send its request's body, or to read what it was sent."""
    drain_s: float = 30.0
    """Seconds that running requests have to end when the server is asked to stop."""
    start_s: float = 1800.0
    """Seconds that the engine's process may take to build the engine."""
    watchdog_s: float = 300.0
    """Seconds that an engine may take for one step; then its process is ended, and another one started."""
    max_body_bytes: int = 4 << 20
    max_choices: int = 64
    """Texts that one request may ask for: prompts times n."""
    max_new_tokens: int = 0
    """Tokens that one text may have; 0: as many as the model's length allows."""
    api_keys: tuple[str, ...] = ()
    """Keys of which a request needs one; () asks for none."""
    admin_key: str = ""
    """Key of the administrative routes; "" closes them."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server; () allows none."""
    chat_template: str = ""
    """File with a Jinja template in the place of the checkpoint's."""
    reasoning_parser: str = AUTO
    """How reasoning is told from the reply: a name of `reasoning.FORMS`, `none`, or `auto`, which the chat template decides."""
    tool_call_parser: str = AUTO
    """How calls of tools are read: a name of `tool_calls.FORMS`, `none`, or `auto`, which the chat template decides."""
    log_file: str = ""
    """Where events are written, one JSON object a line; "" is standard error."""
    log_prompts: bool = False
    """Write prompts and texts to the log, too."""
    playground: bool = True
    """Serve the playground page at /."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "max_choices", *SECONDS):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{_option(name)} is {getattr(self, name)}, wanted a number above 0; correct it")
        for name in ("max_new_tokens", "max_connections"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_option(name)} is {getattr(self, name)}, wanted 0 (no bound) or more; correct it")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"--port is {self.port}, wanted 0 (any free one) to 65535; correct it")
        check_name("--reasoning-parser", self.reasoning_parser, reasoning.FORMS)
        check_name("--tool-call-parser", self.tool_call_parser, tool_calls.FORMS)
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty; give it at least one character, or leave it out")


def _option(name: str) -> str:
    """A setting as the command line calls it."""
    return "--" + (name.replace("_s", "-timeout") if name in SECONDS else name.replace("_", "-"))


def read_keys(file: str | None) -> tuple[str, ...]:
    """The keys of a file, one a line; () without one. Raises `ConfigError` where it cannot be read, or has none."""
    if file is None:
        return ()
    try:
        found = tuple(line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a file with one key a line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8 ({error}); give a file with one key a line") from error
    if not found:
        raise ConfigError(f"{file} has no key, wanted one a line; add one, or leave the option out")
    return found
