"""Groups of layers that share a block table, and which blocks of a chunk such a group must have.

With full attention a group has blocks for all tokens. With a sliding window it has them as long as
a later token sees them; after that its table says 0, and other requests may have the blocks. Nor
does vLLM give blocks for loaded tokens that are not seen from the end of the load. Loads end where
chunks end. So a chunk is whole if each group has what is seen from the chunk's last token on, which
holds in the step that computes that token. In place of earlier blocks, which nobody will ask for, a
chunk has the bytes of its last block.

Layers of Mamba and other linear attention have a state instead of KV, which stands for all tokens
before it. There is one where a step has ended, in the block of its last token. It is stored by
itself, under an id of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import InvalidError

# Names of vLLM's specs for what a layer keeps.
STATE = "MambaSpec"
LATENT = "MLAAttentionSpec"
# Blocks of a state: of the last step, of this one, and a copy.
STATE_BLOCKS = 3
KINDS = ("FullAttentionSpec", "SlidingWindowSpec", LATENT, STATE)


@dataclass(frozen=True)
class Group:
    """What is the same for the layers of a group."""

    block_tokens: int
    heads: int  # KV heads that a rank has, in the first layer
    window: int | None  # tokens that a token sees, itself and those before it
    even: bool = True  # all layers have the same number of heads
    state: bool = False  # its layers have states instead of KV
    shared: bool = False  # all tensor-parallel ranks have the same KV

    def block_ending(self, table: Sequence[int], token: int) -> int:
        """The block that ends the first `token` tokens; 0 if there is none."""
        number = -(-token // self.block_tokens) - 1
        return table[number] if number < len(table) else 0

    def blocks_unseen_from(self, token: int) -> int:
        """How many blocks lie before everything that `token` sees."""
        return 0 if self.window is None else max(0, token + 1 - self.window) // self.block_tokens

    def blocks_at_most(self, tokens: int, step_tokens: int) -> int:
        """The most blocks of a request of so many tokens, in steps of up to `step_tokens`."""
        blocks = -(-tokens // self.block_tokens)
        if self.state:
            return min(STATE_BLOCKS, blocks)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1 + step_tokens) // self.block_tokens) + 1)

    def blocks_to_load(self, table: Sequence[int], start: int, end: int, held: int) -> npt.NDArray[np.int32]:
        """The blocks for `start` to `end`; -1 where there is none and for the `held` tokens."""
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        blocks = np.full(last - first, -1, dtype=np.int32)
        there = np.array(table[first:last], dtype=np.int32)
        blocks[: len(there)] = np.where(there == 0, -1, there)
        blocks[: max(0, held // self.block_tokens - first)] = -1
        return blocks

    def blocks_to_store(
        self, table: Sequence[int], start: int, end: int, chunk_tokens: int, computed: int
    ) -> npt.NDArray[np.int32] | None:
        """The blocks for `start` to `end`; None if one of the chunks is not whole any more.

        Other requests may have the blocks that are not seen from token `computed` on.
        """
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        blocks = np.array(table[first:last], dtype=np.int32)
        if len(blocks) < last - first:
            return None
        numbers = np.arange(first, last)
        there = (blocks != 0) & (numbers >= self.blocks_unseen_from(computed))
        ends = np.minimum((numbers * self.block_tokens // chunk_tokens + 1) * chunk_tokens, end)
        if self.window is None:
            return blocks if there.all() else None
        seen = numbers >= (ends - self.window) // self.block_tokens
        if not there[seen].all():
            return None
        return np.where(there, blocks, blocks[-(-ends // self.block_tokens) - 1 - first])


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """The groups of a model. Refuses kinds that cannot be stored."""
    groups = tuple(group_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
    if groups and all(group.state for group in groups):
        raise InvalidError(f"all layers of the model keep {STATE}; allowed are models with attention too")
    return groups


def group_of(spec: Any) -> Group:
    """One group."""
    for layer in layers_of(spec):
        if type(layer).__name__ not in KINDS:
            raise InvalidError(
                f"the model keeps KV as {type(layer).__name__}; allowed are {', '.join(KINDS)}"
            )
    one = layers_of(spec)[0]
    if type(one).__name__ == STATE:
        refuse_other_states(layers_of(spec))
        return Group(one.block_size, 1, None, state=True)
    window = one.sliding_window if type(one).__name__ == "SlidingWindowSpec" else None
    even = all(layer.num_kv_heads == one.num_kv_heads for layer in layers_of(spec))
    shared = all(type(layer).__name__ == LATENT for layer in layers_of(spec))
    return Group(one.block_size, one.num_kv_heads, window, even, shared=shared)


def refuse_other_states(layers: list[Any]) -> None:
    """Allows only states that stay unchanged in a block of their own where a step ends."""
    for layer in layers:
        if layer.mamba_cache_mode != "align":
            raise InvalidError(
                f"mamba_cache_mode is {layer.mamba_cache_mode!r}; allowed is 'align': set "
                "--enable-prefix-caching --mamba-cache-mode align"
            )
        if layer.num_speculative_blocks:
            raise InvalidError(
                f"speculative decoding with {STATE} has {layer.num_speculative_blocks} blocks; allowed are 0"
            )


def layers_of(spec: Any) -> list[Any]:
    """The specs of a group's layers. There is one for all, unless they differ."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def heads_of(spec: Any, name: str) -> int:
    """KV heads that a rank has in one layer of a group."""
    one = getattr(spec, "kv_cache_specs", {}).get(name) or layers_of(spec)[0]
    return int(one.num_kv_heads)


def block_tokens_of(groups: Sequence[Group]) -> int:
    """Tokens that are whole blocks in each group. vLLM's own cache holds multiples of it."""
    return math.lcm(*(group.block_tokens for group in groups))


def fail_as_one(groups: Sequence[Group]) -> bool:
    """Whether a load that fails has failed as a whole.

    vLLM gives blocks of a window for the end of a load. A load that ends sooner would need others.
    """
    return len(groups) > 1 or any(group.window is not None for group in groups)
