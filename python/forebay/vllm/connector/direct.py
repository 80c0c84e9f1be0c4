"""Hand-over straight from a prefiller's blocks to a decoder's: which engines may, and what their
tickets say of it. Nothing that comes in is trusted.

The prefiller's workers offer blocks, each under a key; the decoder's workers read them from the
prefiller's, rank by rank. So both are on one host, with memory of one kind and the same shape.
"""

import base64
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

import forebay
from forebay.errors import InvalidError
from forebay.vllm.connector.groups import can_cut_heads
from forebay.vllm.connector.metadata import Direct, Read
from forebay.vllm.connector.namespace import Facts

# A prefiller keeps blocks this long for a decoder that does not come.
OFFER_S = 30.0
# A decoder that was asked at the same time waits this long for the prefiller to be through. It
# learns at once that a prefiller is gone.
AHEAD_S = 60.0
# The part of an engine's blocks that may wait for decoders.
OFFERED_PART = 0.75
KEY_BYTES = 16
RANKS_MAX = 1024


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """What a worker says of itself."""

    metadata: bytes
    device: str  # the type of its tensors' device


@dataclass(frozen=True)
class Engine:
    """This engine, as a prefiller or a decoder of direct hand-overs."""

    host: str
    device: str
    ranks: tuple[bytes, ...]  # what each worker said of itself

    def offer(self, keys: Sequence[bytes] | None) -> list[Direct]:
        """Keys under which the workers offer blocks: these, or new ones."""
        keys = keys or [secrets.token_bytes(KEY_BYTES) for _ in self.ranks]
        return list(zip(self.ranks, keys, strict=True))

    def ticket(self, offered: list[Direct]) -> dict[str, Any]:
        """What a decoder needs to read them."""
        ranks = [[base64.b64encode(metadata).decode(), key.hex()] for metadata, key in offered]
        return {"host": self.host, "device": self.device, "ranks": ranks}

    def read(self, ticket: object, facts: Facts) -> "Reads | None":
        """How to read what a ticket offers; None if this engine cannot. `InvalidError` if it is none."""
        if not isinstance(ticket, Mapping):
            raise refuse("direct", ticket, "an object")
        ranks = ticket.get("ranks")
        if not isinstance(ranks, list) or not 1 <= len(ranks) <= RANKS_MAX:
            raise refuse("direct.ranks", ranks, f"a list of 1 to {RANKS_MAX} ranks")
        offers = [rank(number, entry) for number, entry in enumerate(ranks)]
        if (ticket.get("host"), ticket.get("device")) != (self.host, self.device):
            return None
        if len(offers) == len(self.ranks):
            return Reads(offers, [[(*offer, None, 1)] for offer in offers])
        return read_heads(offers, len(self.ranks), facts)


@dataclass(frozen=True)
class Reads:
    """How a decoder's ranks read a prefiller's offers."""

    offers: list[Direct]
    ranks: list[list[Read]]  # for each rank, what it reads

    @property
    def unread(self) -> list[Direct]:
        """Offers that no rank reads: other ranks of the prefiller have the same heads."""
        read = {key for reads in self.ranks for _, key, _, _ in reads}
        return [offer for offer in self.offers if offer[1] not in read]


def read_heads(offers: list[Direct], ranks: int, facts: Facts) -> Reads | None:
    """How so many ranks read what a prefiller with another number of ranks offers, if they can."""
    in_one_piece = facts.pp == 1 and not facts.context.shards and facts.context.prefill == 1
    if not in_one_piece or facts.layout == "NHD" or not can_cut_heads(facts.groups):
        return None
    try:
        parts = [forebay.head_reads(facts.heads, ranks, rank, len(offers)) for rank in range(ranks)]
    except InvalidError:
        return None
    readers = Counter(part[0] for of_rank in parts for part in of_rank)

    def read(there: int, first_there: int, first_here: int, heads: int) -> Read:
        return (*offers[there], (first_there, first_here, heads), readers[there])

    return Reads(offers, [[read(*part) for part in of_rank] for of_rank in parts])


def engine_of(workers: Mapping[int, object], ranks: int) -> Engine | None:
    """The engine of these workers, if all of them can."""
    found = [workers.get(rank) for rank in range(ranks)]
    able = [one for one in found if isinstance(one, Handshake)]
    if len(able) < ranks or len({one.device for one in able}) != 1:
        return None
    return Engine(host_id(), able[0].device, tuple(one.metadata for one in able))


def host_id() -> str:
    """Engines with the same one reach each other over the loopback interface."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}:{os.stat('/proc/self/ns/net').st_ino}"


def keys_of(said: object, ranks: int) -> list[bytes]:
    """The keys that a proxy has chosen for a prefiller's ranks."""
    try:
        keys = [bytes.fromhex(key) for key in said]  # type: ignore[attr-defined]  # or it raises
    except (TypeError, ValueError):
        keys = []
    if len(keys) != ranks or any(len(key) != KEY_BYTES for key in keys) or len(set(keys)) != ranks:
        allowed = f"a list of {ranks} different ones, each of {2 * KEY_BYTES} hexadecimal digits"
        raise refuse("keys", said, allowed)
    return keys


def rank(number: int, entry: object) -> Direct:
    """One rank of a ticket."""
    try:
        metadata, key = (str(part) for part in entry)  # type: ignore[attr-defined]  # or it raises
        found = base64.b64decode(metadata, validate=True), bytes.fromhex(key)
    except (TypeError, ValueError):
        found = b"", b""
    if len(found[1]) != KEY_BYTES:
        allowed = f'a pair like ["base64", "{2 * KEY_BYTES} hexadecimal digits"]'
        raise refuse(f"direct.ranks[{number}]", entry, allowed)
    return found


def refuse(name: str, value: object, allowed: str) -> InvalidError:
    """The error of a ticket."""
    return InvalidError(f"kv_transfer_params: {name} is {value!r}; allowed is {allowed}")
