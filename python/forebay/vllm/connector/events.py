"""Publishes which chunks the node has, as vLLM's KV events. Routers, mostly, follow these.

An event names the chunks that this engine has stored or loaded and that are in the node's memory or
on its disk. The node watches each chunk that was told: it says at once if it does not have it, and
later when it has gone. The next step publishes that. Nothing waits for the node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

import forebay
from forebay.vllm.connector import compat

# Ids in a question to the node. At most one is under way, so its socket has room and nobody waits.
ASK_IDS = 2048


@dataclass(frozen=True)
class Chunk:
    """A chunk: its id for each rank, and the hashes of vLLM's blocks in it."""

    ids: tuple[bytes, ...]
    hashes: tuple[Any, ...]

    @property
    def name(self) -> Any:
        """The same for chunks with the same tokens in other shapes."""
        return self.hashes[-1]


class Events:
    """What is published, and what the node was asked to watch."""

    def __init__(self, node: forebay.Node, blocks: compat.EventBlocks, chunk_tokens: int) -> None:
        self.node, self.blocks, self.chunk_tokens = node, blocks, chunk_tokens
        # Questions in flight with their events; None instead if the answer is of no use any more.
        self.asked: list[tuple[Chunk, Any]] = []
        self.to_ask: list[tuple[Chunk, Any]] = []  # the questions after them
        self.published: dict[bytes, Chunk] = {}  # published chunks, by each of their ids
        self.shapes: dict[Any, int] = {}  # by name: in how many shapes a chunk is published
        self.new: list[Any] = []  # events since the last `take`

    def chunks_stored(self, request: Any, ids: Sequence[Sequence[bytes]], chunks: Iterable[int]) -> None:
        """The node has these whole chunks of a request. `ids` are its chunk ids for each rank."""
        for number in chunks:
            chunk, event = self.event(request, ids, number)
            self.publish(chunk, event)
            self.to_ask.append((chunk, event))
        self.ask()

    def ask(self) -> None:
        """Has the node watch what was published, unless a question is in flight."""
        if self.asked or not self.to_ask:
            return
        count = max(1, ASK_IDS // len(self.to_ask[0][0].ids))
        self.asked, self.to_ask = self.to_ask[:count], self.to_ask[count:]
        self.node.watch([name for chunk, _ in self.asked for name in chunk.ids])

    def event(self, request: Any, ids: Sequence[Sequence[bytes]], number: int) -> tuple[Chunk, Any]:
        """A chunk and its event, in the form of vLLM's own."""
        start, end = number * self.chunk_tokens, (number + 1) * self.chunk_tokens
        hashes, adapter = self.blocks.hashes(request, start, end), request.lora_request
        event = BlockStored(
            block_hashes=hashes,
            parent_block_hash=self.blocks.hash_before(request, start) if start else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=self.blocks.block_tokens,
            lora_id=None if adapter is None else adapter.adapter_id,
            medium=MEDIUM_CPU,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=self.blocks.extra_keys(request, start, end),
            group_idx=self.blocks.group,
            kv_cache_spec_kind=self.blocks.kind,
            kv_cache_spec_sliding_window=self.blocks.window,
        )
        return Chunk(tuple(of_rank[number] for of_rank in ids), tuple(hashes)), event

    def publish(self, chunk: Chunk, event: Any) -> None:
        if chunk.ids[0] in self.published:
            return
        self.published.update(dict.fromkeys(chunk.ids, chunk))
        shapes = self.shapes.get(chunk.name, 0)
        self.shapes[chunk.name] = shapes + 1
        if not shapes:
            self.new.append(event)

    def retract(self, chunk: Chunk) -> None:
        """Publishes that a chunk, or one rank's part of it, has gone."""
        known = self.published.get(chunk.ids[0])
        if known is None:
            return
        for name in known.ids:
            del self.published[name]
        shapes = self.shapes.pop(known.name) - 1
        if shapes:
            self.shapes[known.name] = shapes
            return
        hashes = list(known.hashes)
        self.new.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=self.blocks.group))

    def forget(self) -> None:
        """All KV has new names: what was published is gone, and open answers mean nothing."""
        for chunk in set(self.published.values()):
            self.retract(chunk)
        self.to_ask = []
        self.asked = [(chunk, None) for chunk, _ in self.asked]

    def take(self) -> list[Any]:
        for number, names in self.node.take_watched():
            if number is not None:
                absent, answered, self.asked = set(names or ()), self.asked, []
                for chunk, event in answered:
                    if event is None:
                        continue
                    if absent.isdisjoint(chunk.ids):
                        self.publish(chunk, event)
                    else:
                        self.retract(chunk)
                continue
            for name in list(self.published) if names is None else names:
                if name in self.published:  # All ids of a chunk leave together.
                    self.retract(self.published[name])
        self.ask()
        new, self.new = self.new, []
        return new
