"""The connector's counters and histograms, as vLLM shows them in its log and to Prometheus.

Counters are added up. Values of histograms are all kept until Prometheus has them.
"""

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

# Counters and what they mean: first those of the scheduler's half, then those of the workers.
COUNTERS = {
    "requests_left_alone": "Requests whose KV depends on more than tokens and salt",
    "tokens_memory": "Tokens of chunks to be loaded that were in the node's memory",
    "tokens_disk": "Tokens of chunks to be loaded that were on the node's disk",
    "tokens_peer": "Tokens of chunks to be loaded that other nodes had",
    "states_lost": "States within generated tokens whose blocks were given out before they were stored",
    "loads_failed": "Requests of whose chunks some did not come",
    "handovers": "Requests that found all that a prefiller had stored",
    "handovers_late": "Requests that did not find it in time",
    "handovers_refused": "Requests with a ticket that this engine cannot use",
    "handovers_direct": "Requests that read a prefiller's blocks",
    "handovers_direct_failed": "Of those, requests that got nothing and turned to the node",
    "offers": "Finished requests whose blocks were kept for a decoder",
    "hints_accepted": "Hints about a request's KV that are obeyed",
    "hints_clipped": "Hints of which a part is obeyed",
    "hints_rejected": "Hints that are not obeyed",
    "loads": "Loads that were begun, of each worker",
    "loads_short": "Loads that ended with fewer tokens than asked for",
    "load_us": "Microseconds from the beginning to the end of loads",
    "bytes_loaded": "Bytes that were copied into KV blocks",
    "bytes_memory": "Of those, what was in the node's memory when the load began",
    "bytes_disk": "Of those, what was on the node's disk",
    "bytes_peer": "Of those, what other nodes had",
    "bytes_relayed": "Bytes that came over links of other GPUs, which the node has",
    "relays_lost": "Times that the node's relays were lost",
    "chunks_corrupt": "Chunks with bytes that were not those that were stored",
    "layers_late": "Layers of loads that an engine had to wait for",
    "bubble_us": "Microseconds that engines waited for layers",
    "reads": "Loads from a prefiller's blocks that were begun, of each worker",
    "reads_failed": "Of those, loads that brought nothing",
    "reads_corrupt": "Of those, loads that brought other bytes than the prefiller has",
    "read_us": "Microseconds from the beginning to the end of these loads",
    "bytes_read": "Bytes that were read from prefillers' blocks",
    "stores": "Chunks that were given to be stored",
    "stores_done": "Of those, what the node took or had",
    "stores_refused": "Of those, what was not stored because too many bytes were on their way",
    "stores_failed": "Of those, what was not stored for any other reason",
    "bytes_stored": "Bytes that were stored",
}

# A counter with the labels `tenant` and `tier`, and what it means. One of its values is named by
# `tenant_tokens`.
TENANT_TOKENS = "tenant_tokens"
TENANT_TOKENS_TEXT = "Of the tokens to be loaded, those of requests that named a tenant"


def tenant_tokens(tenant: int, tier: str) -> str:
    """The name, in `Counts` and `Stats`, of one value of `TENANT_TOKENS`."""
    return f"{TENANT_TOKENS}:{tenant}:{tier}"


# Histograms, what they mean, and where their buckets end.
HISTOGRAMS = {
    "load_bubble_seconds": (
        "Seconds that a step waited for layers of a load, for each load that steps wait for, of each worker",
        [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0],
    ),
}


class Deltas:
    """Turns totals into what was added to them."""

    def __init__(self) -> None:
        self.seen: dict[str, int | float] = {}

    def take(self, totals: Mapping[str, int | float], **values: list[float]) -> "Stats | None":
        """What was added since the last call. `values` are new ones of histograms."""
        known = [name for name in totals if name in COUNTERS or name.startswith(TENANT_TOKENS)]
        added = {name: totals[name] - self.seen.get(name, 0) for name in known}
        self.seen.update(totals)
        data: dict[str, Any] = {name: more for name, more in added.items() if more > 0}
        data.update((name, found) for name, found in values.items() if found)
        return Stats(data) if data else None


class Counts:
    """The counters of the scheduler's half."""

    def __init__(self) -> None:
        self.totals: dict[str, int | float] = {}
        self.deltas = Deltas()
        self.grown = False

    def add(self, name: str, count: int | float = 1) -> None:
        self.totals[name] = self.totals.get(name, 0) + count
        self.grown = True

    def take(self) -> "Stats | None":
        if not self.grown:
            return None  # As in most steps.
        self.grown = False
        return self.deltas.take(self.totals)


class Stats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Counters of an interval, of one half or of several."""

    data: dict[str, Any]  # numbers of `COUNTERS` and `TENANT_TOKENS`, lists of them of `HISTOGRAMS`

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: "Stats") -> "Stats":
        for name, more in other.data.items():
            self.data[name] = self.data[name] + more if name in self.data else more
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line says."""
        return {name: self.data[name] for name in COUNTERS if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Each counter and histogram as `vllm:forebay_<name>`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self.counters = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:forebay_{name}", documentation=text, labelnames=labelnames
            )
            self.counters[name] = create_metric_per_engine(counter, labelvalues)
        self.of_engines = labelvalues
        self.tenant_tokens = self._counter_cls(
            name=f"vllm:forebay_{TENANT_TOKENS}",
            documentation=TENANT_TOKENS_TEXT,
            labelnames=[*labelnames, "tenant", "tier"],
        )
        self.histograms = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            histogram = self._histogram_cls(
                name=f"vllm:forebay_{name}", documentation=text, buckets=buckets, labelnames=labelnames
            )
            self.histograms[name] = create_metric_per_engine(histogram, labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counted in transfer_stats_data.items():
            if name in self.counters:
                self.counters[name][engine_idx].inc(counted)
            elif name.startswith(TENANT_TOKENS):
                _, tenant, tier = name.split(":")
                self.tenant_tokens.labels(*self.of_engines[engine_idx], tenant, tier).inc(counted)
            elif name in self.histograms:
                for value in counted:
                    self.histograms[name][engine_idx].observe(value)
