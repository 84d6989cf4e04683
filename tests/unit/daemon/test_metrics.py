"""What Prometheus is told: read back with its own parser."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from localllm.daemon.link import Granted
from localllm.daemon.metrics import Metrics, ModelState
from localllm.errors import QueueFull
from localllm.types import BATCH_BOUNDS, STEP_BOUNDS, Delta, EngineStats, Finished, HistogramCounts, Timings, Usage


def read(metrics: Metrics, *states: ModelState, kv_disk_bytes: int = 0) -> dict[str, float]:
    """Sample name with its labels, a bucket's bound last, as "name{model,other}", to value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(states, kv_disk_bytes).decode()):
        for sample in family.samples:
            labels = [sample.labels[name] for name in sorted(sample.labels, key="le".__eq__)]
            found[f"{sample.name}{{{','.join(labels)}}}"] = sample.value
    return found


def stats(steps: int, *, num_preemptions: int = 0, kv_ram_bytes: int = 0) -> EngineStats:
    """`steps` of 20 ms, each for three sequences."""
    step_counts, batch_counts = [0] * (len(STEP_BOUNDS) + 1), [0] * (len(BATCH_BOUNDS) + 1)
    step_counts[2], batch_counts[2] = steps, steps
    return EngineStats(
        HistogramCounts(tuple(step_counts), 0.02 * steps),
        HistogramCounts(tuple(batch_counts), 3.0 * steps),
        num_preemptions=num_preemptions,
        num_evictions=1,
        num_running=2,
        num_waiting=0,
        kv_ram_bytes=kv_ram_bytes,
    )


def test_a_request_is_counted_with_its_times_and_tokens() -> None:
    metrics = Metrics()
    with metrics.request("m:latest") as clock:
        clock.note(Granted(load_ns=2_000_000_000, queue_ns=0))
        clock.note(Delta("a"))
        clock.note(Delta("b"))
        usage = Usage(
            num_prompt_tokens=30, num_cached_tokens=20, num_output_tokens=11, num_draft_tokens=6, num_accepted_tokens=4
        )
        clock.note(Finished("length", usage, Timings(queue_ns=1, prefill_ns=500_000_000, decode_ns=1_000_000_000)))
    found = read(metrics)
    assert found["localllm_requests_total{m:latest,length}"] == 1
    tokens = ("prompt", "cached_prompt", "output", "draft", "accepted_draft")
    assert [found[f"localllm_{kind}_tokens_total{{m:latest}}"] for kind in tokens] == [30, 20, 11, 6, 4]
    assert found["localllm_load_seconds_sum{m:latest}"] == 2
    assert found["localllm_time_to_first_token_seconds_count{m:latest}"] == 1
    assert found["localllm_inter_token_seconds_sum{m:latest}"] == pytest.approx(0.1)
    assert found["localllm_inter_token_seconds_bucket{m:latest,0.1}"] == 1


def test_errors_and_leavers_are_told_apart() -> None:
    metrics = Metrics()
    with pytest.raises(QueueFull), metrics.request("m:latest"):
        raise QueueFull("full")
    with metrics.request("m:latest") as clock:
        clock.note(Granted(0, 0))
    found = read(metrics)
    assert found["localllm_requests_total{m:latest,queue_full}"] == 1
    assert found["localllm_requests_total{m:latest,left}"] == 1


def test_what_engines_counted_outlives_them() -> None:
    metrics = Metrics()
    metrics.on_runner_gone("m:latest", stats(10, num_preemptions=1), is_failure=True)
    state = ModelState("m:latest", 2, 5, 1000, stats(4, num_preemptions=2, kv_ram_bytes=77))
    found = read(metrics, state, kv_disk_bytes=99)
    assert found["localllm_step_seconds_count{m:latest}"] == 14
    assert found["localllm_step_seconds_bucket{m:latest,0.025}"] == 14
    assert found["localllm_step_seconds_bucket{m:latest,0.01}"] == 0
    assert found["localllm_batch_size_sum{m:latest}"] == 42
    assert found["localllm_preemptions_total{m:latest}"] == 3
    assert found["localllm_runner_failures_total{m:latest}"] == 1
    assert found["localllm_queued_requests{m:latest}"] == 5
    assert found["localllm_prefix_cache_bytes{m:latest,ram}"] == 77
    assert found["localllm_prefix_cache_bytes{,disk}"] == 99
    metrics.on_runner_gone("m:latest", state.stats, is_failure=False)
    assert read(metrics)["localllm_step_seconds_count{m:latest}"] == 14
