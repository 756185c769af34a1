"""One run of `polydraft generate`: its requests on an engine, stepped to the end, and the JSON answer.

The command builds it and passes the listeners that receive records as they arrive. It prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polydraft.cli.prompts import Job
from polydraft.cli.tokens import Tokens, request_fields
from polydraft.engine import Engine
from polydraft.errors import RequestError
from polydraft.host.adaptive_drafts import AdaptiveDrafts
from polydraft.interrupt import noted_interrupts
from polydraft.output.request_output import RequestOutput

SCHEMA = "polydraft.generate/1"


class Run:
    """The requests of one command on one fresh engine, in the order they were given."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        """Add every request, or none: a wrong one raises `RequestError` that says where it was read."""
        self.engine, self.interrupted = engine, False
        self.outputs: dict[str, RequestOutput] = {}
        """The last record of each request that has ended."""
        self.ids: list[str] = []
        self._before = engine.device.counters.copy()
        for job in jobs:
            try:
                self.ids.append(engine.add(job.prompt, job.params, id=job.id, stream=len(jobs) == 1))
            except RequestError as error:
                raise RequestError(f"{job.where}: {error}" if job.where else str(error)) from error

    def to_the_end(self, listen: Callable[[RequestOutput], None]) -> None:
        """Step until every request has ended, and the check of a text; Ctrl-C ends requests that have not with what they have."""
        with noted_interrupts() as interrupted:
            while len(self.outputs) < len(self.ids) or (self.engine.checks_text and not self.interrupted):
                if interrupted():
                    self._abort()
                else:
                    self.engine.step()
                for output in self.engine.poll():
                    if output.finished:
                        self.outputs[output.id] = output
                    listen(output)

    def _abort(self) -> None:
        self.interrupted = True
        for request_id in self.ids:
            if request_id not in self.outputs:
                self.engine.abort(request_id)

    def answer(self, *, explain: bool, provenance: bool = False) -> dict[str, Any]:
        """The JSON answer, of schema polydraft.generate/1; with `explain` its `config` has the decisions too, which launches
        have become one (`joined`), what packing changed (`packing_errors`) and what was captured, with `provenance` each request
        who proposed its tokens."""
        tokens = Tokens(self.engine.tokenizer)
        resolved = self.engine.resolved
        config = resolved.describe()
        if explain:
            config["decisions"] = [
                {"name": d.name, "asked": d.asked, "chosen": d.chosen, "reason": d.reason} for d in resolved.decisions
            ]
            config["joined"] = [
                {"contracts": j.contracts, "by": j.by, "captured": j.captured, "reason": j.why, "launches": dict(launches)}
                for j, launches in self.engine.runner.joined()
            ]
            config["packing_errors"] = dict(self.engine.weights.packing_errors)
            config["captured"] = [
                {
                    "draft_tokens": number, "buckets": list(held.buckets), "left_out": list(held.left_out), "graphs": held.graphs,
                    "bytes": held.num_bytes,
                }
                for number, held in self.engine.runner.captured().items()
            ]  # fmt: skip
        return {
            "schema": SCHEMA,
            "backend": resolved.backend,
            "device": resolved.device,
            "model": self.engine.model.name,
            "config": config,
            "requests": [
                {**_request(output), **request_fields(tokens, output, provenance=provenance)}
                for output in (self.outputs[request_id] for request_id in self.ids)
            ],
            "totals": self._totals(self.outputs),
        }

    def _totals(self, outputs: Mapping[str, RequestOutput]) -> dict[str, Any]:
        """Figures of the run; None where nothing was counted. The token that a prefill samples belongs to no round."""
        totals, device = self.engine.totals, self.engine.device
        in_rounds = totals.new_tokens - sum(bool(output.token_ids) for output in outputs.values())
        return {
            "new_tokens": totals.new_tokens,
            "steps": totals.steps,
            "drafts_per_step": list(totals.drafts_per_step),
            "draft_policy": policy.report() if isinstance(policy := self.engine.draft_policy, AdaptiveDrafts) else None,
            "alarms": dict(self.engine.alarms.count),
            "tokens_per_round": in_rounds / totals.rounds if totals.rounds else None,
            "acceptance_per_position": [
                accepted / drafted if drafted else None
                for accepted, drafted in zip(totals.accepted_at, totals.drafted_at, strict=True)
            ],
            "prefill_s": totals.prefill_s,
            "decode_s": totals.decode_s,
            "tokens_per_s": totals.new_tokens / (totals.prefill_s + totals.decode_s) if totals.new_tokens else None,
            "host_syncs": device.counters.host_syncs - self._before.host_syncs,
            "graph_replays": device.counters.graph_replays - self._before.graph_replays,
            "peak_memory_bytes": device.memory(),
        }


def _request(output: RequestOutput) -> dict[str, Any]:
    record = {
        "id": output.id,
        "prompt_ids": list(output.prompt_ids),
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "rounds": list(output.rounds),
        "drafted": output.drafted,
        "accepted": output.accepted,
    }
    return {**record, "error": output.error} if output.error else record
