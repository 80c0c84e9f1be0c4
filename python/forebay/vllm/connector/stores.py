"""Which computed chunks are stored, when, and which blocks wait for that.

It knows jobs, the blocks that they read, and how many bytes are in flight.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from forebay.vllm.connector.metadata import Pages, Store, Stored, StoreResult
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import TrackedRequest, state_id

# Bytes of one rank in flight. What exceeds them is stored in a later step.
IN_FLIGHT_BYTES = 512 << 20


@dataclass
class Job:
    """A store in flight: it has not ended at every worker."""

    owner: TrackedRequest
    blocks: set[int]
    first: int
    chunks: int
    resets: int  # of the engine, before its chunks were named
    tail: bool = False  # the last one is not whole
    result: StoreResult = field(default_factory=lambda: StoreResult(0))

    @property
    def chunks_taken(self) -> list[int]:
        """The whole chunks that the node took from all workers."""
        whole = self.chunks - self.tail
        return [self.first + place for place in range(whole) if place not in self.result.missing]


class Stores:
    """The stores in flight, and what is to be stored next."""

    def __init__(self, facts: Facts, workers: int, speculates: bool = False) -> None:
        self.facts, self.workers = facts, workers
        # Tokens behind the last accepted one whose KV may still change.
        self.volatile = int(speculates)
        self.limit = max(1, IN_FLIGHT_BYTES // max(1, facts.chunk_bytes))
        if facts.has_windows:
            self.limit = sys.maxsize  # What waits would leave the window. Workers refuse too much.
        self.jobs: dict[int, Job] = {}
        self.chunks = 0

    def set_goal(self, tracked: TrackedRequest, computed: int, is_prefill: bool) -> None:
        """The chunks among the first `computed` tokens are to be stored.

        A prefiller stores the prompt to its last token, others whole chunks.
        """
        request, size, prompt = tracked.request, self.facts.chunk_tokens, tracked.request.num_prompt_tokens
        certain = min(computed, prompt if self.facts.prompt_only else request.num_tokens)
        if is_prefill:
            certain = min(certain, prompt)
            # The node may have more of this answer. The tail is behind the last whole chunk.
            tracked.planned, tracked.goal = (
                min(tracked.planned, prompt // size),
                min(tracked.goal, prompt // size),
            )
            # On CPUs a page is compared with its checksum: the last one must be final.
            ends = not self.facts.on_cpu or request.max_tokens == 1 or request.is_finished()
            has_tail = certain == prompt and prompt % size > 0 and not self.facts.has_rings
            tracked.tail = has_tail and not tracked.tailed and ends
        elif certain > prompt:
            certain -= self.volatile
        tracked.goal = max(tracked.goal, certain // size)
        tracked.next_tokens = (tracked.goal + 1) * size
        if is_prefill and certain < prompt:
            tracked.next_tokens = min(tracked.next_tokens, prompt)
        tracked.ids.grow(request.all_token_ids, tracked.goal)

    def set_state_goal(self, tracked: TrackedRequest, computed: int, is_prefill: bool) -> bool:
        """Has the state behind `computed` tokens stored if a chunk or hand-over ends there."""
        request = tracked.request
        ends = computed % self.facts.chunk_tokens == 0
        hands_over = computed == request.num_prompt_tokens and is_prefill
        # A chunk has no name while some of its tokens are computed and not known yet.
        if computed > request.num_tokens or not (ends or hands_over):
            return False
        tracked.state = computed
        return True

    def plan(self, tracked: TrackedRequest, job: int) -> Store | None:
        """A store of a request's next chunks, if there are any and there is room for them."""
        if tracked.gap:
            return None
        size, room = self.facts.chunk_tokens, self.limit - self.chunks
        first, last = tracked.planned, min(tracked.goal, tracked.planned + room)
        tail = tracked.tail and last == tracked.goal and last - first < room
        end = tracked.request.num_prompt_tokens if tail else last * size
        if end <= first * size:
            return None
        pages = self.pages(tracked, first * size, end)
        if pages is None:
            tracked.gap = True
            return None
        tracked.planned, tracked.tailed = last, tracked.tailed or tail
        tracked.tail = tracked.tail and not tail
        count = last - first + tail
        self.jobs[job] = Job(tracked, set(np.concatenate(pages).tolist()), first, count, tracked.resets, tail)
        self.chunks += count
        tracked.stores.add(job)
        return Store(job, self.for_workers(self.named(tracked, first, end)), pages)

    def plan_state(self, tracked: TrackedRequest, job: int) -> Store | None:
        """A store of the state at the end of a chunk, in the step after which there is one."""
        token, tracked.state = tracked.state, 0
        groups = zip(self.facts.groups, tracked.blocks, strict=False)
        blocks = [group.block_ending(table, token) for group, table in groups if group.state]
        chunks = token // self.facts.chunk_tokens
        if tracked.gap or not token or not blocks or 0 in blocks or len(tracked.ids.ranks[0]) < chunks:
            return None
        ids = tracked.ids.with_tail(tracked.request.all_token_ids[:token], chunks)
        # 0 chunks: KV events do not tell of states.
        self.jobs[job] = Job(tracked, set(blocks), chunks, 0, tracked.resets)
        tracked.stores.add(job)
        named: list[list[list[Stored]]] = [[[(state_id(of_rank[-1]), None, 1)]] for of_rank in ids]
        return Store(job, named, [np.array([block], dtype=np.int32) for block in blocks], state=True)

    def named(self, tracked: TrackedRequest, first: int, end: int) -> list[list[Stored]]:
        """Ids, parents and sizes of the chunks from `first` to the token `end`, for each rank."""
        size = self.facts.chunk_tokens
        if end % size:
            ids = tracked.ids.with_tail(tracked.request.all_token_ids[:end], end // size)
        else:
            ids = [of_rank[: end // size] for of_rank in tracked.ids.ranks]
        return [
            [
                (of_rank[chunk], of_rank[chunk - 1] if chunk else None, min(size, end - chunk * size))
                for chunk in range(first, len(of_rank))
            ]
            for of_rank in ids
        ]

    def for_workers(self, parts: list[list[Stored]]) -> list[list[list[Stored]]]:
        """What each worker stores. Of several workers with the same KV, the first one stores it."""
        facts, cut, own = self.facts, self.facts.shape.tp, self.facts.chunks_of_rank
        alike, again = max(1, facts.parts // cut), facts.ranks - facts.parts
        nothing: list[list[Stored]] = []
        found = []
        for stage in range(facts.pp):
            for first in range(stage * cut, (stage + 1) * cut, own):
                found += [parts[first : first + own], *[nothing] * (alike - 1)]
            found += [nothing] * again
        return found

    def pages(self, tracked: TrackedRequest, start: int, end: int) -> Pages | None:
        """The blocks of the tokens from `start` to `end`; None if others have some of them."""
        pages = []
        for group, table in zip(self.facts.groups, tracked.blocks, strict=False):
            if not group.paged:
                continue
            kept = group.blocks_to_store(table, start, end, self.facts.chunk_tokens, tracked.computed)
            if kept is None:
                return None
            pages.append(kept)
        return pages or None

    def touched(self, blocks: Iterable[int]) -> list[int]:
        """The stores that read one of `blocks`, which are about to be written."""
        if not self.jobs:
            return []  # As in most steps.
        fresh = set(blocks)
        return [number for number, job in self.jobs.items() if not fresh.isdisjoint(job.blocks)]

    def ended(self, number: int, result: StoreResult) -> Job | None:
        """A store has ended at some workers. Returns it when it has ended at all."""
        job = self.jobs.get(number)
        if job is None:
            return None
        job.result = StoreResult(job.result.workers + result.workers, job.result.missing | result.missing)
        if job.result.workers < self.workers:
            return None
        del self.jobs[number]
        self.chunks -= job.chunks
        job.owner.stores.discard(number)
        return job
