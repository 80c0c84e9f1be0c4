"""The scheduler's half of direct hand-overs: which finished requests' blocks wait for decoders, and
which offers of other engines nobody will read. What tickets say is `direct`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forebay.vllm.connector import direct
from forebay.vllm.connector.metadata import Direct, Offer, Step
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import TrackedRequest, digest_of


class Offers:
    """Whether this engine hands over directly, and what its workers are to be told of it."""

    def __init__(self, facts: Facts, blocks: int, reads: bool) -> None:
        """For an engine with so many blocks. `reads`: a failed read costs a request time only."""
        self.facts, self.reads = facts, reads
        self.engine: direct.Engine | None = None  # known when all workers have opened their caches
        self.kept: dict[str, int] = {}  # finished requests whose blocks wait, and how many these are
        self.kept_at_most = int(blocks * direct.OFFERED_PART)
        self.new: list[Offer] = []  # for the next step, as what follows
        self.declined: list[Direct] = []

    def workers_opened(self, workers: Mapping[int, object], ranks: int) -> None:
        """What the workers say of themselves, by rank."""
        if not self.facts.has_states and not self.facts.has_rings:
            self.engine = direct.engine_of(workers, ranks)

    def reader(self) -> direct.Engine | None:
        """This engine, if it reads other engines' blocks."""
        return self.engine if self.reads else None

    def offer(
        self, tracked: TrackedRequest, blocks: Sequence[list[int]], keys: Sequence[bytes] | None
    ) -> dict[str, Any] | None:
        """Keeps a prompt's blocks for its decoder, if there is room. Returns how it reads them.

        `keys`: what a decoder that was asked at the same time knows them by."""
        kept = sum(len(set(group)) for group in blocks)
        if self.engine is None or sum(self.kept.values()) + kept > self.kept_at_most:
            return None
        offered, tokens = self.engine.offer(keys), tracked.request.num_prompt_tokens
        prompt, chunks = tracked.request.all_token_ids[:tokens], tokens // self.facts.chunk_tokens
        tracked.ids.grow(prompt)
        digest = digest_of(tracked.ids.with_tail(prompt, chunks))
        groups = zip(self.facts.groups, blocks, strict=True)
        pages = [
            np.array([block or -1 for block in table[: -(-tokens // group.block_tokens)]], dtype=np.int32)
            for group, table in groups
            if group.paged
        ]
        self.kept[tracked.name] = kept
        self.new.append(Offer(tracked.name, [key for _, key in offered], digest, pages, tokens))
        return self.engine.ticket(offered)

    def decline(self, offered: list[Direct]) -> None:
        """Nobody will read these."""
        self.declined += offered

    def freed(self, name: str) -> None:
        """Nobody reads a request's blocks any more."""
        self.kept.pop(name, None)

    def is_quiet(self) -> bool:
        """Whether the workers need not hear of anything."""
        return not self.new and not self.declined

    def tell(self, step: Step) -> None:
        """Tells the workers in this step."""
        step.offers, self.new = self.new, []
        step.declined, self.declined = self.declined, []
