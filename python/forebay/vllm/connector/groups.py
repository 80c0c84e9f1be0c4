"""Layers that have their blocks together, and which blocks of a chunk such a group must have.

Knows what vLLM says of its groups, and how a table of blocks is read. Must never know what is asked for, or
where KV is.

With full attention a group has blocks for all tokens. With a sliding window it has them for as long as a
token that is still to come sees them: then its table says 0 there, and the blocks are others'. vLLM gives
none either for tokens that are loaded and not seen from where the load ends. Loads end at the ends of
chunks, so a chunk is whole if each group has what is seen from the chunk's last token on, and this is so in
the step that computes that token, however many tokens a step has and however small the window is. For the
blocks before that, which nobody will ask for, a chunk has the bytes of its last block.

Mamba's layers, and those of other linear attention, have no KV but a state, which says all of what came
before. There is one where a step has ended, in the block of its last token, and no chunk has it: it is
stored by itself, under a name of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import InvalidError

# What a layer may keep.
STATE = "MambaSpec"
LATENT = "MLAAttentionSpec"
# A request's blocks of such a layer: what the last step left, what this one does, and one that is a copy.
STATE_BLOCKS = 3
KINDS = ("FullAttentionSpec", "SlidingWindowSpec", LATENT, STATE)


@dataclass(frozen=True)
class Group:
    """What is the same for the layers of a group."""

    block_tokens: int
    heads: int  # KV heads that a rank has, in the first layer
    window: int | None  # tokens that a token sees, itself and those before it
    even: bool = True  # the other layers have as many heads
    state: bool = False  # of all tokens up to where a step ends, instead of KV of each
    shared: bool = False  # all tensor-parallel ranks have the same

    def ends_at(self, table: Sequence[int], token: int) -> int:
        """The block with the last one of the first `token` tokens; 0 if there is none."""
        number = -(-token // self.block_tokens) - 1
        return table[number] if number < len(table) else 0

    def unseen(self, token: int) -> int:
        """How many blocks lie before everything that `token` sees."""
        return 0 if self.window is None else max(0, token + 1 - self.window) // self.block_tokens

    def most(self, tokens: int, step_tokens: int) -> int:
        """How many blocks a request of so many tokens has at most, if steps compute no more than
        `step_tokens`.
        """
        blocks = -(-tokens // self.block_tokens)
        if self.state:
            return min(STATE_BLOCKS, blocks)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1 + step_tokens) // self.block_tokens) + 1)

    def wanted(self, table: Sequence[int], start: int, end: int, held: int) -> npt.NDArray[np.int32]:
        """The blocks of tokens from `start` to `end`; -1 where there are none and for the first `held`."""
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        blocks = np.full(last - first, -1, dtype=np.int32)
        there = np.array(table[first:last], dtype=np.int32)
        blocks[: len(there)] = np.where(there == 0, -1, there)
        blocks[: max(0, held // self.block_tokens - first)] = -1
        return blocks

    def kept(
        self, table: Sequence[int], start: int, end: int, chunk_tokens: int, computed: int
    ) -> npt.NDArray[np.int32] | None:
        """The blocks of the chunks from token `start` to `end`, nothing if one of them is not whole any more.

        What is not seen from token `computed` on may be others' by now.
        """
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        blocks = np.array(table[first:last], dtype=np.int32)
        if len(blocks) < last - first:
            return None
        numbers = np.arange(first, last)
        there = (blocks != 0) & (numbers >= self.unseen(computed))
        ends = np.minimum((numbers * self.block_tokens // chunk_tokens + 1) * chunk_tokens, end)
        if self.window is None:
            return blocks if there.all() else None
        seen = numbers >= (ends - self.window) // self.block_tokens
        if not there[seen].all():
            return None
        return np.where(there, blocks, blocks[-(-ends // self.block_tokens) - 1 - first])


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """The groups of a model, if they are of a kind that can be stored."""
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
    """Allows only states that are in a block of their own where a step ends, and stay as they are there."""
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
    """What the layers of a group keep. One says it for all, unless they differ."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def heads_of(spec: Any, name: str) -> int:
    """KV heads that a rank has in one layer of a group."""
    one = getattr(spec, "kv_cache_specs", {}).get(name) or layers_of(spec)[0]
    return int(one.num_kv_heads)


def block_tokens_of(groups: Sequence[Group]) -> int:
    """Tokens that are whole blocks in each group. vLLM's own cache holds multiples of them."""
    return math.lcm(*(group.block_tokens for group in groups))


def fail_as_one(groups: Sequence[Group]) -> bool:
    """Whether a load that fails has failed from its first token on.

    Blocks of a window are given for where a load ends. A load that ends sooner would need others.
    """
    return len(groups) > 1 or any(group.window is not None for group in groups)
