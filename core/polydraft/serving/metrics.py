"""The figures at `/metrics`: counts of requests as the routes see them, and of the engine as it reports them.

Names that vLLM has are vLLM's, so that its dashboards work; the others begin with `polydraft:`. No step is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polydraft.serving.wire import Stats

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
LABELS = ("model_name",)


class _Engine(Collector):
    """Counts of engines, as last reported; they begin anew with a process, as Prometheus expects of counters. Engines that have
    names are told apart by the label `replica`."""

    def __init__(self, model: str) -> None:
        self.stats: Mapping[str, Stats] = {}
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """The families, of every engine that has reported anything."""
        families: dict[str, Metric] = {}
        for replica, stats in self.stats.items():
            for family in self._families(stats):
                known = families.setdefault(family.name, family)
                for sample in family.samples:
                    sample.labels.update({"replica": replica} if replica else {})
                if known is not family:
                    known.samples += family.samples
        return list(families.values())

    def _families(self, s: Stats) -> Iterator[Metric]:
        rounds, share = max(s.rounds, 1), (s.kv_blocks - s.kv_blocks_free) / max(s.kv_blocks, 1)
        idle = max(1 - s.device_busy_s / max(s.uptime_s, 1e-9), 0.0)
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that hold a slot.", s.running),
            ("vllm:num_requests_waiting", "Requests that wait for one.", s.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", share),
            ("polydraft:tokens_per_round", "Tokens that a decode round put out, on average.", 1 + s.accepted / rounds),
            ("polydraft:host_gap_seconds", "Host time between two steps, on average.", s.host_gap_s / max(s.steps, 1)),
            ("polydraft:device_idle_ratio", "Share of time in which the device had nothing to do, at least.", idle),
        ):
            yield self._one(GaugeMetricFamily, name, text, value)
        for name, text, value in (
            ("vllm:num_preemptions", "Requests that had to make room.", s.preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", s.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found there.", s.prefix_hits),
            ("vllm:spec_decode_num_drafts", "Decode rounds with drafts to verify.", sum(s.drafted_at[:1])),
            ("vllm:spec_decode_num_draft_tokens", "Drafts that the target verified.", s.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that became output.", s.accepted),
            ("polydraft:steps", "Steps of the engine.", s.steps),
            ("polydraft:step_seconds", "Host time within steps.", s.step_s),
        ):
            yield self._one(CounterMetricFamily, name, text, value)
        for name, text, counts in (
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that became output, by place.", s.accepted_at),
            ("polydraft:draft_tokens_per_pos", "Drafts that were verified, by place.", s.drafted_at),
        ):
            family = CounterMetricFamily(name, text, labels=(*LABELS, "position"))
            for place, count in enumerate(counts):
                family.add_metric((self._model, str(place)), count)
            yield family
        made = CounterMetricFamily("polydraft:steps_by_drafts", "Steps by drafts made a request.", labels=(*LABELS, "drafts"))
        for number, count in enumerate(s.drafts_per_step):
            made.add_metric((self._model, str(number)), count)
        yield made
        told = CounterMetricFamily(
            "polydraft:acceptance_alarms", "How often acceptance looked wrong, by kind.", labels=(*LABELS, "kind")
        )
        for kind, count in s.alarms.items():
            told.add_metric((self._model, kind), count)
        yield told
        family_of = GaugeMetricFamily("polydraft:acceptance_per_position", "Share accepted.", labels=(*LABELS, "position"))
        for place, (accepted, drafted) in enumerate(zip(s.accepted_at, s.drafted_at, strict=True)):
            family_of.add_metric((self._model, str(place)), accepted / drafted if drafted else 0.0)
        yield family_of
        waits = GaugeMetricFamily(
            "polydraft:rank_plans_waiting", "Messages of rank 0 that a rank has not taken yet.", labels=(*LABELS, "rank")
        )
        for rank, count in enumerate(s.behind, 1):
            waits.add_metric((self._model, str(rank)), count)
        yield waits

    def _one(self, kind: Any, name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=LABELS)
        family.add_metric((self._model,), value)
        return family  # type: ignore[no-any-return]


class _Named(CollectorRegistry):
    """A registry whose samples say of which replica they are."""

    def __init__(self, replica: str) -> None:
        super().__init__()
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        """As the registry's; an engine's samples have its own name."""
        for family in super().collect():
            for sample in family.samples:
                sample.labels.setdefault("replica", self._replica)
            yield family


class Metrics:
    """One registry a server; `replica`: which of several it is, where there are."""

    def __init__(self, model: str, replica: str = "") -> None:
        registry = self._registry = _Named(replica) if replica else CollectorRegistry()
        self._engine = _Engine(model)
        registry.register(self._engine)

        def counter(name: str, text: str, *labels: str) -> Any:
            made = Counter(name, text, (*LABELS, *labels), registry=registry)
            return made if labels else made.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Any:
            return Histogram(name, text, LABELS, registry=registry, buckets=buckets).labels(model)

        self._model = model
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens put out.")
        self._success = counter("vllm:request_success", "Texts that ended, by reason.", "finished_reason")
        self._refused = counter("polydraft:requests_refused", "Requests that were not served, by status.", "status")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From the request to its first token.")
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two pieces of a text, by token.")
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Tokens of the prompt, by request.", TOKENS)
        self.text_length = histogram("vllm:request_generation_tokens", "Tokens of the text, by request.", TOKENS)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From the request to the end of its text.")

    def gauge(self, name: str, text: str, values: Mapping[str, Callable[[], float]], label: str = "") -> None:
        """Add a figure that is read when the page is. `values`: by the value of `label`; one under "" where there is no label."""
        made = Gauge(name, text, (*LABELS, label) if label else LABELS, registry=self._registry)
        for value, read in values.items():
            made.labels(*((self._model, value) if label else (self._model,))).set_function(read)

    def ended(self, reason: str, prompt_tokens: int, new_tokens: int) -> None:
        """A text ended."""
        self.prompt_length.observe(prompt_tokens)
        self.text_length.observe(new_tokens)
        self._success.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        """A request was answered with an error."""
        self._refused.labels(self._model, str(status)).inc()

    def text(self, stats: Mapping[str, Stats]) -> bytes:
        """The page; without `stats`, what engines last reported."""
        self._engine.stats = stats or self._engine.stats
        return generate_latest(self._registry)
