"""The router of the engine's handle: which replica a request goes to, by the prefix of its prompt (`polydraft.ray.prefixes`).

Serve asks it in the ingress. Each ingress remembers what it sent where, so nothing is asked over the network, and nothing of it
dies with a node.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from polydraft.ray.prefixes import Sent, ranked


class PrefixRouter(RequestRouter):
    """Prefers replicas that have a request's prefix, which is its second argument; one without goes to the least busy one."""

    def initialize_state(self, slack: int = 1) -> None:
        """`slack`: as of `ranked`."""
        self._slack, self._sent = slack, Sent()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas for one request. Where all are full Serve waits, and asks again."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        prefix = self._prefix(pending_request)
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in replicas.items()}
        blocks = {name: self._sent.blocks(name, prefix) for name in replicas}
        return [[replicas[name] for name in rank] for rank in ranked(prefix, loads, blocks, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where it went."""
        del result
        self._sent.add(replica_id.unique_id, self._prefix(pending_request))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """As Serve's, and forget those that are gone."""
        super().update_replicas(replicas)
        self._sent.keep(one.unique_id for one in self.curr_replicas)

    @staticmethod
    def _prefix(request: PendingRequest | None) -> bytes:
        return request.args[1] if request is not None and len(request.args) > 1 else b""
