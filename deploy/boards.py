"""What the boards for Grafana show: panels in rows, with their expressions.

Expressions are PromQL with two abbreviations: `{a, b="c"}` has the board's namespace and processes added, and
a label that stands alone is the variable of its name; `[]` is Grafana's interval for rates. They name metrics
of docs/reference/metrics.md, and no recorded series, so that each board can be imported alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """A graph: expressions by the legends of their series."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]
    is_stacked: bool = False


@dataclass(frozen=True)
class Board:
    """A dashboard. Its processes are those that have `process`; `labels` are what else it is narrowed by."""

    name: str
    process: str
    is_of_all: bool
    labels: dict[str, str]
    rows: dict[str, list[Panel]]


def quantile(share: str, histogram: str, by: str = "") -> str:
    """A quantile of a histogram, of each of `by`."""
    labels = f"le, {by}" if by else "le"
    selector = "{backend}" if by == "backend" else "{peer}" if "peer" in by else "{}"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{selector}[])))"


def quantiles(histogram: str) -> dict[str, str]:
    """The median and two high quantiles of a histogram."""
    return {f"p{share[2:]:0<2}": quantile(share, histogram) for share in ("0.5", "0.9", "0.99")}


def summed(metric: str, selector: str = "{}", by: str = "") -> str:
    """A counter's growth in a second, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{selector}[]))"


def ratio(part: str, whole: str) -> str:
    """There is no series where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def rates(metric: str, label: str, selector: str = "{}") -> dict[str, str]:
    """A counter's growth in a second, by a label or two."""
    legend = " ".join(f"{{{{{name}}}}}" for name in label.split(", "))
    return {legend: summed(metric, selector, label)}


def sums(metric: str, label: str, selector: str = "{}") -> dict[str, str]:
    """A gauge, summed by a label."""
    return {f"{{{{{label}}}}}": f"sum by ({label}) ({metric}{selector})"}


CLIENTS = [
    Panel(
        "Time to first byte",
        "s",
        "From the router's decision to the first byte of the answer: of one that is no stream, to its end.",
        quantiles("forebay_route_first_byte_seconds"),
    ),
    Panel(
        "Time per output token",
        "s",
        "For each token of a streamed answer after its first.",
        quantiles("forebay_route_output_token_seconds"),
    ),
    Panel(
        "Time of a request",
        "s",
        "From the router's decision to the end of a whole answer.",
        quantiles("forebay_route_request_seconds"),
    ),
    Panel(
        "Answers by status",
        "reqps",
        "Answers to clients, the router's own included.",
        rates("forebay_route_responses_total", "code"),
        is_stacked=True,
    ),
    Panel(
        "Answers that are errors",
        "percentunit",
        "Status 400 and above, of all answers.",
        {
            "errors": "1 - "
            + ratio(
                summed("forebay_route_responses_total", '{code=~"[123].."}'),
                summed("forebay_route_responses_total"),
            )
        },
    ),
    Panel(
        "Refused by the router",
        "reqps",
        "Requests that the router answered itself, by reason.",
        rates("forebay_route_refused_total", "reason"),
        is_stacked=True,
    ),
]

CHOICES = [
    Panel(
        "Decisions by rule",
        "ops",
        "Which rule settled where an attempt goes. hand-over: another engine computes the prompt.",
        rates("forebay_route_decisions_total", "reason"),
        is_stacked=True,
    ),
    Panel(
        "Hand-overs by end",
        "ops",
        "Prompts that one engine computed for another. handed is the good end.",
        rates("forebay_route_hand_overs_total", "end"),
        is_stacked=True,
    ),
    Panel(
        "Predicted by realised first bytes",
        "none",
        "The predicted times to first bytes, divided by those that came. 1 is right.",
        {
            "predicted / realised": ratio(
                summed("forebay_route_predicted_first_byte_seconds_total"),
                summed("forebay_route_first_byte_seconds_sum"),
            )
        },
    ),
    Panel(
        "Requests in flight",
        "short",
        "By engine, as the routers count what they sent.",
        sums("forebay_route_in_flight", "backend"),
        is_stacked=True,
    ),
    Panel(
        "KV pool in use",
        "percentunit",
        "Prompt tokens in flight, of those whose KV fits the GPU. Above 1 requests wait for room.",
        {
            "{{backend}}": "sum by (backend) (forebay_route_context_tokens{})"
            " / max by (backend) (forebay_route_pool_tokens{})"
        },
    ),
    Panel(
        "Engines in use",
        "short",
        "Engines that requests may be sent to, and all that routers know.",
        {
            "in use": "sum(max by (backend) (forebay_route_backend_up{}))",
            "known": "count(max by (backend) (forebay_route_backend_up{}))",
        },
    ),
]

KV = [
    Panel(
        "Prompt tokens",
        "short",
        "Tokens a second, of answers that report what was cached: in the GPU, or loaded.",
        {
            "cached": summed("forebay_route_cached_tokens_total"),
            "computed": f"{summed('forebay_route_prompt_tokens_total')} - "
            f"{summed('forebay_route_cached_tokens_total')}",
        },
        is_stacked=True,
    ),
    Panel(
        "Hit rate",
        "percentunit",
        "Cached prompt tokens, of all prompt tokens of the same answers.",
        {
            "cached": ratio(
                summed("forebay_route_cached_tokens_total"), summed("forebay_route_prompt_tokens_total")
            )
        },
    ),
    Panel(
        "Tokens that engines found",
        "short",
        "Tokens a second by the engines' own metrics: in the GPU's prefix cache, and in the node.",
        {
            "GPU": summed("vllm:prefix_cache_hits_total"),
            "node": summed("vllm:external_prefix_cache_hits_total"),
        },
        is_stacked=True,
    ),
    Panel(
        "Chunks loaded by tier",
        "ops",
        "Chunks that engines leased from their nodes to load them, by where they were.",
        rates("forebay_client_leased_chunks_total", "tier"),
        is_stacked=True,
    ),
    Panel(
        "Chunks kept",
        "short",
        "Chunks that can be found on all nodes, by tier.",
        sums("forebay_chunks", "tier"),
    ),
    Panel(
        "Bytes that went wrong",
        "ops",
        "By tier and kind. A chunk with a wrong byte is a miss, and never data.",
        rates("forebay_store_faults_total", "tier, kind"),
    ),
]

ENGINES = [
    Panel(
        "In use",
        "bool",
        "1 if requests may be sent to the engine.",
        {"{{backend}}": "min by (backend) (forebay_route_backend_up{backend})"},
    ),
    Panel(
        "In flight",
        "short",
        "Requests that the router has sent and that have not ended.",
        sums("forebay_route_in_flight", "backend", "{backend}"),
        is_stacked=True,
    ),
    Panel(
        "In flight from elsewhere",
        "short",
        "Requests at the engine that the router has not sent, by the engine's own metrics.",
        {"{{backend}}": "max by (backend) (forebay_route_others_in_flight{backend})"},
    ),
    Panel(
        "Prompt tokens to compute",
        "short",
        "Tokens that wait for their prefill. Estimated.",
        sums("forebay_route_pending_prefill_tokens", "backend", "{backend}"),
    ),
    Panel(
        "Attempts by end",
        "ops",
        "answered is the good end; docs/routing.md has the others.",
        rates("forebay_route_attempts_total", "end", "{backend}"),
        is_stacked=True,
    ),
    Panel(
        "Ejections",
        "ops",
        "Times a second that an engine was taken out of use.",
        rates("forebay_route_ejections_total", "backend", "{backend}"),
    ),
]

TIMES = [
    *(
        Panel(f"{title}, p90", "s", "By engine.", {"{{backend}}": quantile("0.9", histogram, "backend")})
        for title, histogram in (
            ("First byte", "forebay_route_first_byte_seconds"),
            ("Output token", "forebay_route_output_token_seconds"),
            ("Request", "forebay_route_request_seconds"),
        )
    ),
    Panel(
        "Predicted by realised first bytes",
        "none",
        "The predicted times to first bytes, divided by those that came. 1 is right.",
        {
            "{{backend}}": ratio(
                summed("forebay_route_predicted_first_byte_seconds_total", "{backend}", "backend"),
                summed("forebay_route_first_byte_seconds_sum", "{backend}", "backend"),
            )
        },
    ),
    Panel(
        "Cached tokens, predicted and reported",
        "short",
        "Tokens a second: what the router believed cached, and what engines report.",
        {
            "predicted": summed("forebay_route_predicted_tokens_total", "{backend}"),
            "reported": summed("forebay_route_cached_tokens_total", "{backend}"),
        },
    ),
    Panel(
        "Error of predicted hits",
        "short",
        "Tokens a second: over is predicted and was not cached, under was cached and not predicted.",
        rates("forebay_route_hit_prediction_error_tokens_total", "direction", "{backend}"),
    ),
]

KNOWN = [
    Panel(
        "CPU of the router",
        "short",
        "Cores in use.",
        {"{{instance}}": summed("forebay_route_process_cpu_seconds_total", by="instance")},
    ),
    Panel(
        "CPU for a request",
        "s",
        "CPU time of the router's process, divided by answers.",
        {
            "{{instance}}": ratio(
                summed("forebay_route_process_cpu_seconds_total", by="instance"),
                summed("forebay_route_responses_total", by="instance"),
            )
        },
    ),
    Panel(
        "Prompt chunks in the prefix index",
        "short",
        "What the router remembers of each engine and each store.",
        {
            "engine {{backend}}": "sum by (backend) (forebay_route_index_chunks{backend})",
            "store {{store}}": "sum by (store) (forebay_route_store_chunks{})",
        },
    ),
    Panel(
        "Blocks by KV events",
        "short",
        "Blocks that an engine holds by its KV events; 0 where none are followed.",
        sums("forebay_route_kv_live_blocks", "backend", "{backend}"),
    ),
    Panel(
        "Trouble with KV events",
        "ops",
        "Gaps in the events, replays that were asked for, and events that were left out.",
        {
            "gaps": summed("forebay_route_kv_event_gaps_total", "{backend}"),
            "replays": summed("forebay_route_kv_event_replays_total", "{backend}"),
            "left out": summed("forebay_route_kv_events_dropped_total", "{backend}"),
        },
    ),
    Panel(
        "What is not known",
        "ops",
        "Answers without cached tokens, readings of engines' metrics that failed, and lines of logs lost.",
        {
            "answers": summed("forebay_route_answers_without_cached_tokens_total", "{backend}"),
            "readings": summed("forebay_route_unread_engine_metrics_total", "{backend}"),
            "lines of requests": summed("forebay_route_request_log_dropped_total"),
            "lines of decisions": summed("forebay_route_decision_log_dropped_total"),
        },
    ),
]

MEMORY = [
    Panel(
        "Arena",
        "bytes",
        "Where every byte of the arena is.",
        sums("forebay_memory_bytes", "state"),
        is_stacked=True,
    ),
    Panel("Chunks", "short", "Chunks that can be found, by tier.", sums("forebay_chunks", "tier")),
    Panel(
        "Stored and evicted",
        "ops",
        "Chunks written in full, and chunks evicted.",
        {
            "stored, {{tier}}": summed("forebay_chunks_stored_total", by="tier"),
            "evicted, {{tier}}": summed("forebay_chunks_evicted_total", by="tier"),
        },
    ),
    Panel(
        "Leased by clients",
        "ops",
        "Chunks that clients leased to load them, by where they were.",
        rates("forebay_client_leased_chunks_total", "tier"),
        is_stacked=True,
    ),
    Panel(
        "Refused", "ops", "What the tiers refused, by reason.", rates("forebay_refused_total", "tier, reason")
    ),
]

CLIENTS_OF_A_NODE = [
    Panel("Clients", "short", "Clients by the names that they give.", sums("forebay_clients", "client")),
    Panel("Leases of clients", "short", "By name.", sums("forebay_client_leases", "client")),
    Panel(
        "Faults",
        "ops",
        "Wrong chunks that clients found, slots whose client went without a word, leases that ended by time, "
        "and bytes that went wrong.",
        {
            "corrupt": summed("forebay_client_corrupt_chunks_total"),
            "orphaned slots": summed("forebay_client_orphaned_slots_total"),
            "expired leases": summed("forebay_leases_expired_total"),
            **rates("forebay_store_faults_total", "tier, kind"),
        },
    ),
]

TRANSFERS = [
    Panel(
        "Bytes moved",
        "Bps",
        "Bytes that reached their target, by class.",
        rates("forebay_transfer_bytes_total", "class"),
        is_stacked=True,
    ),
    Panel(
        "Time of a lot by stage",
        "s",
        "Mean time that a lot waits in the queue, is staged, and moves.",
        {
            "{{stage}}": f"{summed('forebay_transfer_lot_seconds_total', by='stage')} / on() group_left() "
            f"({summed('forebay_transfer_lots_total')} > 0)"
        },
    ),
    Panel(
        "Rate of links",
        "Bps",
        "What each link was measured to carry.",
        {"{{link}}": "max by (link) (forebay_link_rate_bytes_per_second{})"},
    ),
    Panel(
        "Transfers that failed or were late",
        "ops",
        "By class. Late: after the deadline.",
        {
            "failed, {{class}}": 'sum by (class) (rate(forebay_transfers_total{end="failed"}[]))',
            "late, {{class}}": summed("forebay_transfers_late_total", by="class"),
        },
    ),
    Panel(
        "Lots by end",
        "ops",
        "Operations of links. moved is the good end.",
        rates("forebay_link_lots_total", "end"),
    ),
    Panel(
        "Waiting", "bytes", "Bytes that wait for a link.", {"waiting": "sum(forebay_mover_waiting_bytes{})"}
    ),
]

SSD = [
    Panel(
        "Space",
        "bytes",
        "Bytes of chunks, what they may be at most, and what the volumes hold of the disk.",
        {
            "chunks": "sum(forebay_disk_live_bytes{})",
            "limit": "sum(forebay_disk_live_limit_bytes{})",
            "of the disk": "sum(forebay_volume_physical_bytes{})",
        },
    ),
    Panel("Reads and writes", "Bps", "Bytes of layers.", rates("forebay_disk_bytes_total", "direction")),
    Panel(
        "Chunks for the disk",
        "ops",
        "By end. What is not written is computed again when memory has evicted it.",
        rates("forebay_write_back_chunks_total", "end"),
        is_stacked=True,
    ),
    Panel(
        "Admission",
        "Bps",
        "Bytes of chunks by what admission said: over_budget is what the SSD's endurance does not allow.",
        rates("forebay_admission_bytes_total", "verdict"),
        is_stacked=True,
    ),
    Panel(
        "Faults",
        "ops",
        "What went wrong on disk, by kind, and commits that failed.",
        {
            "{{kind}}": summed("forebay_disk_faults_total", by="kind"),
            "commits": summed("forebay_volume_commits_total", '{end="failed"}'),
        },
    ),
    Panel(
        "Last commit",
        "s",
        "How long the last commit of each volume took.",
        {"{{instance}} {{volume}}": "max by (instance, volume) (forebay_volume_last_commit_seconds{})"},
    ),
]

PROCESS = [
    Panel(
        "CPU",
        "short",
        "Cores in use.",
        {"{{instance}}": summed("forebay_process_cpu_seconds_total", by="instance")},
    ),
    Panel(
        "Memory", "bytes", "In RAM, the arena included.", sums("forebay_process_resident_bytes", "instance")
    ),
]

PEERS = [
    Panel(
        "Bytes",
        "Bps",
        "Bytes that arrived, both ways, by path.",
        rates("forebay_peer_bytes_total", "peer, path", "{peer}"),
        is_stacked=True,
    ),
    Panel(
        "Busy",
        "percentunit",
        "Part of the time in which something was under way to the peer.",
        rates("forebay_peer_busy_seconds_total", "instance, peer", "{peer}"),
    ),
    Panel(
        "Lots on the wire, p99",
        "s",
        "Until their bytes were in place, verified and acknowledged.",
        {"{{peer}} {{path}}": quantile("0.99", "forebay_peer_lot_seconds", "peer, path")},
    ),
    Panel(
        "In flight",
        "bytes",
        "Bytes on connections now, by peer.",
        sums("forebay_peer_in_flight_bytes", "peer", "{peer}"),
    ),
    Panel(
        "State",
        "short",
        "How many ways to peers are in each state.",
        sums("forebay_peer_state", "state", "{peer}"),
        is_stacked=True,
    ),
    Panel(
        "Not reached",
        "bool",
        "1 while a peer is not reached, with the reason: docs/node.md, Watching it.",
        {"{{peer}}, {{reason}}": "max by (instance, peer, reason) (forebay_peer_unreached{peer})"},
    ),
]

PULLS = [
    Panel(
        "Pulls by end",
        "ops",
        "Chunks wanted from peers.",
        rates("forebay_peering_pulls_total", "end"),
        is_stacked=True,
    ),
    Panel(
        "Lent",
        "ops",
        "Chunks lent to peers.",
        {"{{instance}}": summed("forebay_peering_lent_chunks_total", by="instance")},
    ),
    Panel(
        "Trouble with pulls",
        "ops",
        "denied: a peer did not lend what it was said to have; retried: another peer was asked; corrupt: "
        "other bytes came than were lent; refused: questions of peers.",
        {
            "denied": summed("forebay_peering_denied_total"),
            "retried": summed("forebay_peering_retried_total"),
            "corrupt": summed("forebay_peering_corrupt_chunks_total"),
            "refused": summed("forebay_peering_refused_total"),
        },
    ),
]

DIRECTORY = [
    Panel("Nodes known", "short", "Without the node itself.", sums("forebay_directory_nodes", "instance")),
    Panel(
        "Out of date",
        "s",
        "For how long what is known may be out of date; 0 if it is not.",
        {"{{instance}}": "max by (instance) (forebay_directory_stale_seconds{})"},
    ),
    Panel(
        "Connections of peers",
        "ops",
        "Let in, and silent ones that gave way to others.",
        {
            "let in": summed("forebay_peer_connections_total"),
            "gave way": summed("forebay_unauthenticated_evicted_total", '{port="peers"}'),
        },
    ),
]

ROUTERS, NODES = "forebay_route_info", "forebay_process_start_time_seconds"
BACKEND, PEER = {"backend": "forebay_route_backend_up"}, {"peer": "forebay_peer_state"}
OF_ROUTER = {"Engines": ENGINES, "Times and predictions": TIMES, "What the router knows": KNOWN}
OF_NODE = {"Memory": MEMORY, "Clients": CLIENTS_OF_A_NODE, "Transfers": TRANSFERS, "SSD": SSD}
BOARDS = [
    Board("fleet", ROUTERS, True, {}, {"Clients": CLIENTS, "Choices": CHOICES, "KV cache": KV}),
    Board("router", ROUTERS, False, BACKEND, OF_ROUTER),
    Board("node", NODES, False, {}, OF_NODE | {"Process": PROCESS}),
    Board("network", NODES, False, PEER, {"Peers": PEERS, "Pulls": PULLS, "Directory": DIRECTORY}),
]
