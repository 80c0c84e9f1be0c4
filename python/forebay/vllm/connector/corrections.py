"""Corrects what vLLM counts of cache hits, before anybody reads the counts.

vLLM counts a request's hits when it gets its blocks, even if its load fails later, and counts a
connector's misses even where the connector may not load. The difference is taken off the counts
when vLLM next gives them away. What they cannot give is taken off later ones: on a page of metrics
counters only grow.
"""

from collections import Counter
from typing import Any

from forebay.vllm.connector import compat, step_recovery
from forebay.vllm.connector.tracked import Counted, Loading, TrackedRequest


class PendingCorrection:
    """What is to be taken off the counts of one cache."""

    def __init__(self) -> None:
        self.requests = self.queries = 0
        self.hits: Counter[str] = Counter()  # tokens by tier; "" in vLLM's own cache

    def __bool__(self) -> bool:
        return bool(self.requests or self.queries or self.hits)

    def take_off(self, stats: Any) -> None:
        """Takes off vLLM's statistics what they have of it."""
        self.requests -= subtract(stats, "requests", self.requests)
        self.queries -= subtract(stats, "queries", self.queries)
        for tier, count in list(self.hits.items()):
            self.hits[tier] -= self.take_off_hits(stats, tier, count)
        self.hits = +self.hits

    def take_off_hits(self, stats: Any, tier: str, count: int) -> int:
        """Takes off up to `count` hits in a tier. Returns how many."""
        by_source = getattr(stats, "hits_by_source", None)  # Since 0.32.
        if not tier or by_source is None:
            return subtract(stats, "hits", count)
        (source,) = compat.hit_sources({tier: count})
        taken = subtract(stats, "hits", min(count, by_source.get(source, 0)))
        if taken:
            by_source[source] -= taken
        return taken


def subtract(stats: Any, name: str, count: int) -> int:
    """Takes up to `count` off a counter. Returns how many."""
    taken = min(count, getattr(stats, name))
    setattr(stats, name, getattr(stats, name) - taken)
    return int(taken)


def note_cached(request: Any, held: int, external: int) -> None:
    """Corrects what vLLM says was cached for a request whose first token is still to come."""
    prompt = request.num_prompt_tokens
    held = min(held, prompt)
    request.prefill_stats.set(prompt, held, min(external, prompt - held))


class Corrections:
    """Corrects the counts of both caches, and what an answer says was cached for it."""

    def __init__(self, chunk_tokens: int, block_tokens: int, is_alone: bool) -> None:
        """`is_alone`: there is no other connector that loads what ours may not."""
        self.chunk_tokens, self.block_tokens, self.is_alone = chunk_tokens, block_tokens, is_alone
        self.own, self.external = PendingCorrection(), PendingCorrection()
        # Requests that were answered in this pass and not admitted: tokens that vLLM itself had.
        self.answered: dict[str, int] = {}
        self.restarted: set[str] = set()  # requests that have started over

    def asked(self, tracked: TrackedRequest | None, request: Any) -> None:
        """vLLM asks for a request. One that was admitted before and not preempted is counted again,
        since its load has failed.
        """
        if tracked is not None and tracked.counted is not None and not request.num_preemptions:
            self.external.requests += 1
            self.external.queries += tracked.counted.queries
            self.external.hits += tracked.counted.hits
            tracked.counted = None

    def admitted(self, tracked: TrackedRequest | None, request: Any, external: int, may_load: bool) -> None:
        """A request has its blocks. vLLM counts it if it has asked for it."""
        held = self.answered.pop(request.request_id, None)
        if held is None:
            return
        if request.request_id in self.restarted and request.prefill_stats is not None:
            note_cached(request, held, external)
        is_first, queries = not request.num_preemptions, request.num_tokens - held
        if tracked is not None:
            tracked.counted = Counted(queries) if is_first else None
        if is_first and queries and self.is_alone and not may_load:
            self.external.requests += 1
            self.external.queries += queries

    def load_began(self, load: Loading) -> None:
        """vLLM has counted a load with its request."""
        if load.counted is not None:
            last = load.held + load.external
            load.counted.hits += Counter(load.tiers_of(load.held, last, self.chunk_tokens))

    def load_fell_short(self, tracked: TrackedRequest, load: Loading) -> None:
        """What a load did not bring is no hit, and was not cached."""
        came, end = load.first_chunk * self.chunk_tokens + load.usable, load.held + load.external
        if load.counted is not None:
            lost = Counter(load.tiers_of(max(load.held, came), end, self.chunk_tokens))
            load.counted.hits -= lost
            self.external.hits += lost
        stats = tracked.request.prefill_stats
        if tracked.loading is not load or load.layerwise or stats is None:
            return  # It gets other blocks, if any. What was cached is noted then.
        if load.counted is not None or tracked.name in self.restarted:
            note_cached(tracked.request, load.held, max(0, min(came, end) - load.held))

    def step_undone(self, request: Any, block: int, is_counted: bool) -> None:
        """A step is undone that computed wrong KV from a request's `block` on.

        vLLM does not note what is cached for a request that starts over. `is_counted`: it has
        counted what was cached before.
        """
        stats = request.prefill_stats
        if stats is None or request.request_id in self.restarted:
            return
        self.restarted.add(request.request_id)
        wrong = stats.num_local_cached_tokens - block * self.block_tokens
        if is_counted and wrong > 0:
            self.own.hits[""] += wrong

    def left(self, name: str) -> None:
        self.restarted.discard(name)

    def take_off(self, own: Any, external: Any) -> None:
        if self.own and own is not None:
            self.own.take_off(own)
        if self.external and external is not None:
            self.external.take_off(external)


def before_counts_are_read() -> None:
    """Has vLLM's scheduler give away corrected statistics."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.make_stats
    if make.__module__ == __name__:
        return

    def make_corrected(self: Any, *arguments: Any, **named: Any) -> Any:
        half = step_recovery.scheduler_half_of(self.connector)
        if half is not None and self.log_stats:
            own, external = self.kv_cache_manager.prefix_cache_stats, self.connector_prefix_cache_stats
            half.corrections.take_off(own, external)
        return make(self, *arguments, **named)

    Scheduler.make_stats = make_corrected
