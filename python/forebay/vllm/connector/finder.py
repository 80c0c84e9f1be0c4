"""Asks the node what is there, without waiting for it longer than a step can bear.

Knows the node's client and how ids are looked up over ranks and shapes. Must never know vLLM.
"""

from collections.abc import Callable, Sequence

import forebay
from forebay.vllm.connector.config import Shape
from forebay.vllm.connector.metadata import Source
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import Found, Lookup, StateLookup, state_id

# The node frees what it leased to an engine that died after this time.
LEASE_TTL_US = 10_000_000
# A node of this host answers in a tenth of it. One that asks its peers, or is stuck, is heard in a later one.
STEP_WAIT_S = 0.001
# Ends of chunks where a state is looked for, from the last one on. What ends before them is computed.
STATES_ASKED = 64


class Finder:
    """Finds the longest prefix that every rank has."""

    def __init__(self, node: forebay.Node, facts: Facts, clock: Callable[[], float]) -> None:
        """Asks that node."""
        self.node, self.facts, self.clock = node, facts, clock
        self.wait_budget_s = STEP_WAIT_S

    def new_step(self) -> None:
        """All answers that a step waits for have this time together."""
        self.wait_budget_s = STEP_WAIT_S

    def ask(self, shape: Shape, ids: list[list[bytes]], tokens: int) -> Lookup:
        """Asks what is there of `ids`. Keeps nothing in the node."""
        return Lookup(shape, ids, tokens, self.node.find(ids))

    def answer(self, asked: Lookup) -> Found | None:
        """What is there; None if the node has not said it yet."""
        counts = self.said(asked.finding)
        if counts is None:
            return None
        in_memory, on_disk, on_peers = counts
        found = Found(asked.shape, asked.ids, asked.tokens, in_memory, on_disk, on_peers)
        return self.first(found, in_memory + on_disk + on_peers)

    def said(self, finding: forebay.Finding) -> tuple[int, int, int] | None:
        """What the node has said, or says within the time that this step still has for it."""
        counts = finding.wait()
        if counts is None and self.wait_budget_s > 0:
            before = self.clock()
            counts = finding.wait(self.wait_budget_s)
            self.wait_budget_s -= self.clock() - before
        return counts

    def ask_state(self, found: Found) -> Lookup:
        """Asks for the state at the end of all chunks, which covers no token beside them."""
        return self.ask(found.shape, [[state_id(of_rank[-1])] for of_rank in found.ids], 0)

    def ask_states(self, found: Found, held: int) -> StateLookup:
        """Asks behind which of the chunks there is a state. One that lies within the `held` tokens is of no
        use.
        """
        least = max(held // self.facts.chunk_tokens, found.chunks - STATES_ASKED)
        return StateLookup(
            found,
            [
                (chunks, self.node.find([[state_id(of_rank[chunks - 1])] for of_rank in found.ids]))
                for chunks in range(found.chunks, least, -1)
            ],
        )

    def answer_states(self, asked: StateLookup) -> Found | None:
        """The chunks up to the last state that all ranks have; None if the node has not said it yet."""
        for chunks, finding in asked.findings:
            counts = self.said(finding)
            if counts is None:
                return None
            if sum(counts):
                return self.first(asked.found, chunks)
        return self.first(asked.found, 0)

    def first(self, found: Found, chunks: int) -> Found:
        """Only the first `chunks`."""
        if chunks >= found.chunks:
            return found
        in_memory = min(found.in_memory, chunks)
        on_disk = min(found.on_disk, chunks - in_memory)
        return Found(
            found.shape,
            [of_rank[:chunks] for of_rank in found.ids],
            chunks * self.facts.chunk_tokens,
            in_memory,
            on_disk,
            chunks - in_memory - on_disk,
        )

    def hold(self, ids: Sequence[list[bytes]]) -> list[forebay.Hold]:
        """Keeps chunks in the node until they are released."""
        return [self.node.hold(of_rank, ttl_us=LEASE_TTL_US) for of_rank in ids]

    def bring(self, ids: Sequence[list[bytes]]) -> list[forebay.Hold]:
        """The same, and has them come into the node's memory from its disk and its peers."""
        return [self.node.hold(of_rank, ttl_us=LEASE_TTL_US, bring=True) for of_rank in ids]

    def sources(self, shape: Shape, ids: list[list[bytes]]) -> list[list[Source]]:
        """For each rank of this engine, whose chunks hold its heads."""
        facts, tp = self.facts, self.facts.ranks
        return [
            [
                (ids[stage * shape.tp + theirs], there, here, heads)
                for theirs, there, here, heads in forebay.head_reads(facts.heads, tp, rank, shape.tp)
            ]
            for stage in range(facts.pp)
            for rank in range(tp)
        ]
