"""What the daemon counts, as Prometheus reads it (text format 0.0.4). Nothing of what anybody wrote is in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from localllm.daemon.link import Granted
from localllm.errors import LocalLLMError
from localllm.types import BATCH_BOUNDS, STEP_BOUNDS, Delta, Embeddings, EngineStats, Finished, HistogramCounts

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True)
class ModelState:
    """How one model stands at the moment."""

    model: str
    num_running: int
    num_queued: int
    size_bytes: int
    stats: EngineStats | None


class RequestClock:
    """Sees one request's items as they come."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._started = time.monotonic()
        self._is_silent = True
        self.outcome = "left"

    def note(self, item: object) -> None:
        """A Granted, Delta, Finished, Embeddings or ErrorInfo; others tell nothing that is counted."""
        metrics, model = self._metrics, self._model
        if isinstance(item, Granted):
            metrics.load.labels(model).observe(item.load_ns / 1e9)
            metrics.residency_queue.labels(model).observe(item.queue_ns / 1e9)
        elif isinstance(item, Delta) and self._is_silent:
            self._is_silent = False
            metrics.first_token.labels(model).observe(time.monotonic() - self._started)
        elif isinstance(item, Finished | Embeddings):
            self.outcome = item.finish_reason if isinstance(item, Finished) else "stop"
            metrics.on_finished(model, item)


class Metrics:
    """One of these for the whole daemon. Counters begin at zero with it."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._engines = _Engines()
        registry.register(self._engines)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"localllm_{name}", help, ["model", *labels], registry=registry)

        def seconds(name: str, help: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"localllm_{name}_seconds", help, ["model"], buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests that have ended, by how.", "outcome")
        self.residency_queue = seconds("residency_queue", "Waiting for a place in memory.")
        self.load = seconds("load", "Waiting for the model to load; 0 if it was loaded.")
        self.queue = seconds("queue", "Waiting for a slot in the runner.")
        self.prefill = seconds("prefill", "From admission to the first token.")
        self.decode = seconds("decode", "From the first token to the last.")
        self.first_token = seconds("time_to_first_token", "From the request's arrival to the first piece of text.")
        self.gap = seconds("inter_token", "Mean time between two tokens of a request.", _GAP_SECONDS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, cached or not.")
        self.cached_tokens = counter("cached_prompt_tokens", "Tokens of prompts that needed no computing.")
        self.output_tokens = counter("output_tokens", "Tokens of answers.")
        self.draft_tokens = counter("draft_tokens", "Tokens that were guessed ahead.")
        self.accepted_tokens = counter("accepted_draft_tokens", "Guessed tokens that turned out right.")
        self.runner_starts = counter("runner_starts", "Runners started.")
        self.retries = counter("request_retries", "Requests that were begun anew because their runner had died.")
        self.runner_failures = counter("runner_failures", "Runners that ended without being told to.")

    @contextmanager
    def request(self, model: str) -> Iterator[RequestClock]:
        """Around a whole request, however it ends: its finish reason, an error's code, or "left" for the client."""
        clock = RequestClock(self, model)
        try:
            yield clock
        except LocalLLMError as error:
            clock.outcome = error.code
            raise
        finally:
            self.requests.labels(model, clock.outcome).inc()

    def on_finished(self, model: str, item: Finished | Embeddings) -> None:
        usage, timings = item.usage, item.timings
        self.prompt_tokens.labels(model).inc(usage.num_prompt_tokens)
        self.cached_tokens.labels(model).inc(usage.num_cached_tokens)
        self.output_tokens.labels(model).inc(usage.num_output_tokens)
        self.draft_tokens.labels(model).inc(usage.num_draft_tokens)
        self.accepted_tokens.labels(model).inc(usage.num_accepted_tokens)
        self.queue.labels(model).observe(timings.queue_ns / 1e9)
        self.prefill.labels(model).observe(timings.prefill_ns / 1e9)
        if usage.num_output_tokens > 1:
            self.decode.labels(model).observe(timings.decode_ns / 1e9)
            self.gap.labels(model).observe(timings.decode_ns / 1e9 / (usage.num_output_tokens - 1))

    def on_runner_gone(self, model: str, stats: EngineStats | None, *, is_failure: bool) -> None:
        """What its engine counted is kept: counters never fall."""
        if is_failure:
            self.runner_failures.labels(model).inc()
        if stats is not None:
            self._engines.keep(model, stats)

    def render(self, states: Iterable[ModelState], kv_disk_bytes: int) -> bytes:
        """The page. `states` are all models in memory."""
        self._engines.states = list(states)
        self._engines.kv_disk_bytes = kv_disk_bytes
        return generate_latest(self._registry)


class _Engines(Collector):
    """What runners report, put together by model: the past of those that have ended, and the present."""

    def __init__(self) -> None:
        self.states: list[ModelState] = []
        self.kv_disk_bytes = 0
        self._past: dict[str, EngineStats] = {}

    def keep(self, model: str, stats: EngineStats) -> None:
        self._past[model] = _add(self._past.get(model), stats)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        totals = dict(self._past)
        for state in self.states:
            if state.stats is not None:
                totals[state.model] = _add(self._past.get(state.model), state.stats)
        of = ["model"]
        steps = HistogramMetricFamily("localllm_step_seconds", "Steps of the engine.", labels=of)
        batches = HistogramMetricFamily("localllm_batch_size", "Sequences that a step worked for.", labels=of)
        preemptions = CounterMetricFamily("localllm_preemptions", "Sequences that gave up their slot.", labels=of)
        evictions = CounterMetricFamily("localllm_prefix_evictions", "Prefixes dropped for want of room.", labels=of)
        for model, stats in totals.items():
            steps.add_metric([model], *_buckets(STEP_BOUNDS, stats.steps))
            batches.add_metric([model], *_buckets(BATCH_BOUNDS, stats.batches))
            preemptions.add_metric([model], stats.num_preemptions)
            evictions.add_metric([model], stats.num_evictions)
        yield from (steps, batches, preemptions, evictions)

    def _gauges(self) -> Iterator[Metric]:
        def gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"localllm_{name}", help, labels=labels)

        running = gauge("running_requests", "Requests that have a slot.", "model")
        queued = gauge("queued_requests", "Requests that wait.", "model")
        memory = gauge("model_bytes", "Memory of a resident model, as estimated.", "model")
        prefixes = gauge("prefix_cache_bytes", "Prefixes outside the slots; files are all models'.", "model", "tier")
        prefixes.add_metric(["", "disk"], self.kv_disk_bytes)
        for state in self.states:
            running.add_metric([state.model], state.num_running)
            queued.add_metric([state.model], state.num_queued)
            memory.add_metric([state.model], state.size_bytes)
            if state.stats is not None:
                prefixes.add_metric([state.model, "ram"], state.stats.kv_ram_bytes)
        yield from (running, queued, memory, prefixes)


def _add(past: EngineStats | None, now: EngineStats) -> EngineStats:
    """Counts of both; gauges of the later one."""
    if past is None:
        return now
    return EngineStats(
        steps=_add_counts(past.steps, now.steps),
        batches=_add_counts(past.batches, now.batches),
        num_preemptions=past.num_preemptions + now.num_preemptions,
        num_evictions=past.num_evictions + now.num_evictions,
        num_running=now.num_running,
        num_waiting=now.num_waiting,
        kv_ram_bytes=now.kv_ram_bytes,
    )


def _add_counts(one: HistogramCounts, other: HistogramCounts) -> HistogramCounts:
    return HistogramCounts(tuple(a + b for a, b in zip(one.counts, other.counts, strict=True)), one.sum + other.sum)


def _buckets(bounds: Sequence[float], counts: HistogramCounts) -> tuple[list[tuple[str, float]], float]:
    """Prometheus counts all values up to a bound."""
    total, buckets = 0, []
    for bound, count in zip((*map(str, bounds), "+Inf"), counts.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, counts.sum
