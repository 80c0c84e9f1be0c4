"""What vLLM counts of hits, and what did not come of it: taken back before anybody reads the counts.

Knows when vLLM counts, and its statistics of its own cache and of connectors'. Must never know why
something did not come.

vLLM counts a request's hits when it gets its blocks, and its misses of a connector also where the
connector may not load at all. What is known better later is owed, and is taken off the counts when
vLLM next gives them away. What these do not have yet is taken off later ones: on a page of metrics
counters only grow.
"""

from collections import Counter
from typing import Any

from forebay.vllm.connector import compat, step_recovery
from forebay.vllm.connector.tracked import Counted, Loading, TrackedRequest


class Owed:
    """What is to be taken off the counts of one cache."""

    def __init__(self) -> None:
        """Nothing."""
        self.requests = self.queries = 0
        self.hits: Counter[str] = Counter()  # tokens by tier; "" in vLLM's own cache

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.requests or self.queries or self.hits)

    def take_off(self, stats: Any) -> None:
        """Takes off what vLLM's statistics have of it."""
        self.requests -= less(stats, "requests", self.requests)
        self.queries -= less(stats, "queries", self.queries)
        for tier, count in list(self.hits.items()):
            self.hits[tier] -= self.take_off_hits(stats, tier, count)
        self.hits = +self.hits

    def take_off_hits(self, stats: Any, tier: str, count: int) -> int:
        """Takes off hits in a tier, as far as there are some. Gives how many that were."""
        by_source = getattr(stats, "hits_by_source", None)  # Since 0.32.
        if not tier or by_source is None:
            return less(stats, "hits", count)
        (source,) = compat.hit_sources({tier: count})
        taken = less(stats, "hits", min(count, by_source.get(source, 0)))
        if taken:
            by_source[source] -= taken
        return taken


def less(stats: Any, name: str, count: int) -> int:
    """Takes off so many, or all that there are. Gives how many that were."""
    taken = min(count, getattr(stats, name))
    setattr(stats, name, getattr(stats, name) - taken)
    return int(taken)


def note_cached(request: Any, held: int, external: int) -> None:
    """Has vLLM say this of a request whose first token is still to come."""
    prompt = request.num_prompt_tokens
    held = min(held, prompt)
    request.prefill_stats.set(prompt, held, min(external, prompt - held))


class Corrections:
    """Of the counts of both caches, and of what an answer says was cached for it."""

    def __init__(self, chunk_tokens: int, block_tokens: int, is_alone: bool) -> None:
        """Of no request yet. `is_alone`: what ours may not load, no other connector loads."""
        self.chunk_tokens, self.block_tokens, self.is_alone = chunk_tokens, block_tokens, is_alone
        self.own, self.external = Owed(), Owed()
        # Of requests that were told in this pass what there is, and are not admitted: tokens that
        # vLLM itself had.
        self.told: dict[str, int] = {}
        self.over: set[str] = set()  # requests that have started over

    def asked(self, tracked: TrackedRequest | None, request: Any) -> None:
        """vLLM asks for a request. If that was admitted before and not preempted, its load has
        failed, and it is counted anew.
        """
        if tracked is not None and tracked.counted is not None and not request.num_preemptions:
            self.external.requests += 1
            self.external.queries += tracked.counted.queries
            self.external.hits += tracked.counted.hits
            tracked.counted = None

    def admitted(self, tracked: TrackedRequest | None, request: Any, external: int, may_load: bool) -> None:
        """A request has its blocks, and vLLM counts it if it has asked what there is for it."""
        held = self.told.pop(request.request_id, None)
        if held is None:
            return
        if request.request_id in self.over and request.prefill_stats is not None:
            note_cached(request, held, external)
        is_first, queries = not request.num_preemptions, request.num_tokens - held
        if tracked is not None:
            tracked.counted = Counted(queries) if is_first else None
        if is_first and queries and self.is_alone and not may_load:
            self.external.requests += 1
            self.external.queries += queries

    def load_began(self, load: Loading) -> None:
        """A load was counted with its request."""
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
            return  # It gets other blocks, if any, and is told then what was cached.
        if load.counted is not None or tracked.name in self.over:
            note_cached(tracked.request, load.held, max(0, min(came, end) - load.held))

    def step_undone(self, request: Any, block: int, is_counted: bool) -> None:
        """A step is undone that computed what is wrong from a request's `block` on. vLLM does not
        note what is cached for it when it starts over. `is_counted`: it has counted what was before.
        """
        stats = request.prefill_stats
        if stats is None or request.request_id in self.over:
            return
        self.over.add(request.request_id)
        wrong = stats.num_local_cached_tokens - block * self.block_tokens
        if is_counted and wrong > 0:
            self.own.hits[""] += wrong

    def left(self, name: str) -> None:
        """A request has ended."""
        self.over.discard(name)

    def take_off(self, own: Any, external: Any) -> None:
        """Takes what is owed off statistics that are about to be given away."""
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
        mine = step_recovery.forebay_connector_of(self.connector)
        if mine is not None and self.log_stats:
            mine.correct(self.kv_cache_manager.prefix_cache_stats, self.connector_prefix_cache_stats)
        return make(self, *arguments, **named)

    Scheduler.make_stats = make_corrected
