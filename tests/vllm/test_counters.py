"""What is counted, and how it gets to Prometheus."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from forebay.vllm.connector.corrections import Corrections, PendingCorrection  # noqa: E402
from forebay.vllm.connector.metadata import Report  # noqa: E402
from forebay.vllm.connector.stats import Counts, Deltas, PromMetrics, Stats  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402

pytestmark = pytest.mark.smoke


def test_counters_come_as_what_came_on_top() -> None:
    counts = Counts()
    counts.add("handovers")
    counts.add("tokens_memory", 256)
    first = counts.take()
    assert first is not None and first.data == {"handovers": 1, "tokens_memory": 256}
    assert counts.take() is None
    counts.add("handovers")
    second = counts.take()
    assert second is not None and first.aggregate(second).reduce() == {"tokens_memory": 256, "handovers": 2}
    assert Stats({}).is_empty()


class CacheThatCounts:
    """A cache of which loads end, with bubbles."""

    def __init__(self) -> None:
        self.totals = {"bytes_memory": 0, "bytes_disk": 0, "bytes_peer": 0, "layers_late": 0, "bubble_us": 0}
        self.loads: list[Any] = []
        self.bubbles: list[Any] = []

    def take_ended(self) -> Any:
        ended, self.loads = self.loads, []
        return ended, []

    def take_measured(self) -> Any:
        return []

    def take_bubbles(self) -> Any:
        taken, self.bubbles = self.bubbles, []
        return taken

    def stats(self) -> Any:
        return dict(self.totals)


def a_worker_that_counts() -> Any:
    half: Any = object.__new__(WorkerHalf)
    half.cache, half.deltas, half.stalls, half.report = CacheThatCounts(), Deltas(), [], Report(0)
    half.loads, half.layerwise, half.dropped, half.stores, half.received = {}, set(), set(), set(), set()
    return half


def test_each_load_tells_once_how_long_a_step_waited_for_it() -> None:
    half = a_worker_that_counts()
    assert half.take_stats() is None
    for job, layerwise in ((1, True), (2, False), (3, True)):
        half.loads[job] = SimpleNamespace(request="one", tokens=64, layerwise=layerwise)
    half.cache.loads = [(1, 64, None), (2, 64, None)]
    half.cache.bubbles = [(1, 0.02, 3)]
    half.cache.totals |= {"bytes_memory": 640, "bytes_disk": 64, "layers_late": 3, "bubble_us": 20_000}
    half.poll_cache()
    first = half.take_stats()
    counted = {"bytes_memory": 640, "bytes_disk": 64, "layers_late": 3, "bubble_us": 20_000}
    assert first.data == counted | {"load_bubble_seconds": [0.02]} and first.reduce() == counted
    assert half.take_stats() is None
    half.cache.loads, half.cache.bubbles = [(3, 64, None)], [(3, 0.0, 0)]
    half.poll_cache()
    second = half.take_stats()
    assert second.data == {"load_bubble_seconds": [0.0]}, "that nothing was waited for is told too"
    both = Stats({}).aggregate(first).aggregate(second)
    assert both.data["load_bubble_seconds"] == [0.02, 0.0] and both.data["bytes_disk"] == 64
    assert first.data["load_bubble_seconds"] == [0.02], "nobody else's values have grown"


def test_prometheus_has_bytes_by_tier_and_a_histogram_of_what_loads_were_waited_for() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    metrics = PromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )
    metrics.observe({"bytes_peer": 4096, "bytes_disk": 8, "load_bubble_seconds": [0.0, 0.02, 0.2]}, 1)
    metrics.observe({"bytes_peer": 4, "load_bubble_seconds": [100.0]}, 1)

    def value(name: str, **more: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:forebay_{name}", {"engine": "1"} | more)

    assert (value("bytes_peer_total"), value("bytes_disk_total"), value("bytes_memory_total")) == (4100, 8, 0)
    assert value("load_bubble_seconds_count") == 4
    assert value("load_bubble_seconds_sum") == pytest.approx(100.22)
    ends = {"0.0001": 1, "0.01": 1, "0.03": 2, "0.1": 2, "0.3": 3, "30.0": 3, "+Inf": 4}
    assert {end: value("load_bubble_seconds_bucket", le=end) for end in ends} == ends
    assert REGISTRY.get_sample_value("vllm:forebay_load_bubble_seconds_count", {"engine": "0"}) == 0


def counted(requests: int, queries: int, hits: int) -> Any:
    """vLLM's statistics of a cache, as of 0.26."""
    return SimpleNamespace(requests=requests, queries=queries, hits=hits)


def test_what_is_owed_comes_off_later_counts_where_these_have_less() -> None:
    owed = PendingCorrection()
    assert not owed
    owed.requests, owed.queries = 2, 300
    owed.hits["memory"] += 100
    owed.hits["disk"] += 20
    first, second, third = counted(1, 200, 70), counted(3, 500, 90), counted(1, 10, 10)
    owed.take_off(first)
    assert (first.requests, first.queries, first.hits) == (0, 0, 0) and owed
    owed.take_off(second)
    assert (second.requests, second.queries, second.hits) == (2, 400, 40) and not owed
    owed.take_off(third)
    assert (third.requests, third.queries, third.hits) == (1, 10, 10)


def test_what_is_owed_comes_off_the_source_that_vllm_has_counted_it_for() -> None:
    sources = pytest.importorskip(
        "vllm.v1.metrics.cache_hit_source", reason="SKIPPED: vLLM has no sources yet"
    )
    host, disk = sources.CacheHitSource.HOST, sources.CacheHitSource.DISK
    owed = PendingCorrection()
    owed.hits["disk"] += 50
    first = SimpleNamespace(requests=1, queries=300, hits=200, hits_by_source={host: 200})
    second = SimpleNamespace(requests=1, queries=300, hits=200, hits_by_source={host: 100, disk: 100})
    owed.take_off(first)
    assert first.hits == 200 and owed
    owed.take_off(second)
    assert second.hits == 150 and second.hits_by_source == {host: 100, disk: 50} and not owed


def test_what_a_request_had_of_others_wrong_blocks_is_taken_off_once() -> None:
    corrections = Corrections(chunk_tokens=64, block_tokens=16, is_alone=True)
    noted: list[Any] = []
    stats = SimpleNamespace(num_local_cached_tokens=128, set=lambda *said: noted.append(said))
    request = SimpleNamespace(
        request_id="one", prefill_stats=stats, num_prompt_tokens=300, num_tokens=300, num_preemptions=1
    )
    for _ in range(2):
        corrections.step_undone(request, 3, is_counted=True)
    own = counted(1, 300, 128)
    corrections.take_off(own, None)
    assert own.hits == 48, "the first three blocks were right"
    corrections.answered["one"] = 48
    corrections.admitted(None, request, 64, may_load=True)
    assert noted == [(300, 48, 64)], "vLLM itself notes nothing of a request that starts over"
