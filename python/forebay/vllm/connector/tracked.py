"""What the scheduler's half remembers of a request: chunk ids, blocks, loads and stores.

These are plain records. They decide nothing.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import forebay
from forebay.vllm.connector import compat
from forebay.vllm.connector.adapters import Adapter
from forebay.vllm.connector.config import Shape
from forebay.vllm.connector.handover import Ticket
from forebay.vllm.connector.media import Media
from forebay.vllm.connector.namespace import Facts

# Where chunks may be, the nearest first.
TIERS = ("memory", "disk", "peer")


def state_id(chunk_id: bytes) -> bytes:
    """The id of the state at the end of a chunk, whole or not."""
    return hashlib.sha256(b"forebay state " + chunk_id).digest()


@dataclass(frozen=True)
class Shared:
    """The first chunks of a request that others may use, whatever their salt."""

    chunks: int
    namespaces: Sequence[bytes]  # without the request's salt


class ChunkIds:
    """The chunk ids of a request's tokens, for each rank of a shape. They grow with these."""

    def __init__(
        self,
        shape: Shape,
        namespaces: Sequence[bytes],
        chunk_tokens: int,
        media: Media,
        shared: Shared | None = None,
    ) -> None:
        self.shape, self.media = shape, media
        self.chunk_tokens = chunk_tokens
        self.namespaces, self.shared = namespaces, shared
        self.ranks: list[list[bytes]] = [[] for _ in namespaces]

    def grow(self, tokens: Sequence[int], chunks: int | None = None) -> None:
        """Adds the ids of the whole chunks of `tokens`, or of the first `chunks`."""
        have, size = len(self.ranks[0]), self.chunk_tokens
        whole = len(tokens) // size
        end = whole if chunks is None else min(chunks, whole)
        private = have if self.shared is None else min(max(have, self.shared.chunks), end)
        for start, stop in ((have, private), (private, end)):
            for first, last, shown in self.runs(start, stop):
                self.extend(self.ranks, tokens[first * size : last * size], shown)

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int, bytes]]:
        """The chunks from `first` to `end`: runs of text, and each chunk with media."""
        size, start = self.chunk_tokens, first
        for chunk in range(first, end) if self.media.items else ():
            shown = self.media.within(chunk * size, (chunk + 1) * size)
            if shown:
                if start < chunk:
                    yield start, chunk, b""
                yield chunk, chunk + 1, shown
                start = chunk + 1
        if start < end:
            yield start, end, b""

    def extend(
        self, ranks: list[list[bytes]], tokens: Sequence[int], shown: bytes, tail: bool = False
    ) -> None:
        """Adds the ids of the chunks of `tokens` to those of `ranks`."""
        is_shared = self.shared is not None and not tail and len(ranks[0]) < self.shared.chunks
        namespaces = self.shared.namespaces if self.shared is not None and is_shared else self.namespaces
        for namespace, ids in zip(namespaces, ranks, strict=True):
            key = hashlib.sha256(namespace + shown).digest() if shown else namespace
            parent = ids[-1] if ids else None
            ids.extend(forebay.chunk_ids(key, tokens, self.chunk_tokens, parent=parent, tail=tail))

    def with_tail(self, tokens: Sequence[int], chunks: int) -> list[list[bytes]]:
        """The ids of the first `chunks` whole chunks, and one for the rest of `tokens`."""
        start = chunks * self.chunk_tokens
        found = [ids[:chunks] for ids in self.ranks]
        if len(tokens) > start:
            self.extend(found, tokens[start:], self.media.within(start, len(tokens)), tail=True)
        return found


def name_chunks(
    facts: Facts,
    shape: Shape,
    request: Any,
    adapter: Adapter | None,
    media: Media,
    shared_tokens: int = 0,
    tenant: int | None = None,
) -> ChunkIds:
    """The chunk ids of a tenant's request in a shape, none yet. The first `shared_tokens` have names
    without salt.
    """
    digest = adapter.digest if adapter is not None else None
    namespaces = facts.namespaces(request.cache_salt, shape, digest, tenant)
    shared = None
    if shared_tokens >= facts.chunk_tokens and request.cache_salt is not None:
        shared = Shared(shared_tokens // facts.chunk_tokens, facts.namespaces(None, shape, digest, tenant))
    return ChunkIds(shape, namespaces, facts.chunk_tokens, media, shared)


def digest_of(ids: Sequence[Sequence[bytes]]) -> bytes:
    """Names a prompt and all that its KV depends on, by the last ids of its ranks' chunks."""
    return hashlib.sha256(b"".join(of_rank[-1] for of_rank in ids)).digest()


@dataclass
class Lookup:
    """A question to the node: ids by rank in the shape of who stored them, and what they cover."""

    shape: Shape
    ids: list[list[bytes]]
    tokens: int
    finding: forebay.Finding


@dataclass
class Found:
    """The chunks of a request that can be loaded: ids by rank in the shape of who stored them."""

    shape: Shape
    ids: list[list[bytes]]
    tokens: int  # of the request, that they cover
    in_memory: int = 0
    on_disk: int = 0
    on_peers: int = 0

    @property
    def chunks(self) -> int:
        return len(self.ids[0])

    def tiers(self, first: int) -> dict[str, int]:
        """How many of the chunks from `first` on are in which tier. The nearest ones come first."""
        on_disk = self.in_memory + self.on_disk
        bounds = [max(first, bound) for bound in (0, self.in_memory, on_disk, self.chunks)]
        return {name: end - start for name, start, end in zip(TIERS, bounds[:-1], bounds[1:], strict=True)}


@dataclass
class StateLookup:
    """At which ends of found chunks the node was asked for a state, the last one first."""

    found: Found
    findings: list[tuple[int, forebay.Finding]]  # chunks up to there


@dataclass
class StateToStore:
    """A state that a step computes, or may compute with its drafts, and that is to be stored."""

    token: int  # at whose end it is
    blocks: list[int]  # of each group with states
    is_due: bool  # it is there when this step has ended


@dataclass
class PendingHandover:
    """What a prefiller stores for a request, while it does."""

    promised: Found
    since_s: float  # when its last chunk came, or the wait for it began
    asked_s: float = 0.0  # when the node was asked last
    ask_s: float = 0.0  # when to ask it again
    chunks: int = 0  # that have come
    holds: list[forebay.Hold] = field(default_factory=list)  # of these


@dataclass
class Counted:
    """What vLLM has counted of a request's first admission."""

    queries: int  # tokens that the connector was asked for
    hits: Counter[str] = field(default_factory=Counter)  # tokens to load, by tier


@dataclass
class Loading:
    """A load in flight: it has not ended at every worker."""

    owner: "TrackedRequest"  # which may have begun another one since
    ids: list[list[bytes]]  # of the request's chunks, from the first one on
    first_chunk: int
    tokens: int
    layerwise: bool
    tiers: dict[str, int]
    holds: list[forebay.Hold]
    held: int = 0  # tokens that vLLM had, and does not load
    external: int = 0  # tokens behind these that it counts as loaded
    counted: Counted | None = None  # None if the request was preempted before
    resets: int = 0  # of the engine, before its chunks were named
    workers: int = 0  # where it has ended
    usable: int = 0  # tokens that may be used
    direct: bool = False  # it is read from a prefiller's blocks

    def tiers_of(self, start: int, end: int, size: int) -> dict[str, int]:
        """How many of the tokens from `start` to `end` are in which tier, in chunks of `size`."""
        found, last = {}, self.first_chunk
        for tier, chunks in self.tiers.items():
            first, last = last, last + chunks
            found[tier] = max(0, min(end, last * size) - max(start, first * size))
        return found


@dataclass
class TrackedRequest:
    """One request."""

    request: Any
    ids: ChunkIds
    adapter: Adapter | None = None
    resets: int = 0  # of the engine, before its chunks were named
    shared_tokens: int = 0  # from the first one on, that are named without its salt
    tenant: int | None = None  # whose KV it is; None: the engine's own tenant's
    # What is looked up and found.
    other_ids: dict[Shape, ChunkIds] = field(default_factory=dict)  # in other shapes
    ticket: Ticket | None = None  # of a hand-over
    keys: list[bytes] | None = None  # under which its blocks are to be offered
    direct: Found | None = None  # what can be read from the prefiller's blocks
    pending_handover: PendingHandover | None = None
    asked: list[Lookup] | None = None  # not all of them are answered yet
    states: StateLookup | None = None  # the same of states
    there: Found | None = None  # what was there, of which `found` is worth loading
    found: Found | None = None
    found_s: float = 0.0
    found_held: int = 0  # `held` then
    looked_s: float = 0.0  # when vLLM asked last
    held: int = 0  # tokens that vLLM had then
    handed: Found | None = None  # what a prefiller stored
    # What is loaded.
    layerwise: bool = False
    chunk_limit: int | None = None  # loads have failed behind it
    loading: Loading | None = None
    counted: Counted | None = None  # of its first admission, where vLLM has counted that
    # What it computes and stores.
    blocks: list[list[int]] = field(default_factory=list)  # by group; 0: none
    since: int = 0  # the last job when it got its blocks
    begun: int = 0  # tokens that its blocks had then, or that are loaded into them
    computed: int = 0  # tokens; others may have the blocks that windows have left by then
    known: int = 0  # chunks that need not be stored
    goal: int = 0  # whole chunks that are computed
    planned: int = 0  # of them, those that are stored, being stored or known to be there
    next_tokens: int = 0  # computed tokens at which there is another whole chunk
    tail: bool = False  # what is behind the whole chunks is to be stored too
    tailed: bool = False  # it is stored, or being stored
    states_to_store: list[StateToStore] = field(default_factory=list)
    last_state: int = 0  # the last token at whose end there was, or may have been, a state
    gap: bool = False  # a chunk cannot be stored, so those behind it would not be found
    stale: bool = False  # its blocks hold KV from before the last reset
    preemptions: int = 0  # that were noticed
    stores: set[int] = field(default_factory=set)  # in flight

    @property
    def name(self) -> str:
        """vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def trace(self) -> str | None:
        """The span that it is part of, as a traceparent; None if vLLM traces nothing."""
        return compat.trace_of(self.request)

    def reset_progress(self, begun: int) -> None:
        """It has new blocks, and nothing is computed yet behind the first `begun` tokens."""
        self.begun = begun
        self.planned = self.goal = self.known
        self.next_tokens = 0
        self.forget_states()
        self.gap = False

    def notice_preemption(self) -> list[list[int]]:
        """The blocks that it has lost since the last time. They are not stored any more."""
        if self.preemptions == self.request.num_preemptions:
            return []
        self.preemptions = self.request.num_preemptions
        lost, self.blocks = self.blocks, []
        self.goal = self.planned
        self.tail = self.stale = False
        self.forget_states()
        return lost

    def forget_states(self) -> None:
        """What was noted of states to store does not hold any more."""
        self.states_to_store = []
        self.last_state = 0

    def forget(self) -> None:
        """A reset gave new names to all KV. What its blocks hold now is not stored under these."""
        self.asked = self.states = self.found = self.handed = self.ticket = self.pending_handover = None
        self.direct = self.there = None
        self.chunk_limit = None
        self.known = 0
        self.forget_states()
        self.gap = self.stale = bool(self.blocks)
        self.other_ids.clear()

    @property
    def is_stored(self) -> bool:
        """Whether no store is left to be planned."""
        return self.gap or (self.planned >= self.goal and not self.tail and not self.states_to_store)
