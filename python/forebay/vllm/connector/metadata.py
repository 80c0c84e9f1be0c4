"""The messages between the two halves of the connector in every step.

They are pickled between processes, so they hold ids and arrays and no objects of vLLM.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

Pages: TypeAlias = list[npt.NDArray[np.int32]]
# Chunk ids in order, first head in them, first head here, heads.
Source: TypeAlias = tuple[list[bytes], int, int, int]
# What a prefiller's worker said of itself, and the key of what it offers.
Direct: TypeAlias = tuple[bytes, bytes]
# The same; first head there, first head here and heads, or whole pages; how many ranks read it.
Read: TypeAlias = tuple[bytes, bytes, tuple[int, int, int] | None, int]
# A tier, bytes that came from it, seconds.
Rate: TypeAlias = tuple[Literal["memory", "disk", "peer"], int, float]
# Id, id of the chunk before it, tokens.
Stored: TypeAlias = tuple[bytes, bytes | None, int]


@dataclass
class Load:
    """Chunks to load into pages of a request."""

    job: int
    request: str
    sources: list[list[Source]]  # for each rank
    pages: Pages  # for each group, from the first chunk on; -1: is there already
    tokens: int  # that the chunks hold
    source_page_tokens: int | None
    layerwise: bool
    states: list[bytes] | None = None  # for each rank, the state at the end of them
    state_pages: Pages = field(default_factory=list)  # for each group with states, one block
    reads: list[list[Read]] | None = None  # for each rank: it is read from there, not from the node
    first_token: int = 0  # of the request, that `pages` begin with
    digest: bytes = b""  # of the prompt that is read directly
    ahead: bool = False  # the prefiller still computes what is read
    trace: str | None = None  # the span that it is part of, as a traceparent
    tenant: int | None = None  # whose chunks they are; None: the engine's own tenant's


@dataclass
class Offer:
    """Blocks of a finished request that a decoder may read."""

    request: str
    keys: list[bytes]  # for each rank
    digest: bytes  # of the prompt
    pages: Pages  # for each group, from the first token on; -1: there is none
    tokens: int


@dataclass
class Store:
    """Consecutive chunks of a request to store, or a state, which is as a chunk of one token."""

    job: int
    # For each rank the equal parts of its heads, and of each its chunks. No part where another rank
    # stores the same.
    chunks: list[list[list[Stored]]]
    pages: Pages
    state: bool = False
    tenant: int | None = None  # whose chunks they will be; None: the engine's own tenant's


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """What the workers do in one step."""

    number: int
    idle: bool  # nothing is computed
    loads: list[Load] = field(default_factory=list)
    early: bool = False  # the step waits for loads, which may begin before vLLM prepares it
    stores: list[Store] = field(default_factory=list)
    flush: list[int] = field(default_factory=list)  # stores that end before it computes
    sent: dict[str, list[int]] = field(default_factory=dict)  # finished requests: their stores
    offers: list[Offer] = field(default_factory=list)  # of some of them
    declined: list[Direct] = field(default_factory=list)  # offers that nobody will read
    timed: bool = False  # the scheduler wants to know when it has ended


# A step that computes and moves nothing. Nobody writes to it.
NOTHING = Step(0, idle=False)


@dataclass
class LoadResult:
    """How a load ended at this many workers."""

    workers: int
    tokens: int  # that may be used, from the first chunk on


@dataclass
class StoreResult:
    """How a store ended at this many workers."""

    workers: int
    missing: set[int] = field(default_factory=set)  # places of chunks that the node did not take


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """What ended in a step, at one worker or at several."""

    step: int
    loads: dict[int, LoadResult] = field(default_factory=dict)
    stores: dict[int, StoreResult] = field(default_factory=dict)
    rates: list[Rate] = field(default_factory=list)  # what loads have taken

    def aggregate(self, other: "Report") -> "Report":
        """Both together. A load is worth its worst worker."""
        loads = dict(self.loads)
        for job, ended in other.loads.items():
            mine = loads.get(job, LoadResult(0, ended.tokens))
            loads[job] = LoadResult(mine.workers + ended.workers, min(mine.tokens, ended.tokens))
        stores = dict(self.stores)
        for job, kept in other.stores.items():
            ours = stores.get(job, StoreResult(0))
            stores[job] = StoreResult(ours.workers + kept.workers, ours.missing | kept.missing)
        return Report(max(self.step, other.step), loads, stores, self.rates + other.rates)
