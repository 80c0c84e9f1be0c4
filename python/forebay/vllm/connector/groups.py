"""Groups of layers that share a block table, and which blocks of a chunk such a group must have.

Loads end where chunks end. So a chunk is whole if each group has what is seen from the chunk's last
token on, which holds in the step that computes that token. A group whose blocks leave a request
keeps no more than that of a chunk: its pages at the chunk's end. Which blocks leave, `policies.py`
says. In place of blocks that have left already and that nobody will ask for, a chunk has the bytes
of its last block.

A state stands for all tokens before it. There is one where a step has ended, in the block of its
last token. It is stored by itself, under an id of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import InvalidError
from forebay.vllm.connector.policies import FULL, Absent, Full, Local, Policy, State, Window, policy_of

# Blocks of a state: of the last step, of this one, and a copy.
STATE_BLOCKS = 3
# MLA's layers, whose KV all tensor-parallel ranks have. Newer specifications say so in a field.
LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")


@dataclass(frozen=True)
class Group:
    """What is the same for the layers of a group."""

    block_tokens: int
    heads: int  # KV heads that a rank has, in the first layer
    policy: Policy = FULL
    even: bool = True  # all layers have the same number of heads, and pages can be cut by them
    shared: bool = False  # all tensor-parallel ranks have the same KV

    @property
    def state(self) -> bool:
        return isinstance(self.policy, State)

    @property
    def paged(self) -> bool:
        """Whether chunks have pages of it."""
        return not isinstance(self.policy, State | Absent)

    @property
    def leaves(self) -> bool:
        """Whether blocks leave a request before it ends, and chunks have pages of them."""
        return isinstance(self.policy, Window | Local)

    def block_ending(self, table: Sequence[int], token: int) -> int:
        """The block that ends the first `token` tokens; 0 if there is none."""
        number = -(-token // self.block_tokens) - 1
        return table[number] if number < len(table) else 0

    def first_seen(self, token: Any) -> Any:
        """The first token whose KV a token sees. Also of an array of tokens."""
        assert not isinstance(self.policy, State | Absent)
        return self.policy.first_seen(token)

    def kept_pages(self, chunk_tokens: int) -> int:
        """How many pages of a whole chunk are kept: those at its end that are seen from there.

        A chunk that ends within a block keeps one more: what is seen begins within one too.
        """
        pages = chunk_tokens // self.block_tokens
        match self.policy:
            case Window(tokens=seen):
                return min(pages, -(-seen // self.block_tokens))
            case Local(tokens=seen):
                return min(pages, -(-seen // self.block_tokens) + (seen % self.block_tokens > 0))
            case _:
                return pages

    def blocks_at_most(self, tokens: int, step_tokens: int) -> int:
        """The most blocks of a request of so many tokens, in steps of up to `step_tokens`."""
        blocks = -(-tokens // self.block_tokens)
        match self.policy:
            case State(drafts=drafts):
                return min(STATE_BLOCKS + drafts, blocks + drafts)
            case Absent():
                return 1
            case Window(tokens=seen) | Local(tokens=seen):
                return min(blocks, -(-(seen - 1 + step_tokens) // self.block_tokens) + 1)
            case _:
                return blocks

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
        there = (blocks != 0) & (numbers >= self.first_seen(computed) // self.block_tokens)
        if not self.leaves:
            return blocks if there.all() else None
        ends = np.minimum((numbers * self.block_tokens // chunk_tokens + 1) * chunk_tokens, end)
        seen = numbers >= self.first_seen(ends - 1) // self.block_tokens
        if not there[seen].all():
            return None
        return np.where(there, blocks, blocks[-(-ends // self.block_tokens) - 1 - first])


def groups_of(kv_cache_config: Any, context_ranks: int = 1) -> tuple[Group, ...]:
    """The groups of a model. Refuses kinds that cannot be stored.

    `context_ranks`: so many ranks hold the tokens of a block in turn (decode context parallelism).
    """
    groups = tuple(group_of(group, context_ranks) for group in kv_cache_config.kv_cache_groups)
    if groups and not any(group.paged for group in groups):
        raise InvalidError("no layer of the model keeps KV of tokens; allowed are models with attention too")
    return groups


def group_of(group: Any, context_ranks: int = 1) -> Group:
    """One group of layers, which have one policy."""
    layers = layers_of(group)
    if getattr(group, "host_resident", False):
        raise InvalidError(
            f"layer {next(iter(layers))} keeps its KV in host memory (HiSparse); allowed is KV on the device"
        )
    if not getattr(group, "enable_kv_transfer", True):
        return Group(group.kv_cache_spec.block_size, 1, Absent("replica"))
    policies = {name: policy_of(name, spec) for name, spec in layers.items()}
    (first, policy), spec = next(iter(policies.items())), next(iter(layers.values()))
    for name, other in policies.items():
        if other != policy:
            raise InvalidError(
                f"layers {first} and {name} share blocks, and are {policy} and {other}; allowed is one policy"
            )
    if not isinstance(policy, Full | Window | Local):
        return Group(spec.block_size, 1, policy)
    of_ranks = context_ranks if getattr(spec, "dcp_sharded", True) else 1
    return Group(
        spec.block_size * of_ranks,
        spec.num_kv_heads,
        policy,
        even=all(is_cut_by_heads(one) and one.num_kv_heads == spec.num_kv_heads for one in layers.values()),
        shared=of_ranks == 1 and all(is_replicated(one) for one in layers.values()),
    )


def is_cut_by_heads(spec: Any) -> bool:
    """Whether a page has one part for each KV head."""
    return getattr(spec, "num_head_slots", None) in (None, spec.num_kv_heads)


def is_replicated(spec: Any) -> bool:
    """Whether all tensor-parallel ranks have the same KV."""
    parts = getattr(spec, "max_tp_shards", None)
    return parts == 1 or (parts is None and any(base.__name__ in LATENT for base in type(spec).__mro__))


def layers_of(group: Any) -> Mapping[str, Any]:
    """The specifications of a group's layers, by name. vLLM has one for all unless they differ."""
    spec = group.kv_cache_spec
    each: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return each if each else dict.fromkeys(group.layer_names, spec)


def cells_of(spec: Any) -> int:
    """How many cells a head has in a block: one for a token, or for several where KV is compressed."""
    compressed = getattr(spec, "storage_block_size", spec.block_size)  # of 0.26
    return int(getattr(spec, "num_states", compressed))


def page_bytes_of(spec: Any) -> int:
    """Bytes of a layer's block, without room behind it."""
    if hasattr(spec, "real_page_size_bytes"):
        return int(spec.real_page_size_bytes)
    # A state in 0.26 has no name for that.
    return sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )


def block_tokens_of(groups: Sequence[Group]) -> int:
    """Tokens that are whole blocks in each group. vLLM's own cache holds multiples of it."""
    return math.lcm(*(group.block_tokens for group in groups if not isinstance(group.policy, Absent)))


def can_cut_heads(groups: Sequence[Group]) -> bool:
    """Whether KV of another number of tensor-parallel ranks is a range of heads of each page."""
    stored = [group for group in groups if group.paged]
    return all(group.even and group.heads == stored[0].heads for group in stored)


def fail_as_one(groups: Sequence[Group]) -> bool:
    """Whether a load that fails has failed as a whole.

    vLLM gives blocks of a window for the end of a load. A load that ends sooner would need others.
    """
    return len(groups) > 1 or any(group.leaves for group in groups)
