"""What a chunk keeps of a layer's KV: a policy, derived from the layer's specification in vLLM.

It knows the fields of specifications and what they say of the lifetime of blocks. It goes by fields
and methods, not by names of classes, so a class that nobody has seen is taken if all of its fields
are known. One with a field that is not known here is refused: the field could change what a block
holds.

| policy | blocks of a request | what a chunk keeps |
|---|---|---|
| `Full` | all, to its end | all |
| `Window`, `Local` | those that later tokens see | those that are seen from the chunk's end |
| `State` | the state behind the last step | nothing; states are stored by themselves |
| `Absent` | a ring or a replica | nothing; vLLM makes it anew behind a hit |
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from forebay.errors import InvalidError

# Fields that say which blocks there are.
LIFETIME = {
    "sliding_window",
    "extra_retained_tokens",
    "attention_chunk_size",
    "rswa_window",
    "bounded_replay",
}
# Fields of KV that say what the bytes of a block are, or nothing of interest here.
CONTENTS = {
    *("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "non_causal"),
    *("num_head_slots", "state_content_bytes", "tokens_per_state", "compress_ratio", "tq_slot_size"),
    *("cache_dtype_str", "model_version", "cache_role", "topk_buffer_width", "sink_len"),
    *("is_index_group_leader", "non_causal_multi_token_decode"),
    *("page_size_padded", "alignment", "block_stride_alignment", "indexes_kv_by_block_stride"),
    *("is_draft", "dcp_sharded", "max_tp_shards"),
}
# Fields of states.
OF_STATES = {
    *("shapes", "dtypes", "mamba_type", "mamba_cache_mode", "num_speculative_blocks", "num_heads"),
    *("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment", "tp_replicated"),
}
# Fields of what vLLM itself makes from other KV.
OF_REPLICAS = {"page_size", "blocks_per_request"}
KNOWN = LIFETIME | CONTENTS | OF_STATES | OF_REPLICAS
NEEDED = ("block_size", "num_kv_heads", "head_size", "dtype")
NEEDED_OF_STATES = ("block_size", "shapes", "dtypes", "mamba_cache_mode", "num_speculative_blocks")
# Their fields are those of full attention, and their blocks hold no KV of the prompt's tokens.
NOT_OF_TOKENS = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec")


@dataclass(frozen=True)
class Full:
    """Blocks of all tokens, to the end of a request."""

    # Tokens that are generated do not see all of those before them. Chunks hold the prompt alone.
    prompt_only: bool = False

    def first_seen(self, token: Any) -> Any:
        """The first token that a token sees. Also of an array of tokens."""
        return token * 0


@dataclass(frozen=True)
class Window:
    """Blocks of so many tokens: of one and those before it."""

    tokens: int

    def first_seen(self, token: Any) -> Any:
        return np.maximum(0, token + 1 - self.tokens)


@dataclass(frozen=True)
class Local:
    """Blocks from the last multiple of so many tokens on."""

    tokens: int

    def first_seen(self, token: Any) -> Any:
        return token // self.tokens * self.tokens


@dataclass(frozen=True)
class State:
    """One block that stands for all tokens, and some that vLLM computes drafts and copies in."""

    drafts: int = 0


@dataclass(frozen=True)
class Absent:
    """Blocks that a hit needs nothing in. `why` is their name in logs."""

    why: str


Policy: TypeAlias = Full | Window | Local | State | Absent
FULL = Full()


def policy_of(name: str, spec: Any) -> Policy:
    """The policy of one layer. Refuses what it cannot derive."""
    fields = fields_of(name, spec)
    kind = type(spec).__name__
    if fields & OF_STATES:
        return state_of(name, spec, fields)
    if not getattr(spec, "prefix_cacheable", True):
        return Absent(why_absent(name, spec))
    refuse_without(name, kind, fields, NEEDED)
    if getattr(spec, "non_causal", False):
        raise InvalidError(
            f"layer {name}: {kind} has non_causal True, so KV depends on later tokens; allowed is False"
        )
    if getattr(spec, "rswa_window", None) is not None:
        return Full(prompt_only=True)
    if not hasattr(spec, "max_admission_blocks_per_request"):
        return FULL  # Also of a layer that sees a window and whose blocks stay.
    window, local = (getattr(spec, field, None) for field in ("sliding_window", "attention_chunk_size"))
    if window is not None:
        return Window(window + getattr(spec, "extra_retained_tokens", 0))
    if local is not None:
        return Local(local)
    raise InvalidError(
        f"layer {name}: {kind} gives blocks back before a request ends, and no field says which; allowed "
        "are sliding_window and attention_chunk_size"
    )


def fields_of(name: str, spec: Any) -> set[str]:
    """The fields of a specification, all of which are known."""
    kind = type(spec).__name__
    for base in type(spec).__mro__:
        if base.__name__ in NOT_OF_TOKENS:
            raise InvalidError(f"layer {name}: {kind} holds no KV of the prompt's tokens; allowed are others")
    if not dataclasses.is_dataclass(spec):
        raise InvalidError(f"layer {name}: {kind} is no dataclass; allowed are specifications with fields")
    fields = {field.name for field in dataclasses.fields(spec)}
    unknown = sorted(fields - KNOWN)
    if unknown:
        raise InvalidError(
            f"layer {name}: {kind} has a field {unknown[0]} that this version of forebay does not know; "
            f"allowed are {', '.join(sorted(KNOWN))}"
        )
    return fields


def refuse_without(name: str, kind: str, fields: set[str], needed: tuple[str, ...]) -> None:
    """Refuses a specification that lacks a field."""
    missing = [field for field in needed if field not in fields]
    if missing:
        raise InvalidError(
            f"layer {name}: {kind} has no field {missing[0]}; allowed are specifications with "
            f"{', '.join(needed)}"
        )


def state_of(name: str, spec: Any, fields: set[str]) -> State:
    """Of a layer with states. Allows only states that stay unchanged where a block ends."""
    refuse_without(name, type(spec).__name__, fields, NEEDED_OF_STATES)
    if spec.mamba_cache_mode != "align":
        raise InvalidError(
            f"layer {name}: mamba_cache_mode is {spec.mamba_cache_mode!r}; allowed is 'align': set "
            "--enable-prefix-caching --mamba-cache-mode align"
        )
    return State(spec.num_speculative_blocks + getattr(spec, "num_prefill_checkpoint_blocks", 0))


def why_absent(name: str, spec: Any) -> str:
    """What it is that vLLM's own cache never holds, so that a hit needs nothing of it."""
    if getattr(spec, "bounded_replay", False):
        return "replayed window"
    if not getattr(spec, "has_layer_views", True):
        return "replica"
    if not getattr(spec, "uses_slot_mapping", True):
        return "ring"
    raise InvalidError(
        f"layer {name}: {type(spec).__name__} is not cached by vLLM, and no field says why; allowed are "
        "rings, replicas and windows with bounded_replay"
    )
