"""What a cluster of Ray has to have before anything of a model is sent to it: token authentication.

Whoever reaches a port of a cluster without it runs what they like on all nodes. Ray decides by `RAY_AUTH_MODE` when a node is
started, and all processes of the node inherit it.
"""

from __future__ import annotations

from ray._private.authentication.authentication_utils import is_token_auth_enabled

from polydraft.errors import ConfigError


def asks_tokens() -> bool:
    """Whether this node does."""
    return bool(is_token_auth_enabled())


def check_tokens(*, asked: bool, insecure: bool) -> None:
    """Raises `ConfigError` where nodes ask for no token (`asked`), unless told that this is wanted (`insecure`)."""
    if not asked and not insecure:
        raise ConfigError(
            "the Ray cluster asks nobody for a token, wanted RAY_AUTH_MODE=token on all nodes: who reaches it runs any code "
            "there; start it with tokens (docs/ray.md), or say --ray-without-token"
        )
