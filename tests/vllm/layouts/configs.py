"""vLLM's own configuration of KV cache for a model, as on a GPU, without an engine.

It knows how vLLM goes from layers to specifications, groups, a layout and tensors. The layers are
those of `models*.py`. Nothing here knows Forebay.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.attention import HiSparseConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import allocate_kv_cache, select_common_block_size


@dataclass
class ModelConfig:
    """What vLLM asks of a model's configuration, for a model that is not on this machine."""

    hf_config: Any
    architecture: str
    heads: int  # KV heads of the whole model
    head_size: int
    use_mla: bool = False
    is_hybrid: bool = False
    max_model_len: int = 2048
    dtype: torch.dtype = torch.bfloat16
    # The same for all of them.
    model: str = "nowhere"
    revision: str | None = None
    seed: int = 0
    quantization: str | None = None
    original_max_model_len: int | None = None
    runner_type: str = "generate"
    model_impl: str = "auto"
    convert_type: str = "none"
    is_diffusion: bool = False
    is_encoder_decoder: bool = False
    is_multimodal_model: bool = False
    uses_mrope: bool = False
    is_moe: bool = True
    enable_return_routed_experts: bool = False
    supports_kv_cache_grouping: bool = False
    supports_multimodal_inputs: bool = False
    return_sampling_mask: bool = False
    multimodal_config: Any = None
    hf_overrides: Any = None
    skip_tokenizer_init: bool = True

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config

    @property
    def architectures(self) -> list[str]:
        return [self.architecture]

    def get_total_num_kv_heads(self) -> int:
        return self.heads

    def get_num_kv_heads(self, parallel: Any) -> int:
        return max(1, self.heads // int(parallel.tensor_parallel_size))

    def get_head_size(self) -> int:
        return self.head_size

    def get_vocab_size(self) -> int:
        return 1 << 17


@dataclass(frozen=True)
class Model:
    """A model: its configuration, and what its layers keep."""

    name: str
    values: str  # where the numbers come from
    made: Callable[[], ModelConfig]
    # Registers the layers where vLLM looks for them, in the order of the model's constructor.
    layers: Callable[[VllmConfig], None]
    cache_dtype: str = "auto"
    drafts: int = 0  # tokens that a drafter proposes
    refused: str | None = None  # what the connector says, if it does not take the model
    step: int = 256  # tokens of a step; blocks leave windows between steps
    tokens: int | None = None  # of a prompt; None: three chunks and a third
    layout: str = "HND"  # that its kernels can do, as the connector's setting
    # Tokens of what a ring's rows are pooled to, by what ends the layer's name.
    pools: dict[str, int] = field(default_factory=dict)


def bare(kind: type[Any], **attributes: Any) -> Any:
    """A layer without weights: `kind` with what its constructor sets, as far as KV goes."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        object.__setattr__(layer, name, value)
    return layer


def vllm_config(model: Model, tp: int = 1, transfer: dict[str, Any] | None = None) -> VllmConfig:
    """For `model` on `tp` GPUs, with its layers, and blocks of the size that vLLM chooses."""
    made = VllmConfig(
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=model.step, max_num_seqs=8, max_model_len=8192, is_encoder_decoder=False
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="mp"),
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    made.model_config = model.made()
    if model.drafts:  # By a module of the model's own, which has a layer of attention.
        drafter = SpeculativeConfig(method="ngram", num_speculative_tokens=model.drafts)
        drafter.method = "mtp"
        made.speculative_config = drafter
    made.scheduler_config.async_scheduling = False
    made.cache_config.cache_dtype = model.cache_dtype
    # What vLLM's constructor has said of a CPU.
    made.cache_config.user_specified_block_size = False
    made.cache_config.block_size = CacheConfig.DEFAULT_BLOCK_SIZE
    made.cache_config.enable_prefix_caching = True
    made.cache_config.mamba_cache_mode = "align" if made.model_config.is_hybrid else "none"
    with set_current_vllm_config(made):
        model.layers(made)
        Platform.update_block_size_for_backend(made)
    return made


def layers_of(config: VllmConfig) -> dict[str, Any]:
    """The layers that a worker would have, by name."""
    return config.compilation_config.static_forward_context


def kv_cache_configs(config: VllmConfig) -> list[KVCacheConfig]:
    """Of each rank, as vLLM's engine makes them before it starts its scheduler.

    With memory for two of the longest requests, and a little more.
    """
    ranks = config.parallel_config.tensor_parallel_size
    with set_current_vllm_config(config):
        specs = [get_kv_cache_spec(config) for _ in range(ranks)]
        backends = list({layer.get_attn_backend(): None for layer in layers_of(config).values()})
        supported = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        layout = resolve_kv_cache_layout(
            config, [supported] * ranks, [spec for of_rank in specs for spec in of_rank.values()]
        )
        groups = planning.get_global_kv_cache_groups(config, specs)
        builder = get_kv_cache_config_builder(config)
        memory = 2 * planning._max_memory_usage_bytes_from_groups(builder, config, groups)
        memory += 16 * planning._pool_bytes_per_block(config, groups)
        found = planning.get_kv_cache_configs(config, specs, [memory] * ranks, groups)
    for one in found:
        one.kv_cache_layout = layout.name
    config.cache_config.num_gpu_blocks = found[0].num_blocks
    return found


def kernel_blocks(config: VllmConfig, kv_config: KVCacheConfig) -> list[int]:
    """Tokens of a block as each group's kernels see it: a worker splits vLLM's blocks for them."""
    layers, found = layers_of(config), []
    for group in kv_config.kv_cache_groups:
        size = group.kv_cache_spec.block_size
        specs = list(iter_layer_specs(group.kv_cache_spec))
        # With other layers' pages between them, blocks are not split.
        packed = any(
            tensor.block_stride > tensor.layer_stride
            for tensor in kv_config.kv_cache_tensors
            if not set(tensor.layers).isdisjoint(group.layer_names)
        )
        if packed or not isinstance(specs[0], AttentionSpec):
            found.append(size)
            continue
        backends = {layers[name].get_attn_backend(): None for name in group.layer_names}
        with set_current_vllm_config(config):
            found.append(select_common_block_size(size, list(backends), [specs[0]] * len(backends)))
    return found


def allocate(config: VllmConfig, kv_config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The tensors of a worker: views of one allocation, in which groups lie over one another."""
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return allocate_kv_cache(kv_config, torch.device("cpu"), layout, kernel_blocks(config, kv_config))


def kept_bytes(kv_config: KVCacheConfig, chunk_tokens: int) -> tuple[int, int]:
    """Bytes that a chunk of one rank must keep, of its tokens and of the states at its end.

    Of its tokens all KV where layers see everything, else what is seen from the last one on.
    """
    kv = states = 0
    for group in kv_config.kv_cache_groups:
        specs = list(iter_layer_specs(group.kv_cache_spec))
        for spec in specs if len(specs) > 1 else specs * len(group.layer_names):
            if isinstance(spec, MambaSpec):
                states += int(spec.real_page_size_bytes)
            else:
                kv += kept_of_layer(spec, chunk_tokens)
    return kv, states


def kept_of_layer(spec: Any, chunk_tokens: int) -> int:
    """The same of one layer with KV."""
    if isinstance(spec, CircularBufferSpec) or getattr(spec, "bounded_replay", False):
        return 0
    pages = chunk_tokens // spec.block_size
    seen = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    seen = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else seen
    kept = pages if seen is None else min(pages, -(-seen // spec.block_size))
    return kept * int(spec.real_page_size_bytes)


def hisparse_groups(model: Model) -> Any:
    """Its groups where most of the KV lies in host memory, and the GPU has parts of it again."""
    config = vllm_config(model)
    config.attention_config.hisparse_config = HiSparseConfig()
    with set_current_vllm_config(config):
        groups = planning.get_global_kv_cache_groups(config, [get_kv_cache_spec(config)])
    return SimpleNamespace(kv_cache_groups=groups)
