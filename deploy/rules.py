"""What Prometheus's rules say: series that are recorded, and alerts.

Each alert has a section of its name in docs/runbook.md. They name metrics of docs/reference/metrics.md, and
recorded series. Shares are written as products, so that nothing is divided by zero.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    """Fires when `value` has been `fires` for so long, where `only_where` has a series of the same labels."""

    name: str
    severity: str
    lasts: str
    value: str
    fires: str
    summary: str
    not_for: str
    only_where: str = ""

    @property
    def expression(self) -> str:
        """All of it."""
        condition = f" and {self.only_where}" if self.only_where else ""
        return f"{self.value} {self.fires}{condition}"

    @property
    def watched(self) -> list[str]:
        """Its parts that always have a series, whether it fires or not."""
        _, _, share = self.fires.partition(" * ")
        return [part for part in (self.value, share, self.only_where.rpartition(" > ")[0]) if part]


def of_fleet(metric: str, over: str, selector: str = "") -> str:
    """A counter's growth in a second, for each namespace."""
    return f"sum by (namespace) (rate({metric}{selector}[{over}]))"


def of_process(metric: str, over: str, selector: str = "") -> str:
    """A counter's growth, for each process."""
    return f"sum by (namespace, instance) (increase({metric}{selector}[{over}]))"


def p90(histogram: str) -> str:
    """A quantile for each namespace."""
    return f"histogram_quantile(0.9, sum by (le, namespace) (rate({histogram}_bucket[5m])))"


STORED_WRONG = of_process("forebay_store_faults_total", "15m", '{kind="corrupt"}')
CAME_WRONG = of_process("forebay_peering_corrupt_chunks_total", "15m")
FAILED = '{end!~"handed|unseen|client-error|cancelled"}'

RECORDED = {
    "forebay:first_byte_seconds:p90_5m": p90("forebay_route_first_byte_seconds"),
    "forebay:output_token_seconds:p90_5m": p90("forebay_route_output_token_seconds"),
    "forebay:request_seconds:p90_5m": p90("forebay_route_request_seconds"),
    "forebay:responses:rate5m": "sum by (namespace, code) (rate(forebay_route_responses_total[5m]))",
    "forebay:prompt_tokens:rate5m": of_fleet("forebay_route_prompt_tokens_total", "5m"),
    "forebay:cached_tokens:rate5m": of_fleet("forebay_route_cached_tokens_total", "5m"),
    "forebay:loaded_chunks:rate5m": "sum by (namespace, tier) (rate(forebay_client_leased_chunks_total[5m]))",
    "forebay:first_byte_seconds:rate15m": of_fleet("forebay_route_first_byte_seconds_sum", "15m"),
    "forebay:predicted_first_byte_seconds:rate15m": of_fleet(
        "forebay_route_predicted_first_byte_seconds_total", "15m"
    ),
    "forebay:hand_overs:rate15m": of_fleet("forebay_route_hand_overs_total", "15m"),
    "forebay:hand_overs_failed:rate15m": of_fleet("forebay_route_hand_overs_total", "15m", FAILED),
}

ROUTER = [
    Alert(
        "NoEngine",
        "critical",
        "1m",
        "max by (namespace, instance) (forebay_route_backend_up)",
        "== 0",
        "A router has no engine: all requests get 503.",
        "Fleets that scale to zero.",
    ),
    Alert(
        "EngineDown",
        "warning",
        "5m",
        "min by (namespace, backend) (forebay_route_backend_up)",
        "== 0",
        "A router sends nothing to an engine.",
        "Engines that are drained or scaled down on purpose: remove them from the router.",
    ),
    Alert(
        "ErrorAnswers",
        "warning",
        "10m",
        'sum by (namespace) (forebay:responses:rate5m{code=~"5.."} or 0 * forebay:responses:rate5m)',
        "> 0.05 * sum by (namespace) (forebay:responses:rate5m)",
        "More than 5 % of the answers to clients have status 5xx.",
        "Fleets with a request a minute or less: one error is a large share there.",
    ),
    Alert(
        "RequestsRefused",
        "warning",
        "10m",
        'sum by (namespace) (rate(forebay_route_refused_total{reason=~"overloaded|ttft-slo"}[5m]))',
        "> 0.05 * sum by (namespace) (forebay:responses:rate5m)",
        "Routers refuse more than 5 % of the requests, because all engines are full.",
        "Clients whose SLOs are meant to shed load.",
    ),
    Alert(
        "KvFull",
        "warning",
        "15m",
        "max by (namespace, backend) (forebay_route_context_tokens)",
        "> 0.95 * max by (namespace, backend) (forebay_route_pool_tokens)",
        "The prompts in flight at an engine fill its KV pool: requests wait for room or are preempted.",
        "Requests that share long prompts, which count for each of them; batch work that is to fill engines.",
    ),
    Alert(
        "PredictionDrift",
        "warning",
        "30m",
        "abs(forebay:predicted_first_byte_seconds:rate15m - forebay:first_byte_seconds:rate15m)",
        "> 0.5 * forebay:first_byte_seconds:rate15m",
        "First bytes come at other times than the router predicts, by more than half.",
        "Policies that count tokens, and requests without SLOs: nothing uses the predicted times there.",
    ),
    Alert(
        "HitPredictionDrift",
        "warning",
        "30m",
        of_fleet("forebay_route_hit_prediction_error_tokens_total", "15m", '{direction="over"}'),
        f"> 0.3 * {of_fleet('forebay_route_predicted_tokens_total', '15m')}",
        "Engines have less cached than the router believes, by more than 30 %.",
        "The first half hour of a router, and engines that are restarted often.",
    ),
    Alert(
        "CachedTokensUnreported",
        "warning",
        "15m",
        of_fleet("forebay_route_answers_without_cached_tokens_total", "15m"),
        f"> 0.5 * {of_fleet('forebay_route_request_seconds_count', '15m')}",
        "Engines do not say how much of a prompt was cached, so the router learns nothing from them.",
        "Fleets that route by load alone.",
    ),
    Alert(
        "HandoverFailing",
        "warning",
        "15m",
        "forebay:hand_overs_failed:rate15m",
        "> 0.2 * forebay:hand_overs:rate15m",
        "More than 20 % of the hand-overs fail, and the decoders compute the prompts.",
        "Fleets with a hand-over an hour or less.",
    ),
    Alert(
        "EngineLoadUnknown",
        "warning",
        "10m",
        "sum by (namespace, backend) (rate(forebay_route_unread_engine_metrics_total[5m]))",
        "> 0.1",
        "A router cannot read an engine's metrics, so it does not see what others send there.",
        "Engines without /metrics that get requests from one router only.",
    ),
]

NODE = [
    Alert(
        "CorruptChunks",
        "critical",
        "0m",
        # A node without peers has no count of what came from them.
        f"{STORED_WRONG} + ({CAME_WRONG} or 0 * {STORED_WRONG})",
        "> 0",
        "A node found wrong bytes. They were a miss, and no data; but some part is broken.",
        "Tests that damage bytes on purpose.",
    ),
    Alert(
        "TierUnused",
        "info",
        "1h",
        of_process("forebay_client_leased_chunks_total", "1h"),
        "== 0",
        "Engines store KV in a node and load none of it.",
        "Loads without common prefixes, and nodes that only hand over to peers.",
        only_where=of_process("forebay_chunks_stored_total", "1h", '{tier="memory"}') + " > 100",
    ),
    Alert(
        "LeaseLeak",
        "warning",
        "30m",
        of_process("forebay_client_leased_chunks_total", "30m"),
        "== 0",
        "A client holds leases and loads nothing: chunks that it keeps cannot be evicted.",
        "Clients that hold leases on purpose, such as pinned prompts.",
        only_where="sum by (namespace, instance) (min_over_time(forebay_client_leases[30m])) > 0",
    ),
    Alert(
        "DiskReadOnly",
        "critical",
        "1m",
        "max by (namespace, instance, volume) (forebay_volume_read_only)",
        "== 1",
        "Commits of an SSD log fail, and nothing more is written to it.",
        "Nothing: it is never meant to be so.",
    ),
    Alert(
        "ChunksNotWritten",
        "warning",
        "15m",
        of_process("forebay_write_back_chunks_total", "15m", '{end=~"queue_full|too_old|failed"}'),
        f"> 0.1 * {of_process('forebay_write_back_chunks_total', '15m')}",
        "The SSDs take less than is stored: more than 10 % of the chunks for them are not written.",
        "Bursts: what is not written is computed again, once memory has evicted it.",
    ),
    Alert(
        "LinkDown",
        "warning",
        "5m",
        "min by (namespace, instance, link) (forebay_link_up)",
        "== 0",
        "A link of a node is out of service; its bytes go another way, or none.",
        "Nothing: a link comes back by itself.",
    ),
    Alert(
        "MetricsIncomplete",
        "info",
        "5m",
        "sum by (namespace, instance, source) (increase(forebay_metrics_source_faults_total[15m]))",
        "> 0",
        "A part of a node cannot show its metrics, and other alerts may not see it.",
        "Nothing: it is a bug. Please report it.",
    ),
]

NETWORK = [
    Alert(
        "PeerUnreached",
        "warning",
        "5m",
        "sum by (namespace, instance, peer) (forebay_peer_unreached or 0 * forebay_peer_busy_seconds_total)",
        "> 0",
        "A node does not reach a peer. The label reason of forebay_peer_unreached says why.",
        "Nodes that are taken down for good: remove them from the list of nodes.",
    ),
    Alert(
        "DirectoryStale",
        "warning",
        "2m",
        "max by (namespace, instance) (forebay_directory_stale_seconds)",
        "> 30",
        "A node no longer learns which chunks its peers have.",
        "Restarts of etcd that take less than a minute.",
    ),
    Alert(
        "NameConflict",
        "critical",
        "1m",
        "max by (namespace, instance) (forebay_directory_name_conflict)",
        "== 1",
        "Two live nodes have one name, and each hides the chunks of the other.",
        "Nothing: give one of them another name.",
    ),
]

ALERTS = {"router": ROUTER, "node": NODE, "network": NETWORK}
