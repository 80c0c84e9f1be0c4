"""Makes namespaces from vLLM's configuration: all that the bytes of KV depend on besides tokens.

In doubt two engines have different namespaces: that costs a miss, while a false match would cost a
wrong answer. What could make KV wrong is refused.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.utils import get_pp_indices

import forebay
from forebay.errors import InvalidError
from forebay.vllm.connector import compat
from forebay.vllm.connector.config import CHUNK_TOKENS, Settings, Shape
from forebay.vllm.connector.groups import LATENT, STATE, Group, block_tokens_of, groups_of, layers_of
from forebay.vllm.connector.media import processing_of
from forebay.vllm.connector.weights import digest_of_weights

# Fields of a model's configuration that say who wrote it, not what it computes.
VOLATILE = ("_name_or_path", "transformers_version")
# At most so many ranks per KV head: the chunks of each rank have to be named.
RANKS_AT_MOST = 4
# Namespaces of requests' salts and adapters: so many are kept.
SALTS_KEPT = 256


@dataclass
class Facts:
    """What is the same for all KV of an engine. A reset changes the salt."""

    weights: bytes
    dtype: str
    attention: dict[str, str]
    salt: bytes
    heads: int  # KV heads of the whole model
    shape: Shape
    ranks: int  # tensor-parallel
    pp: int
    layers: int
    chunk_tokens: int
    chunk_bytes: int  # of one rank
    state_bytes: int  # of one rank, 0 if no layer has states
    on_cpu: bool
    groups: tuple[Group, ...]
    media: bytes | None  # how images and the like become KV; None: such prompts are left alone
    keys: dict[tuple[str | None, Shape, bytes | None], list[bytes]] = field(
        default_factory=dict, compare=False
    )
    layout: str = "HND"
    resets: int = 0

    @property
    def has_windows(self) -> bool:
        """Whether blocks leave a request before it ends."""
        return any(group.window is not None for group in self.groups)

    @property
    def has_states(self) -> bool:
        return any(group.state for group in self.groups)

    def cut(self, shape: Shape) -> Shape:
        """How engines of that shape cut KV. With MLA all ranks have the same, so it is not cut."""
        return replace(shape, tp=1) if all(group.shared for group in self.groups) else shape

    def namespaces(self, request_salt: str | None, shape: Shape, adapter: bytes | None = None) -> list[bytes]:
        found = self.keys.get((request_salt, shape, adapter))
        if found is None:
            if len(self.keys) >= SALTS_KEPT:
                self.keys.pop(next(iter(self.keys)))
            found = [
                self.key(request_salt, shape, tp, pp, adapter)
                for pp in range(self.pp)
                for tp in range(shape.tp)
            ]
            self.keys[request_salt, shape, adapter] = found
        return found

    def forget(self) -> None:
        """Gives KV new names, so that what was stored until now is not found any more."""
        # The salt must not grow: in training, an engine has a reset every few seconds.
        self.salt = hashlib.sha256(self.salt + os.urandom(32)).digest()
        self.keys.clear()
        self.resets += 1

    def key(
        self, request_salt: str | None, shape: Shape, tp: int, pp: int, adapter: bytes | None = None
    ) -> bytes:
        salt = self.salt
        if request_salt is not None:
            salt += hashlib.sha256(b"request " + request_salt.encode()).digest()
        return forebay.namespace_key(
            {
                "weights": self.weights,
                "dtype": self.dtype,
                "order": compat.LAYOUT_NAMES[self.layout],
                "block_tokens": shape.block_tokens,
                "tp": (tp, shape.tp),
                "pp": (pp, self.pp),
                "attention": self.attention,
                "lora": adapter,
                "salt": salt,
            }
        )

    def identity(self) -> str:
        """Equal for engines that can read each other's chunks, given each other's shape."""
        return hashlib.sha256(self.key(None, Shape(1, 1), 0, 0)).hexdigest()[:32]


def facts_of(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Facts:
    """Reads the facts, and refuses what could make KV wrong."""
    refuse_what_is_not_supported(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = groups_of(kv_cache_config)
    if any(group.state for group in groups):
        refuse_finer_hits(vllm_config.cache_config)
    named = list(zip(groups, kv_cache_config.kv_cache_groups, strict=True))
    first = next(layers_of(group.kv_cache_spec)[0] for one, group in named if not one.state)
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
        dtype=dtype_of(vllm_config.cache_config.cache_dtype, first.dtype),
        attention={
            "config": hashlib.sha256(config.encode()).hexdigest(),
            "computed in": str(model.dtype),
            "quantization": str(model.quantization),
            "kv heads": str(model.get_total_num_kv_heads()),
            # Those of a drafter are in the same chunks.
            "layers": str([len(group.layer_names) for group in kv_cache_config.kv_cache_groups]),
            "longest": longest_of(model),
            **attention_of(vllm_config, kv_cache_config),
            **unquantized_of(vllm_config.cache_config),
            **stages_of(model, parallel.pipeline_parallel_size),
        },
        salt=settings.salt + of_tenant(settings.tenant),
        heads=heads_to_cut(heads_of_model(model, first), parallel.tensor_parallel_size, settings.layout),
        layout=settings.layout,
        shape=Shape(parallel.tensor_parallel_size, block_tokens_of(groups)),
        ranks=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        layers=sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups),
        chunk_tokens=chunk_tokens,
        chunk_bytes=sum(
            page_bytes_of(group) * (chunk_tokens // one.block_tokens) for one, group in named if not one.state
        ),
        state_bytes=sum(page_bytes_of(group) for one, group in named if one.state),
        on_cpu=compat.cpu_kernel(vllm_config, first.block_size, first.head_size) is not None,
        groups=groups,
        media=processing_of(model),
    )
    facts.shape = facts.cut(facts.shape)
    for shape in settings.also_read:
        refuse_shape("kv_connector_extra_config: also_read", facts.cut(shape), facts)
    return facts


def heads_to_cut(heads: int, ranks: int, layout: str) -> int:
    """Into how many parts heads can be cut. In NHD a rank's heads are one part."""
    return heads if layout == "HND" else min(heads, ranks)


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
    return 1 if type(spec).__name__ == LATENT else int(model.get_total_num_kv_heads())


def attention_of(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """What the bytes of layers depend on. Block sizes are part of it where they differ."""
    groups = [layers_of(group.kv_cache_spec)[0] for group in kv_cache_config.kv_cache_groups]
    layers = [layer_of(vllm_config, spec) for spec in groups]
    if len(layers) == 1:
        return layers[0]
    blocks = [{"block": str(spec.block_size)} for spec in groups]
    return {"groups": json.dumps([one | block for one, block in zip(layers, blocks, strict=True)])}


def layer_of(vllm_config: Any, spec: Any) -> dict[str, str]:
    """What the bytes of one layer depend on."""
    kind = type(spec).__name__
    if kind == STATE:
        what = f"{spec.mamba_type} {list(zip(spec.shapes, spec.dtypes, strict=True))}"
        return {"kind": kind, "state": what, "order": compat.state_order()}
    return {
        "head": f"{spec.head_size} {getattr(spec, 'head_size_v', None)}",
        "window": str(getattr(spec, "sliding_window", None)),
        "kind": kind,
        "kernel": str(compat.cpu_kernel(vllm_config, spec.block_size, spec.head_size)),
    }


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


def page_bytes_of(group: Any) -> int:
    """Bytes of a block of all layers of a group, without padding behind states."""
    layers = [
        replace(layer, page_size_padded=None) if type(layer).__name__ == STATE else layer
        for layer in layers_of(group.kv_cache_spec)
    ]
    each = len(group.layer_names) if len(layers) == 1 else 1
    return sum(int(layer.page_size_bytes) for layer in layers) * each


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
    uneven = not all(group.even and group.heads == facts.groups[0].heads for group in facts.groups)
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
        forebay.head_reads(facts.heads, mine.tp, 0, theirs.tp)
        fits = theirs.tp <= RANKS_AT_MOST * max(mine.tp, facts.heads)
    except InvalidError:
        fits = False
    if not fits:
        raise InvalidError(
            f"{what}: tp is {theirs.tp}; allowed are divisors of the model's {facts.heads} KV heads, and "
            f"multiples of them up to {RANKS_AT_MOST * max(mine.tp, facts.heads)}"
        )


def model_text(model: Any) -> str:
    """The model's configuration as the engine runs it."""
    facts = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in VOLATILE}
    return json.dumps(facts, sort_keys=True, default=str)


def dtype_of(cache_dtype: str, dtype: Any) -> str:
    """The format of the elements. vLLM's `auto` is the model's own."""
    name = str(dtype) if cache_dtype == "auto" else cache_dtype
    if name == "torch.uint8":
        name = cache_dtype
    return name.removeprefix("torch.")


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
    parallel = vllm_config.parallel_config
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise InvalidError(
            "calculate_kv_scales is True: scales would depend on the first prompt; allowed is False"
        )
    if getattr(vllm_config.model_config, "is_diffusion", False):
        raise InvalidError(
            "the model is a diffusion model, which writes KV again that is stored already; allowed are others"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise InvalidError(f"{name} is {getattr(parallel, name)}; allowed is 1")


def refuse_finer_hits(cache_config: Any) -> None:
    """Refuses hits within a block: states are where blocks end."""
    unit = getattr(cache_config, "prefix_match_unit", None)
    if unit not in (None, cache_config.block_size):
        raise InvalidError(
            f"prefix_match_unit is {unit}; allowed is none for a model with {STATE}, or the block size, "
            f"{cache_config.block_size}"
        )


def refuse_early_zeroing(vllm_config: Any, device: str) -> None:
    """Refuses the V2 model runner with states: it zeroes blocks that stores may still read."""
    if device == "cuda" and getattr(vllm_config, "use_v2_model_runner", False):
        raise InvalidError(
            f"the V2 model runner is used for a model with {STATE}; allowed is VLLM_USE_V2_MODEL_RUNNER=0"
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
