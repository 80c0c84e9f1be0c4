"""Looks chunks up in the node, without waiting longer than a step can bear.

It knows the node's client, and how ids are looked up over ranks and shapes. It knows no vLLM.
"""

from collections.abc import Callable, Sequence

import forebay
from forebay.vllm.connector.config import Shape
from forebay.vllm.connector.metadata import Source
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tenants import seen_by
from forebay.vllm.connector.tracked import Found, Lookup, StateLookup, state_id

# After this time the node frees what it pinned for an engine that has died.
LEASE_TTL_US = 10_000_000
# A node of this host answers in a tenth of it. A later answer is heard in a later step.
STEP_WAIT_S = 0.001
# At how many ends of chunks a state is looked for, from the last one on.
STATES_ASKED = 64


class Finder:
    """Finds the longest prefix that every rank has."""

    def __init__(self, node: forebay.Node, facts: Facts, clock: Callable[[], float]) -> None:
        self.node, self.facts, self.clock = node, facts, clock
        self.wait_budget_s = STEP_WAIT_S

    def new_step(self) -> None:
        """All answers that a step waits for share one budget of time."""
        self.wait_budget_s = STEP_WAIT_S

    def ask(
        self,
        shape: Shape,
        ids: list[list[bytes]],
        tokens: int,
        trace: str | None = None,
        tenant: int | None = None,
    ) -> Lookup:
        """Looks a tenant's `ids` up, as part of a trace if there is one. Pins nothing in the node."""
        return Lookup(shape, ids, tokens, seen_by(self.node, tenant).find(ids, trace=trace))

    def answer(self, asked: Lookup) -> Found | None:
        """What is there; None if the node has not answered yet."""
        counts = self.counts(asked.finding)
        if counts is None:
            return None
        found = Found(asked.shape, asked.ids, asked.tokens, *counts)
        return self.first(found, sum(counts))

    def counts(self, finding: forebay.Finding) -> tuple[int, int, int] | None:
        """Chunks in memory, on disk and at peers, if the node says so within the step's budget."""
        counts = finding.wait()
        if counts is None and self.wait_budget_s > 0:
            before = self.clock()
            counts = finding.wait(self.wait_budget_s)
            self.wait_budget_s -= self.clock() - before
        return counts

    def ask_state(self, found: Found, tenant: int | None = None) -> Lookup:
        """Looks up the state at the end of all chunks. It covers no token beside them."""
        ids = [[state_id(of_rank[-1])] for of_rank in found.ids]
        return self.ask(found.shape, ids, 0, tenant=tenant)

    def ask_states(self, found: Found, held: int, tenant: int | None = None) -> StateLookup:
        """Looks up which chunks have a state at their end, beyond the `held` tokens."""
        least = max(held // self.facts.chunk_tokens, found.chunks - STATES_ASKED)
        node = seen_by(self.node, tenant)
        findings = [
            (chunks, node.find([[state_id(of_rank[chunks - 1])] for of_rank in found.ids]))
            for chunks in range(found.chunks, least, -1)
        ]
        return StateLookup(found, findings)

    def answer_states(self, asked: StateLookup) -> Found | None:
        """The chunks up to the last state that all ranks have; None if that is not known yet."""
        for chunks, finding in asked.findings:
            counts = self.counts(finding)
            if counts is None:
                return None
            if sum(counts):
                return self.first(asked.found, chunks)
        return self.first(asked.found, 0)

    def first(self, found: Found, chunks: int) -> Found:
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

    def hold(
        self, ids: Sequence[list[bytes]], tenant: int | None = None, *, bring: bool = False
    ) -> list[forebay.Hold]:
        """Pins a tenant's chunks in the node until they are released. With `bring`, the node fetches
        them into its memory from its disk and its peers.
        """
        node = seen_by(self.node, tenant)
        return [node.hold(of_rank, ttl_us=LEASE_TTL_US, bring=bring) for of_rank in ids]

    def sources(self, shape: Shape, ids: list[list[bytes]]) -> list[list[Source]]:
        """For each rank of this engine, which chunks hold its heads, and where in them."""
        facts, parts = self.facts, self.facts.parts
        return [
            [
                (ids[stage * shape.tp + theirs], there, here, heads)
                for theirs, there, here, heads in forebay.head_reads(
                    facts.heads, parts, rank % parts, shape.tp
                )
            ]
            for stage in range(facts.pp)
            for rank in range(facts.ranks)
        ]
