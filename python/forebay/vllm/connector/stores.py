"""Which computed chunks are stored, when, and which blocks wait for that.

It knows jobs, the blocks that they read, and how many bytes are in flight.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.vllm.connector.metadata import Pages, Store, Stored, StoreResult
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import StateToStore, TrackedRequest, state_id

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

    def __init__(
        self, facts: Facts, workers: int, drafts: int = 0, on_v1: bool = True, needs_drafts: bool = False
    ) -> None:
        """`drafts`: the most of a step. `on_v1`: the model runner is V1.

        `needs_drafts`: a step without drafts reads a wrong state, if drafts were accepted before.
        """
        self.facts, self.workers = facts, workers
        self.drafts, self.on_v1, self.needs_drafts = drafts, on_v1, needs_drafts
        # Tokens behind the last accepted one whose KV may still change.
        self.volatile = int(drafts > 0)
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

    def note_state(self, tracked: TrackedRequest, tokens: int, drafts: int, is_prefill: bool) -> bool:
        """Notes that a step computes the state at the end of a chunk or hand-over, or may do so.

        `tokens` are those of the step, the last ones `drafts`. If drafts are accepted beyond the end
        of a block, vLLM copies the state at that end into that block when the step has ended. The
        request does not write to that block any more.
        """
        request, size = tracked.request, self.facts.chunk_tokens
        end = request.num_computed_tokens + tokens
        hands_over = is_prefill and end - drafts == request.num_prompt_tokens
        token = request.num_prompt_tokens if hands_over else end // size * size
        unsure = drafts + drafts_in_flight(request)
        if self.loses_state(request, tokens, drafts):
            tracked.gap = True
        if tracked.gap or token <= tracked.last_state or token < end - unsure:
            return False
        if self.facts.prompt_only and token > request.num_prompt_tokens:
            return False
        tracked.last_state = token
        # What is handed over lies in the step's last block, even if there are drafts behind it.
        last = end if hands_over else token
        groups = zip(self.facts.groups, tracked.blocks, strict=False)
        blocks = [
            state_block(table, -(-last // group.block_tokens)) for group, table in groups if group.state
        ]
        if not blocks or not all(blocks):
            return False
        is_due = hands_over or (not unsure and token <= request.num_tokens)
        tracked.states_to_store.append(StateToStore(token, blocks, is_due))
        return True

    def loses_state(self, request: Any, tokens: int, drafts: int) -> bool:
        """Whether vLLM may go on from a wrong state after this step, so that nothing may be stored.

        A step without drafts: see `needs_drafts`. vLLM's V1 model runner tells prompts and drafts
        apart by their number of tokens. It may take the last few tokens of a preempted request that
        begins anew for drafts that were rejected, and drafts behind a prompt's last token for a part
        of the prompt.
        """
        if not self.drafts:
            return False
        in_prompt = request.num_computed_tokens < request.num_prompt_tokens
        if self.needs_drafts and tokens == 1 and not in_prompt:
            return True
        if not self.on_v1:
            return False
        return drafts > 0 if in_prompt else not drafts and 1 < tokens <= 1 + self.drafts

    def due_states(self, tracked: TrackedRequest) -> list[StateToStore]:
        """Takes the states that can be stored behind this step: they are there, and all tokens known."""
        certain = certain_tokens(tracked.request)
        due = [state for state in tracked.states_to_store if state.is_due or state.token <= certain]
        tracked.states_to_store = [state for state in tracked.states_to_store if state not in due]
        return due

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
        named = self.for_workers(self.named(tracked, first, end))
        return Store(job, named, pages, tenant=tracked.tenant)

    @staticmethod
    def drop_lost_states(requests: Iterable[TrackedRequest], given_out: set[int]) -> int:
        """Forgets states whose blocks were given out before all tokens were known. Returns how many."""
        lost = 0
        for tracked in requests:
            kept = [state for state in tracked.states_to_store if given_out.isdisjoint(state.blocks)]
            lost += len(tracked.states_to_store) - len(kept)
            tracked.states_to_store = kept
        return lost

    def keep_certain_states(self, tracked: TrackedRequest) -> None:
        """Forgets the states that the request, which has ended, did not reach."""
        certain = certain_tokens(tracked.request)
        tracked.states_to_store = [state for state in tracked.states_to_store if state.token <= certain]

    def plan_state(self, tracked: TrackedRequest, state: StateToStore, job: int) -> Store | None:
        """A store of a state that is due."""
        if tracked.gap:
            return None
        chunks = state.token // self.facts.chunk_tokens
        tracked.ids.grow(tracked.request.all_token_ids, chunks)
        ids = tracked.ids.with_tail(tracked.request.all_token_ids[: state.token], chunks)
        # 0 chunks: KV events do not tell of states.
        self.jobs[job] = Job(tracked, set(state.blocks), chunks, 0, tracked.resets)
        tracked.stores.add(job)
        named: list[list[list[Stored]]] = [[[(state_id(of_rank[-1]), None, 1)]] for of_rank in ids]
        pages = [np.array([block], dtype=np.int32) for block in state.blocks]
        return Store(job, named, pages, state=True, tenant=tracked.tenant)

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


def drafts_in_flight(request: Any) -> int:
    """At most so many drafts, which may be rejected, are among a request's computed tokens."""
    return max(0, int(request.num_output_placeholders) - 1)


def certain_tokens(request: Any) -> int:
    """Tokens that are known, and computed by steps that were scheduled before."""
    return min(int(request.num_tokens), int(request.num_computed_tokens) - drafts_in_flight(request))


def state_block(table: Sequence[int], blocks: int) -> int:
    """The block that ends the first `blocks`; 0 if there is none, or if vLLM has moved it on.

    vLLM takes blocks for drafts from behind a state to a later place. Workers are told of the new
    place only.
    """
    block = table[blocks - 1] if blocks <= len(table) else 0
    return 0 if block in table[blocks:] else block
