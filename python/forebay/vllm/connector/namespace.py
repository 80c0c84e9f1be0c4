"""Makes namespaces from vLLM's configuration: all that the bytes of KV depend on besides tokens.

In doubt two engines have different namespaces: that costs a miss, while a false match would cost a
wrong answer. What could make KV wrong is refused.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.utils import get_pp_indices

import forebay
from forebay.errors import InvalidError
from forebay.vllm.connector import compat
from forebay.vllm.connector.config import CHUNK_TOKENS, Settings, Shape
from forebay.vllm.connector.groups import (
    Group,
    block_tokens_of,
    can_cut_heads,
    groups_of,
    is_replicated,
    layers_of,
    page_bytes_of,
)
from forebay.vllm.connector.media import processing_of
from forebay.vllm.connector.policies import Absent, Full
from forebay.vllm.connector.weights import digest_of_weights

# Fields of a model's configuration that say who wrote it, not what it computes.
VOLATILE = ("_name_or_path", "transformers_version")
# Fields of a specification that other facts say, or that say where its bytes lie and not what they
# are. KV heads are cut over ranks, so those of one rank say nothing.
SAID_ELSEWHERE = {
    *("block_size", "num_kv_heads", "num_head_slots", "dcp_sharded", "max_tp_shards", "is_draft"),
    *("page_size_padded", "alignment", "block_stride_alignment", "indexes_kv_by_block_stride"),
    *("num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
}
# What `forebay.namespace_key` takes for the format of elements.
FORMATS = {
    *("float32", "float", "float16", "half", "bfloat16"),
    *("fp8", "fp8_e4m3", "float8_e4m3fn", "fp8_e5m2", "float8_e5m2"),
}
# At most so many ranks per KV head: the chunks of each rank have to be named.
RANKS_AT_MOST = 4
# Namespaces of requests' salts and adapters: so many are kept.
SALTS_KEPT = 256


@dataclass(frozen=True)
class ContextParallel:
    """How ranks share the tokens of a block: each has every so many of them in turn."""

    decode: int = 1
    prefill: int = 1
    interleave: int = 1  # tokens in a row that one rank has

    @property
    def shards(self) -> bool:
        """Whether ranks have different tokens."""
        return self.decode > 1

    def facts(self) -> dict[str, str]:
        """What it adds to a namespace."""
        return {"context": f"{self.decode} ranks, {self.interleave} tokens each"} if self.shards else {}


@dataclass
class Facts:
    """What is the same for all KV of an engine. A reset changes the salt."""

    weights: bytes
    dtype: str
    attention: dict[str, str]
    salt: bytes
    heads: int  # KV heads of the whole model
    shape: Shape
    ranks: int  # of a pipeline stage, all of its tensor-parallel ranks one after another
    pp: int
    layers: int
    chunk_tokens: int
    chunk_bytes: int  # of one rank
    state_bytes: int  # of one rank, 0 if no layer has states
    on_cpu: bool
    groups: tuple[Group, ...]
    media: bytes | None  # how images and the like become KV; None: such prompts are left alone
    tenant: int = 0  # of requests that name none
    # By salt, shape, adapter and tenant.
    keys: dict[tuple[str | None, Shape, bytes | None, int], list[bytes]] = field(
        default_factory=dict, compare=False
    )
    layout: str = "HND"
    context: ContextParallel = ContextParallel()
    resets: int = 0
    labels: dict[str, str] = field(default_factory=dict, compare=False)  # what people call the model
    # Is told of each new namespace: its fields, what people call them, and whose it is.
    describe: Callable[[dict[str, Any], dict[str, str], int], None] | None = field(
        default=None, compare=False
    )

    @property
    def has_windows(self) -> bool:
        """Whether blocks leave a request before it ends."""
        return any(group.leaves for group in self.groups)

    @property
    def prompt_only(self) -> bool:
        """Whether only KV of the prompt is what a later prompt would have in its place."""
        return any(group.policy == Full(prompt_only=True) for group in self.groups)

    @property
    def has_rings(self) -> bool:
        """Whether vLLM makes something anew behind a hit, which it can where a block ends only."""
        return any(isinstance(group.policy, Absent) for group in self.groups)

    @property
    def parts(self) -> int:
        """Into how many parts the ranks of a stage cut KV. Ranks behind these have it all again."""
        return self.ranks if self.context.shards else self.ranks // self.context.prefill

    @property
    def chunks_of_rank(self) -> int:
        """How many chunks a rank stores of the same tokens: one, or one for each of its heads."""
        return max(1, self.shape.tp // self.parts)

    @property
    def has_states(self) -> bool:
        return any(group.state for group in self.groups)

    @property
    def ends_at_chunks(self) -> bool:
        """Whether a request can go on only behind whole chunks, or where a state was stored."""
        return self.has_states or self.has_rings

    def cut(self, shape: Shape) -> Shape:
        """How engines of that shape cut KV. With MLA all ranks have the same, so it is not cut."""
        stored = [group for group in self.groups if not isinstance(group.policy, Absent)]
        return replace(shape, tp=1) if all(group.shared for group in stored) else shape

    def namespaces(
        self,
        request_salt: str | None,
        shape: Shape,
        adapter: bytes | None = None,
        tenant: int | None = None,
    ) -> list[bytes]:
        """The keys of each rank. `tenant`: None is the engine's own."""
        owner = self.tenant if tenant is None else tenant
        found = self.keys.get((request_salt, shape, adapter, owner))
        if found is None:
            if len(self.keys) >= SALTS_KEPT:
                self.keys.pop(next(iter(self.keys)))
            found = [
                self.key(request_salt, shape, tp, pp, adapter, owner)
                for pp in range(self.pp)
                for tp in range(shape.tp)
            ]
            self.keys[request_salt, shape, adapter, owner] = found
        return found

    def forget(self) -> None:
        """Gives KV new names, so that what was stored until now is not found any more."""
        # The salt must not grow: in training, an engine has a reset every few seconds.
        self.salt = hashlib.sha256(self.salt + os.urandom(32)).digest()
        self.keys.clear()
        self.resets += 1

    def key(
        self, request_salt: str | None, shape: Shape, tp: int, pp: int, adapter: bytes | None, tenant: int
    ) -> bytes:
        salt = self.salt + of_tenant(tenant)
        if request_salt is not None:
            salt += hashlib.sha256(b"request " + request_salt.encode()).digest()
        fields = {
            "weights": self.weights,
            "dtype": self.dtype,
            "order": compat.LAYOUT_NAMES[self.layout],
            "block_tokens": shape.block_tokens,
            "tp": (tp, shape.tp),
            "pp": (pp, self.pp),
            "attention": self.attention | self.context.facts(),
            "lora": adapter,
            "salt": salt,
        }
        if self.describe is not None:
            salted = "" if request_salt is None else hashlib.sha256(request_salt.encode()).hexdigest()[:16]
            labels = {"resets": str(self.resets), "cache_salt": salted or "none"}
            self.describe(fields, self.labels | labels, tenant)
        return forebay.namespace_key(fields)

    def identity(self) -> str:
        """Equal for engines that can read each other's chunks, given each other's shape."""
        return hashlib.sha256(
            replace(self, describe=None).key(None, Shape(1, 1), 0, 0, None, self.tenant)
        ).hexdigest()[:32]


def facts_of(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Facts:
    """Reads the facts, and refuses what could make KV wrong."""
    refuse_what_is_not_supported(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    context = context_of(parallel)
    compat.refuse_foreign_managers(kv_cache_config)
    groups = groups_of(kv_cache_config, context.decode)
    if any(group.state for group in groups):
        refuse_finer_hits(vllm_config.cache_config)
    named = list(zip(groups, kv_cache_config.kv_cache_groups, strict=True))
    first = next(next(iter(layers_of(group).values())) for one, group in named if one.paged)
    config = model_text(model)
    chunk_tokens = chunk_tokens_of(settings, groups)
    facts = Facts(
        weights=settings.weights_digest
        or digest_of_weights(
            str(model.model),
            model.revision,
            str(vllm_config.load_config.load_format),
            config,
            int(model.seed or 0),
        ),
        dtype=dtype_of(vllm_config.cache_config.cache_dtype, first.dtype, model.dtype),
        attention={
            "config": hashlib.sha256(config.encode()).hexdigest(),
            "computed in": str(model.dtype),
            "quantization": str(model.quantization),
            "kv heads": str(model.get_total_num_kv_heads()),
            # Those of a drafter are in the same chunks.
            "layers": str([len(group.layer_names) for group in kv_cache_config.kv_cache_groups]),
            "longest": longest_of(model),
            **attention_of(vllm_config, kv_cache_config),
            **packed_of(vllm_config.cache_config.cache_dtype),
            **unquantized_of(vllm_config.cache_config),
            **drafter_of(vllm_config),
            **stages_of(model, parallel.pipeline_parallel_size),
        },
        salt=settings.salt,
        tenant=settings.tenant,
        heads=heads_to_cut(
            heads_of_model(model, first),
            parallel.tensor_parallel_size,
            settings.layout == "HND" and can_cut_heads(groups),
        ),
        layout=settings.layout,
        context=context,
        shape=Shape(parallel.tensor_parallel_size, block_tokens_of(groups)),
        ranks=parallel.tensor_parallel_size * context.prefill,
        pp=parallel.pipeline_parallel_size,
        layers=sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups),
        chunk_tokens=chunk_tokens,
        chunk_bytes=sum(
            bytes_of_block(group) * one.kept_pages(chunk_tokens) for one, group in named if one.paged
        ),
        state_bytes=sum(bytes_of_block(group) for one, group in named if one.state),
        on_cpu=compat.cpu_kernel(vllm_config, first.block_size, first.head_size) is not None,
        groups=groups,
        media=processing_of(model),
        labels={"model": str(model.model), "revision": str(model.revision)},
    )
    if context.shards:  # Each rank has heads and tokens of its own, so each is a part by itself.
        facts.heads, facts.shape = facts.ranks, replace(facts.shape, tp=facts.ranks)
    facts.shape = facts.cut(facts.shape)
    if settings.one_copy:
        refuse_one_copy(facts)
        facts.shape = facts.cut(replace(facts.shape, tp=facts.heads))
    for shape in settings.also_read:
        refuse_shape("kv_connector_extra_config: also_read", facts.cut(shape), facts)
    return facts


def context_of(parallel: Any) -> ContextParallel:
    """How the engine's ranks share the tokens of a block."""
    return ContextParallel(
        int(parallel.decode_context_parallel_size),
        int(parallel.prefill_context_parallel_size),
        int(parallel.cp_kv_cache_interleave_size),
    )


def heads_to_cut(heads: int, ranks: int, can_cut: bool) -> int:
    """Into how many parts heads can be cut. If they cannot be, a rank's heads are one part."""
    return heads if can_cut else min(heads, ranks)


def longest_of(model: Any) -> str:
    """The longest prompt. With LongRoPE, and maybe others, all positions depend on it.

    If vLLM fits the length to the memory, the model was made before that, for its own length.
    """
    fitted = getattr(model, "original_max_model_len", None) == -1
    return "fitted" if fitted else str(model.max_model_len)


def of_tenant(tenant: int) -> bytes:
    """What a tenant adds to the salt, so that it does not look up the KV of others."""
    return hashlib.sha256(b"tenant %d" % tenant).digest() if tenant else b""


def heads_of_model(model: Any, spec: Any) -> int:
    """KV heads of a layer over all ranks. MLA keeps one."""
    return 1 if is_replicated(spec) else int(model.get_total_num_kv_heads())


def attention_of(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """What the bytes of layers depend on. Block sizes are part of it where they differ."""
    groups = [kinds_of(vllm_config, group) for group in kv_cache_config.kv_cache_groups]
    if len(groups) == 1 and len(groups[0]) == 1:
        return groups[0][0]
    blocks = [{"block": str(group.kv_cache_spec.block_size)} for group in kv_cache_config.kv_cache_groups]
    named = [[kind | block for kind in kinds] for kinds, block in zip(groups, blocks, strict=True)]
    return {"groups": json.dumps(named)}


def kinds_of(vllm_config: Any, group: Any) -> list[dict[str, str]]:
    """What the bytes of a group's layers depend on, once for neighbours that are alike."""
    kinds: list[dict[str, str]] = []
    for spec in layers_of(group).values():
        kind = layer_of(vllm_config, spec)
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return kinds


def layer_of(vllm_config: Any, spec: Any) -> dict[str, str]:
    """What the bytes of one layer depend on: every field that is not what it is for most layers."""
    kind = {"kind": type(spec).__name__} | {
        field.name: str(getattr(spec, field.name))
        for field in fields(spec)
        if field.name not in SAID_ELSEWHERE and getattr(spec, field.name) != field.default
    }
    if not hasattr(spec, "head_size"):
        return kind | {"order": compat.state_order()}
    return kind | {"kernel": str(compat.cpu_kernel(vllm_config, spec.block_size, spec.head_size))}


def drafter_of(vllm_config: Any) -> dict[str, str]:
    """A drafter with weights of its own, if there is one: what its layers keep is in the same chunks."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    drafter = None if speculative is None else speculative.draft_model_config
    if drafter is None or (drafter.model, drafter.revision) == (model.model, model.revision):
        return {}
    config = model_text(drafter)
    load_format = str(vllm_config.load_config.load_format)
    weights = digest_of_weights(
        str(drafter.model), drafter.revision, load_format, config, int(model.seed or 0)
    )
    return {"drafter": f"{weights.hex()} {hashlib.sha256(config.encode()).hexdigest()}"}


def unquantized_of(cache_config: Any) -> dict[str, str]:
    """The layers that keep the model's own format beside FP8 ones, if any."""
    layers = sorted(getattr(cache_config, "kv_cache_dtype_skip_layers", ()))
    return {"unquantized": str(layers)} if layers else {}


def stages_of(model: Any, stages: int) -> dict[str, str]:
    """Which layers each pipeline stage has. `VLLM_PP_LAYER_PARTITION` may change that."""
    if stages == 1:
        return {}
    layers = model.get_total_num_hidden_layers()
    return {"stages": str([get_pp_indices(layers, stage, stages) for stage in range(stages)])}


def bytes_of_block(group: Any) -> int:
    """Bytes of a block of all layers of a group, without room behind them."""
    return sum(page_bytes_of(spec) for spec in layers_of(group).values())


def refuse_one_copy(facts: Facts) -> None:
    """Refuses one copy for all TP sizes where KV cannot be cut into heads."""
    if all(group.shared for group in facts.groups if group.paged) and not facts.has_states:
        return  # It is one copy anyway.
    why = None
    if facts.has_states:
        why = "for a model with states: they have no KV heads, and each TP size cuts them otherwise"
    elif facts.context.decode > 1 or facts.context.prefill > 1:
        why = "with context parallelism: a rank has some of the tokens of a block, or the same as others"
    elif facts.layout == "NHD":
        why = "with the layout NHD: the bytes of a head are not in one piece there"
    elif not can_cut_heads(facts.groups):
        why = "for a model whose layers have different numbers of KV heads"
    if why is not None:
        raise InvalidError(f"kv_connector_extra_config: one_copy is True; allowed is False {why}")


def refuse_shape(what: str, theirs: Shape, facts: Facts) -> None:
    """Refuses chunks of a shape that cannot be cut as this engine needs them.

    On GPUs a page has each token of a head in one piece. On CPUs not, so block sizes must match.
    """
    mine = facts.shape
    if facts.has_states and theirs != mine:
        raise InvalidError(f"{what}: {theirs}; allowed is {mine}, since some layers have states")
    if theirs.block_tokens != mine.block_tokens and (facts.on_cpu or len(facts.groups) > 1):
        where = "on CPUs" if facts.on_cpu else "with several groups of layers"
        raise InvalidError(
            f"{what}: block_tokens is {theirs.block_tokens}; allowed {where} is {mine.block_tokens}"
        )
    if facts.context.shards and theirs != mine:
        raise InvalidError(f"{what}: {theirs}; allowed is {mine}, since ranks share the tokens of a block")
    uneven = not can_cut_heads(facts.groups)
    for name, there, here in (
        ("tp", theirs.tp, mine.tp),
        ("block_tokens", theirs.block_tokens, mine.block_tokens),
    ):
        if there != here and uneven:
            raise InvalidError(
                f"{what}: {name} is {there}; allowed is {here}, since layers have different numbers of heads"
            )
    if theirs.tp == mine.tp:
        return
    if facts.layout == "NHD":
        raise InvalidError(f"{what}: tp is {theirs.tp}; allowed with the layout NHD is {mine.tp}")
    try:
        forebay.head_reads(facts.heads, facts.parts, 0, theirs.tp)
        fits = theirs.tp <= RANKS_AT_MOST * max(facts.parts, facts.heads)
    except InvalidError:
        fits = False
    if not fits:
        raise InvalidError(
            f"{what}: tp is {theirs.tp}; allowed are divisors of the model's {facts.heads} KV heads, and "
            f"multiples of them up to {RANKS_AT_MOST * max(facts.parts, facts.heads)}"
        )


def model_text(model: Any) -> str:
    """The model's configuration as the engine runs it."""
    facts = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in VOLATILE}
    return json.dumps(facts, sort_keys=True, default=str)


def dtype_of(cache_dtype: str, dtype: Any, computed_in: Any) -> str:
    """The format of the elements. vLLM's `auto` is that of the first layer with KV.

    Bytes that are packed in a way of vLLM's own have no format (`packed_of`, and the fields of each
    layer). For these it is the one that the model computes in.
    """
    name = (str(dtype) if cache_dtype == "auto" else cache_dtype).removeprefix("torch.")
    return name if name in FORMATS else str(computed_in).removeprefix("torch.")


def packed_of(cache_dtype: str) -> dict[str, str]:
    """How vLLM packs KV, where that is no format of elements."""
    return {} if cache_dtype == "auto" or cache_dtype in FORMATS else {"packed": cache_dtype}


def chunk_tokens_of(settings: Settings, groups: Sequence[Group]) -> int:
    """Tokens of a chunk: whole blocks."""
    block_tokens = block_tokens_of(groups)
    tokens = settings.chunk_tokens or -(-CHUNK_TOKENS // block_tokens) * block_tokens
    if tokens % block_tokens == 0:
        return tokens
    raise InvalidError(
        f"kv_connector_extra_config: chunk_tokens is {tokens}; allowed are multiples of the engine's "
        f"block size, which is {block_tokens}"
    )


def refuse_what_is_not_supported(vllm_config: Any) -> None:
    """Refuses settings that would make KV wrong."""
    if getattr(vllm_config.model_config, "is_diffusion", False):
        raise InvalidError(
            "the model is a diffusion model, which writes KV again that is stored already; allowed are others"
        )


def refuse_finer_hits(cache_config: Any) -> None:
    """Refuses hits within a block: states are where blocks end."""
    unit = getattr(cache_config, "prefix_match_unit", None)
    if unit not in (None, cache_config.block_size):
        raise InvalidError(
            f"prefix_match_unit is {unit}; allowed is none for a model with states, or the block size, "
            f"{cache_config.block_size}"
        )


def whole_of(vllm_config: Any) -> Any:
    """The engine's configuration. Under a MultiConnector, `vllm_config` is another."""
    return get_current_vllm_config_or_none() or vllm_config


def is_alone(vllm_config: Any) -> bool:
    """Whether ours is the engine's only connector."""
    whole = whole_of(vllm_config)
    return bool(whole.kv_transfer_config.kv_connector == vllm_config.kv_transfer_config.kv_connector)


def refuse_another_policy(vllm_config: Any) -> None:
    """Refuses another failure policy than that of a MultiConnector, which the engine goes by."""
    whole = whole_of(vllm_config)
    mine = vllm_config.kv_transfer_config.kv_load_failure_policy
    engines = whole.kv_transfer_config.kv_load_failure_policy
    if mine != engines:
        raise InvalidError(
            f"kv_load_failure_policy of ForebayConnector is {mine!r}; allowed is what "
            f"{whole.kv_transfer_config.kv_connector} has, {engines!r}"
        )
