"""Which computed chunks are stored, when, and whose blocks must wait for that.

Knows jobs, the blocks that they read, and how many bytes are on their way. Must never know why a request
has blocks.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from forebay.vllm.connector.metadata import Kept, Pages, Store, Stored
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import TrackedRequest, state_id

# Bytes of one rank that are being stored at a time. What comes on top waits for a later step.
IN_FLIGHT_BYTES = 512 << 20


@dataclass
class Job:
    """A store that has not ended at every worker."""

    owner: TrackedRequest
    blocks: set[int]
    first: int
    chunks: int
    resets: int  # before its chunks were named
    tail: bool = False  # the last one is not whole
    kept: Kept = field(default_factory=lambda: Kept(0))

    @property
    def there(self) -> list[int]:
        """The whole chunks that the node has of all workers."""
        whole = self.chunks - self.tail
        return [self.first + place for place in range(whole) if place not in self.kept.missing]


class Stores:
    """The stores that are on their way."""

    def __init__(self, facts: Facts, workers: int) -> None:
        """Of none."""
        self.facts = facts
        self.workers = workers
        self.limit = max(1, IN_FLIGHT_BYTES // max(1, facts.chunk_bytes))
        if facts.has_windows:
            self.limit = sys.maxsize  # What waits has left the window. Too much at once, workers refuse.
        self.jobs: dict[int, Job] = {}
        self.chunks = 0

    def plan(self, tracked: TrackedRequest, job: int) -> Store | None:
        """The next chunks of a request that are to be stored, if there are any and there is room for them."""
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
        tracked.planned, tracked.tail, tracked.tailed = (
            last,
            tracked.tail and not tail,
            tracked.tailed or tail,
        )
        count = last - first + tail
        self.jobs[job] = Job(tracked, set(np.concatenate(pages).tolist()), first, count, tracked.resets, tail)
        self.chunks += count
        tracked.stores.add(job)
        return Store(job, self.for_workers(self.named(tracked, first, end)), pages)

    def plan_state(self, tracked: TrackedRequest, job: int) -> Store | None:
        """The state at the end of a chunk of a request, in the step after which there is one."""
        token, tracked.state = tracked.state, 0
        groups = zip(self.facts.groups, tracked.blocks, strict=False)
        blocks = [group.ends_at(table, token) for group, table in groups if group.state]
        chunks = token // self.facts.chunk_tokens
        if tracked.gap or not token or not blocks or 0 in blocks or len(tracked.ids.ranks[0]) < chunks:
            return None
        ids = tracked.ids.with_tail(tracked.request.all_token_ids[:token], chunks)
        # No blocks that events tell of.
        self.jobs[job] = Job(tracked, set(blocks), chunks, 0, tracked.resets)
        tracked.stores.add(job)
        named: list[list[Stored]] = [[(state_id(of_rank[-1]), None, 1)] for of_rank in ids]
        return Store(job, named, [np.array([block], dtype=np.int32) for block in blocks], state=True)

    def named(self, tracked: TrackedRequest, first: int, end: int) -> list[list[Stored]]:
        """Ids and parents of the chunks from the chunk `first` on up to the token `end`, for each rank."""
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

    def for_workers(self, parts: list[list[Stored]]) -> list[list[Stored]]:
        """What each worker stores of the chunks' parts. Where several have the same, the first one does."""
        alike = self.facts.ranks // self.facts.shape.tp
        return [part if first else [] for part in parts for first in (True, *[False] * (alike - 1))]

    def pages(self, tracked: TrackedRequest, start: int, end: int) -> Pages | None:
        """The blocks of the tokens from `start` to `end`; nothing if some of them are others' by now."""
        pages = []
        for group, table in zip(self.facts.groups, tracked.blocks, strict=False):
            if group.state:
                continue
            kept = group.kept(table, start, end, self.facts.chunk_tokens, tracked.computed)
            if kept is None:
                return None
            pages.append(kept)
        return pages or None

    def touched(self, blocks: Iterable[int]) -> list[int]:
        """The stores that still read one of `blocks`, which are about to be written."""
        if not self.jobs:
            return []  # As in most steps.
        fresh = set(blocks)
        return [number for number, job in self.jobs.items() if not fresh.isdisjoint(job.blocks)]

    def ended(self, number: int, kept: Kept) -> Job | None:
        """A store ended at some workers. Gives it if these are the last ones."""
        job = self.jobs.get(number)
        if job is None:
            return None
        job.kept = Kept(job.kept.workers + kept.workers, job.kept.missing | kept.missing)
        if job.kept.workers < self.workers:
            return None
        del self.jobs[number]
        self.chunks -= job.chunks
        job.owner.stores.discard(number)
        return job
