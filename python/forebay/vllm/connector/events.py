"""vLLM's events of KV blocks: what those who follow them, routers for the most part, are told of the node.

Knows which of vLLM's blocks a chunk holds, and what was told of it. Must never know why a chunk was stored or
loaded. Whoever follows the events knows which of the chunks that this engine has stored or loaded the node
has, in memory or on its disk: the node watches each chunk that is told, says at once if it is not there, and
later when it has gone. It is told of in the step after that. Nothing waits for the node here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored

import forebay
from forebay.vllm.connector import compat

# Ids in a question to the node at most.
ASK_IDS = 16_384


@dataclass(frozen=True)
class Chunk:
    """A chunk: its ids, one for each rank, and the hashes of vLLM's blocks in it."""

    ids: tuple[bytes, ...]
    hashes: tuple[Any, ...]

    @property
    def name(self) -> Any:
        """The same for chunks of other shapes with the same tokens."""
        return self.hashes[-1]


class Events:
    """What is told."""

    def __init__(self, node: forebay.Node, blocks: compat.Blocks, chunk_tokens: int) -> None:
        """Nothing yet, of chunks that `node` has and that hold `blocks`."""
        self.node, self.blocks, self.chunk_tokens = node, blocks, chunk_tokens
        self.asked: dict[int, list[tuple[Chunk, Any]]] = {}  # by the number of the question, with the event
        self.told: dict[bytes, Chunk] = {}  # by each of its ids
        self.shapes: dict[Any, int] = {}  # in how many shapes a chunk of this name was told
        self.new: list[Any] = []

    def there(self, request: Any, ids: Sequence[Sequence[bytes]], chunks: Iterable[int]) -> None:
        """The node has these whole chunks of a request, of which `ids` are the ids for each rank."""
        named = [self.event(request, ids, number) for number in chunks]
        step = max(1, ASK_IDS // len(ids))
        for first in range(0, len(named), step):
            part = named[first : first + step]
            for chunk, event in part:
                self.tell(chunk, event)
            number = self.node.watch([name for chunk, _ in part for name in chunk.ids])
            self.asked[number] = part

    def event(self, request: Any, ids: Sequence[Sequence[bytes]], number: int) -> tuple[Chunk, Any]:
        """A chunk and what there is to tell of it, as vLLM tells it of its own blocks."""
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

    def tell(self, chunk: Chunk, event: Any) -> None:
        """It is there."""
        if chunk.ids[0] in self.told:
            return
        self.told.update(dict.fromkeys(chunk.ids, chunk))
        shapes = self.shapes.get(chunk.name, 0)
        self.shapes[chunk.name] = shapes + 1
        if not shapes:
            self.new.append(event)

    def untell(self, chunk: Chunk) -> None:
        """It is not there, or one rank's part of it is not."""
        if chunk.ids[0] not in self.told:
            return
        for name in chunk.ids:
            del self.told[name]
        shapes = self.shapes.pop(chunk.name) - 1
        if shapes:
            self.shapes[chunk.name] = shapes
            return
        hashes = list(chunk.hashes)
        self.new.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=self.blocks.group))

    def take(self) -> list[Any]:
        """The events since this was asked last."""
        for number, names in self.node.take_watched():
            if number is not None:
                absent = set(names or ())
                for chunk, event in self.asked.pop(number):
                    if absent.isdisjoint(chunk.ids):
                        self.tell(chunk, event)
                    else:
                        self.untell(chunk)
                continue
            for name in list(self.told) if names is None else names:
                if name in self.told:  # With a chunk that is not, all of its ids are not.
                    self.untell(self.told[name])
        new, self.new = self.new, []
        return new
