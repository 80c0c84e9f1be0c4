"""What a model would write to its pages and read from them, and whether that is there.

A layer's page holds bytes that follow from a prompt, the layer, the rank's share of it and the place
in the prompt. So each byte that a token's attention reads can be told from all others. It knows
vLLM's specifications: which tokens a layer sees, and in which block of a request it looks for them.
Nothing here knows Forebay.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

Bytes = npt.NDArray[np.uint8]
# A page is cut out of this noise, at a place that its name says, and changed as it says.
NOISE: Bytes = np.random.default_rng(34).integers(0, 256, (32 << 20) + 1, dtype=np.uint8)
PLACES = 16 << 20


def noise(count: int, *name: object) -> Bytes:
    """So many bytes that follow from the name."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=9).digest()
    start = int.from_bytes(digest[:8], "little") % PLACES
    cut = NOISE[start : start + count]
    assert len(cut) == count
    return cut ^ digest[8]


@dataclass
class Seen:
    """Of one request: what it was asked, and the blocks of each group."""

    prompt: int  # names its contents
    prompt_tokens: int
    tables: Sequence[Sequence[int]]
    replay_start: int = 0


@dataclass
class Count:
    """Bytes that were looked at."""

    compared: int = 0
    wrong: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, other: "Count") -> None:
        self.compared += other.compared
        self.wrong += other.wrong
        self.where += other.where

    def look(self, found: Bytes, wanted: Bytes, what: str) -> None:
        self.compared += found.size
        if not np.array_equal(found, wanted):
            wrong = int((found != wanted).sum())
            self.wrong += wrong
            self.where.append(f"{what}: {wrong} of {found.size} bytes")


class Pages:
    """One worker's pages."""

    def __init__(
        self,
        config: KVCacheConfig,
        tensors: dict[str, torch.Tensor],
        rank: int,
        pools: dict[str, int],
    ) -> None:
        """`pools`: tokens that are pooled out of a ring, by the end of the layer's name."""
        self.config, self.rank = config, rank
        self.used: set[int] = {0}  # blocks that a request has had
        self.layers: list[list[tuple[str, Any, Bytes]]] = []
        self.pools = pools
        for group in config.kv_cache_groups:
            found = []
            for name in group.layer_names:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                raw = tensors[name].view(torch.uint8).numpy()
                # Blocks of kernels are parts of one of vLLM's.
                parts = raw.reshape(config.num_blocks, -1, *raw.shape[1:])
                assert np.shares_memory(parts, raw)
                found.append((name, spec, parts))
            self.layers.append(found)

    def share(self, spec: Any) -> int:
        """Which share of a layer this rank has. With latent KV all ranks have the same."""
        same = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec | CircularBufferSpec)
        return 0 if same or getattr(spec, "tp_replicated", False) else self.rank

    def wanted(self, request: Seen, name: str, spec: Any, place: object, like: Bytes) -> Bytes:
        return noise(like.size, request.prompt, name, self.share(spec), place).reshape(like.shape)

    def compute(self, request: Seen, start: int, end: int) -> None:
        """Writes what the tokens from `start` to `end` leave in the request's blocks."""
        for group, table in zip(self.layers, request.tables, strict=True):
            self.used.update(table)
            for name, spec, pages in group:
                for block, place, states in written(spec, table, start, end):
                    page = pages[block]
                    if states is None:
                        page[:] = self.wanted(request, name, spec, place, page)
                    else:
                        row = page[:, :, states]
                        row[:] = self.wanted(request, name, spec, place, row)

    def read(self, request: Seen, token: int, wait: Callable[[str], None]) -> Count:
        """Looks at all that computing `token` reads of the tokens before it, layer by layer."""
        count = Count()
        for group, table in zip(self.layers, request.tables, strict=True):
            for name, spec, pages in group:
                wait(name)
                pool = next((size for end, size in self.pools.items() if name.endswith(end)), 1)
                for block, place, states in self.read_of(request, spec, table, token, pool):
                    what = f"rank {self.rank}: {name}, {place} in block {block}, token {token}"
                    assert block != 0, f"{what}: vLLM has no block"
                    page = pages[block]
                    if isinstance(place, str):  # Of a ring: rows are named each.
                        row = page[:, :, states]
                        count.look(row, self.wanted(request, name, spec, place, row), what)
                        continue
                    wanted = self.wanted(request, name, spec, place, page)
                    if states is None:
                        count.look(page, wanted, what)
                        continue
                    per_part = page.shape[2]
                    for part in range(page.shape[0]):
                        first, last = (min(max(at - part * per_part, 0), per_part) for at in states)
                        if first < last:
                            cut = np.s_[part, :, first:last]
                            count.look(page[cut], wanted[cut], what)
        return count

    def read_of(
        self, request: Seen, spec: Any, table: Sequence[int], token: int, pool: int
    ) -> Iterator[tuple[int, object, Any]]:
        """Blocks, what they are called, and which of their states are read (None: all)."""
        if token == 0:
            return
        if isinstance(spec, MambaSpec):
            yield table[-(-token // spec.block_size) - 1], ("state", token), None
        elif isinstance(spec, CircularBufferSpec):
            rows = spec.num_states
            for at in range(token - token % pool, token):
                yield table[0], f"row {at}", [at % rows]
        else:
            for first, last in spans(spec, request, token):
                yield from blocks(spec, table, first, last)

    def untouched(self) -> Count:
        """Looks at blocks that no request has had, which are as they were."""
        count = Count()
        most = min(self.config.num_blocks, 2 * max(self.used) + 8)
        free = np.setdiff1d(np.arange(most), np.array(sorted(self.used - {0})))
        for group in self.layers:
            for name, _, pages in group:
                for block in free:
                    page = pages[block]
                    count.look(page, np.zeros_like(page), f"rank {self.rank}: {name}, free block {block}")
        return count


def spans(spec: AttentionSpec, request: Seen, token: int) -> list[tuple[int, int]]:
    """The tokens before `token` that it sees."""
    if isinstance(spec, RSWASpec):
        prompt = min(token, request.prompt_tokens)
        return [(0, prompt), (max(prompt, token - spec.rswa_window), token)]
    if isinstance(spec, ChunkedLocalAttentionSpec):
        size = spec.attention_chunk_size
        return [(token // size * size, token)]
    if isinstance(spec, SlidingWindowSpec):
        first = max(0, token + 1 - spec.sliding_window)
        if getattr(spec, "bounded_replay", False):
            # What is before the replay is not read: it makes this window anew.
            first = max(first, request.replay_start)
        return [(min(first, token), token)]
    # What a drafter keeps of a token follows from the next one too, which nobody checks.
    return [(0, max(0, token - spec.is_draft))]


def blocks(
    spec: AttentionSpec, table: Sequence[int], first: int, last: int
) -> Iterator[tuple[int, object, tuple[int, int]]]:
    """The blocks that hold these tokens, with the states of each that are whole."""
    size, per_state = spec.block_size, spec.tokens_per_state
    for number in range(first // size, -(-last // size)):
        start = max(first, number * size) - number * size
        end = min(last, (number + 1) * size) - number * size
        states = int(start // per_state), int(end // per_state)
        if states[0] < states[1]:
            yield table[number], number, states


def written(spec: Any, table: Sequence[int], start: int, end: int) -> Iterator[tuple[int, object, Any]]:
    """Blocks that a step writes, what they are called then, and which rows (None: all)."""
    if start == end:
        return
    if isinstance(spec, MambaSpec):
        yield table[-(-end // spec.block_size) - 1], ("state", end), None
    elif isinstance(spec, CircularBufferSpec):
        for at in range(max(start, end - spec.num_states), end):
            yield table[0], f"row {at}", [at % spec.num_states]
    else:
        for number in range(start // spec.block_size, -(-end // spec.block_size)):
            if number < len(table) and table[number]:
                yield table[number], number, None
