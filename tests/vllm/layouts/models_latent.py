"""The models of `models.py` with latent KV, indexers, compressors, states and rings."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

from layouts.configs import Model, ModelConfig, bare


def said(**values: Any) -> SimpleNamespace:
    """A configuration that is written here."""
    found = SimpleNamespace(**values)
    found.to_dict = lambda: dict(values)
    return found


def at(config: VllmConfig, name: str, layer: Any) -> None:
    """Puts a layer where vLLM looks for it."""
    config.compilation_config.static_forward_context[name] = layer


def mla(config: VllmConfig, name: str, backend: type[Any], size: int, indexed: bool = False) -> None:
    """A layer with one latent vector for each token."""
    at(
        config,
        name,
        bare(
            MLAAttention,
            layer_name=name,
            kv_cache_dtype=config.cache_config.cache_dtype,
            head_size=size,
            sliding_window=None,
            attn_backend=backend,
            indexer=object() if indexed else None,
            topk_buffer_width=None,
            non_causal_multi_token_decode=False,
        ),
    )


def deepseek_v4() -> ModelConfig:
    """DeepSeek-V4-Flash, all layers."""
    from transformers import DeepseekV4Config

    hf = DeepseekV4Config()
    return ModelConfig(hf, "DeepseekV4ForCausalLM", 1, hf.head_dim, use_mla=True)


def deepseek_v4_layers(config: VllmConfig) -> None:
    """Each layer has a window, most a compressed cache and a compressor, and some an indexer.

    The last layer is the MTP module, which has a window alone.
    """
    from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    hf, cache = config.model_config.hf_config, config.cache_config
    for layer in range(hf.num_hidden_layers + hf.num_nextn_predict_layers):
        name = f"model.layers.{layer}.attn"
        kind = hf.layer_types[layer] if layer < hf.num_hidden_layers else None
        ratio = max(1, hf.compress_rates.get(kind, 0))
        if ratio == 4:
            key = f"{name}.indexer"
            # 128 elements in FP8 and one scale in FP32.
            DeepseekV4IndexerCache(hf.index_head_dim + 4, torch.uint8, f"{key}.k_cache", cache, ratio)
            CompressorStateCache(4 * hf.index_head_dim, torch.float32, ratio, f"{key}.compressor.state_cache")
        DeepseekV4SWACache(hf.head_dim, hf.sliding_window, torch.uint8, f"{name}.swa_cache", cache)
        made = bare(
            DeepseekV4FlashMLAAttention,
            prefix=name,
            compress_ratio=ratio,
            kv_cache_dtype=cache.cache_dtype,
            kv_cache_torch_dtype=torch.uint8,
            head_dim=hf.head_dim,
        )
        at(config, name, made)
        if ratio > 1:
            width = (2 if ratio == 4 else 1) * 2 * hf.head_dim
            CompressorStateCache(width, torch.float32, ratio, f"{name}.compressor.state_cache")


def deepseek_v41() -> ModelConfig:
    """A model of DeepSeek-V4.1's kind: its layers are assumed."""
    # Pairs of layers share what the first of them keeps.
    hf = said(
        num_hidden_layers=40,
        head_dim=512,
        sliding_window=128,
        index_head_dim=128,
        compress_ratios=[0, 0, *[2, 2, 1, 1] * 9, 2, 2],
        kv_source_layer_ids=list(range(2, 40, 2)),
    )
    return ModelConfig(hf, "DeepseekV41ForCausalLM", 1, hf.head_dim, use_mla=True)


def deepseek_v41_layers(config: VllmConfig) -> None:
    """Each layer has a window, which vLLM makes anew behind a hit, every second one a cache."""
    from vllm.models.deepseek_v41.attention import DeepseekV4IndexerCache
    from vllm.models.deepseek_v41.compressor import CompressorStateCache
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    hf, cache = config.model_config.hf_config, config.cache_config
    for layer in range(hf.num_hidden_layers):
        name, ratio = f"model.layers.{layer}.attn", hf.compress_ratios[layer]
        source = layer in hf.kv_source_layer_ids
        made = bare(
            DeepseekV4FlashMLAAttention,
            prefix=name,
            is_kv_source=source,
            compress_ratio=ratio,
            kv_cache_dtype=cache.cache_dtype,
            kv_cache_torch_dtype=torch.uint8,
            head_dim=hf.head_dim,
            kv_page_alignment=576,
            compressed_bytes_per_token=584,
        )
        at(config, name, made)
        if source:
            key = f"{name}.indexer.k_cache"
            DeepseekV4IndexerCache(hf.index_head_dim + 4, torch.uint8, key, cache, ratio)
        DeepseekV4SWACache(
            hf.head_dim,
            hf.sliding_window,
            torch.uint8,
            f"{name}.swa_cache",
            cache,
            block_size=32,
            bounded_replay=cache.swa_bounded_replay,
        )
        if source and ratio > 1:
            CompressorStateCache(2 * hf.head_dim, torch.float32, f"{name}.compressor.state_cache")


def glm_5_2() -> ModelConfig:
    """GLM-5, whose layers GLM-5.2 has too, all of them."""
    from transformers import GlmMoeDsaConfig

    hf = GlmMoeDsaConfig()
    size = hf.kv_lora_rank + hf.qk_rope_head_dim
    return ModelConfig(hf, "GlmMoeDsaForCausalLM", 1, size, use_mla=True)


def glm_5_2_layers(config: VllmConfig) -> None:
    """Each layer has latent KV, and keys of an indexer."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    hf = config.model_config.hf_config
    for layer in range(hf.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn"
        size = hf.index_head_dim + 4
        DeepseekV32IndexerCache(size, torch.uint8, f"{name}.indexer.k_cache", config.cache_config)
        size = config.model_config.head_size
        mla(config, f"{name}.attn", FlashMLASparseBackend, size, indexed=True)


def glm_5_next() -> ModelConfig:
    """GLM-5.3-Flash, a quarter of its layers."""
    from transformers import Glm5NextTextConfig

    hf = Glm5NextTextConfig(num_hidden_layers=12)
    size = hf.kv_lora_rank + hf.qk_rope_head_dim
    return ModelConfig(hf, "Glm5NextForCausalLM", 1, size, True, True, max_model_len=20480)


def glm_5_next_layers(config: VllmConfig) -> None:
    """One layer in four has latent KV and keys of 16 tokens each, the others have states."""
    from vllm.models.glm5next.common.attention import Glm5NextIndexerCache, Glm5NextTailCache
    from vllm.models.glm5next.common.kda import Glm5NextLinearAttention

    hf, cache = config.model_config.hf_config, config.cache_config
    for layer, kind in enumerate(hf.layer_types):
        name = f"model.layers.{layer}.self_attn"
        if kind == "linear_attention":
            kda(config, Glm5NextLinearAttention, name, hf.linear_num_heads, hf.linear_head_dim)
            continue
        pool = {"prefix": f"{name}.indexer.k_cache", "cache_config": cache, "index_kpool": hf.index_kpool}
        Glm5NextIndexerCache(head_dim=hf.index_head_dim + 4, dtype=torch.uint8, **pool)
        pool["prefix"] = f"{name}.indexer.tail_cache"
        Glm5NextTailCache(head_dim=hf.index_head_dim, dtype=torch.bfloat16, **pool)
        mla(config, f"{name}.attn", FlashMLASparseBackend, config.model_config.head_size, indexed=True)


def kda(config: VllmConfig, kind: type[Any], name: str, heads: int, size: int) -> None:
    """A layer of Kimi delta attention, as its kernels for an H100 have it."""
    at(
        config,
        name,
        bare(
            kind,
            prefix=name,
            tp_size=config.parallel_config.tensor_parallel_size,
            num_heads=heads,
            head_dim=size,
            conv_size=4,
            num_spec=config.num_speculative_tokens,
            model_config=config.model_config,
            cache_config=config.cache_config,
            kda_prefill_backend="flashkda",
        ),
    )


def kimi_linear() -> ModelConfig:
    """Kimi-Linear-48B, 12 of its 27 layers."""
    from transformers.models.kimi_linear import KimiLinearConfig

    hf = KimiLinearConfig(num_hidden_layers=12)
    full = [layer for layer, kind in enumerate(hf.layer_types) if kind == "full_attention"]
    linear = [layer for layer in range(hf.num_hidden_layers) if layer not in full]
    written = said(
        num_attention_heads=hf.num_attention_heads,
        head_dim=hf.linear_head_dim,
        linear_attn_config={
            "num_heads": hf.linear_num_heads,
            "head_dim": hf.linear_head_dim,
            "short_conv_kernel_size": hf.linear_conv_kernel_dim,
            "full_attn_layers": full,
            "kda_layers": linear,
        },
    )
    size = hf.kv_lora_rank + hf.qk_rope_head_dim
    return ModelConfig(written, "KimiLinearForCausalLM", 1, size, True, True, max_model_len=8192)


def kimi_k3() -> ModelConfig:
    """A few layers of Kimi-K3's kind: on one GPU, a state of all would be no chunk."""
    full = list(range(3, 8, 4))
    written = said(
        num_attention_heads=96,
        head_dim=128,
        linear_attn_config={
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(8) if layer not in full],
        },
    )
    return ModelConfig(written, "KimiLinearForCausalLM", 1, 576, True, True, max_model_len=20480)


def kimi_layers(config: VllmConfig) -> None:
    """Some layers have latent KV, the others states."""
    from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    linear = config.model_config.hf_config.linear_attn_config
    for layer in sorted(linear["kda_layers"] + linear["full_attn_layers"]):
        name = f"model.layers.{layer}.self_attn"
        if layer in linear["kda_layers"]:
            kda(config, KimiK3DeltaAttention, name, linear["num_heads"], linear["head_dim"])
            continue
        made = bare(
            MultiHeadLatentAttention,
            layer_name=f"{name}.attn",
            kv_cache_dtype=config.cache_config.cache_dtype,
            head_size=config.model_config.head_size,
            attn_backend=FlashMLABackend,
            non_causal_multi_token_decode=False,
        )
        at(config, f"{name}.attn", made)


def minimax_m3() -> ModelConfig:
    """MiniMax-M3, all layers."""
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    hf = MiniMaxM3TextConfig()
    return ModelConfig(hf, "MiniMaxM3SparseForCausalLM", hf.num_key_value_heads, hf.head_dim)


def minimax_m3_layers(config: VllmConfig) -> None:
    """The first three layers see everything, the others what an indexer finds."""
    from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerCache
    from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseBackend
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

    from layouts.models import attention

    hf, ranks = config.model_config.hf_config, config.parallel_config.tensor_parallel_size
    for layer, sparse in enumerate(hf.sparse_attention_config["sparse_attention_freq"]):
        name = f"model.layers.{layer}.self_attn.attn"
        if not sparse:
            attention(config, name, hf.num_key_value_heads, hf.head_dim)
            continue
        size = hf.sparse_attention_config["sparse_index_dim"]
        MiniMaxM3IndexerCache(size, f"{name}.indexer.index_cache", config.cache_config)
        made = bare(
            MiniMaxM3SparseAttention,
            layer_name=name,
            kv_cache_dtype="auto",
            kv_cache_torch_dtype=torch.bfloat16,
            num_kv_heads=max(1, hf.num_key_value_heads // ranks),
            head_dim=hf.head_dim,
            attn_backend=MiniMaxM3SparseBackend,
        )
        at(config, name, made)


def qwen3_5() -> ModelConfig:
    """Qwen3.5-35B-A3B, 12 of its 40 layers."""
    from transformers import Qwen3_5MoeTextConfig

    hf = Qwen3_5MoeTextConfig(num_hidden_layers=12)
    heads, size = hf.num_key_value_heads, hf.head_dim
    return ModelConfig(hf, "Qwen3_5MoeForConditionalGeneration", heads, size, False, True, 4096)


def gated_delta_net(config: VllmConfig, name: str) -> None:
    """A layer of Qwen's gated delta net."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    hf = config.model_config.hf_config
    made = bare(
        QwenGatedDeltaNetAttention,
        prefix=name,
        tp_size=config.parallel_config.tensor_parallel_size,
        num_k_heads=hf.linear_num_key_heads,
        num_v_heads=hf.linear_num_value_heads,
        head_k_dim=hf.linear_key_head_dim,
        head_v_dim=hf.linear_value_head_dim,
        conv_kernel_size=hf.linear_conv_kernel_dim,
        num_spec=config.num_speculative_tokens,
        model_config=config.model_config,
        cache_config=config.cache_config,
        vllm_config=config,
        _checkpoint_alignment=None,
    )
    at(config, name, made)


def qwen3_5_layers(config: VllmConfig) -> None:
    """One layer in four has attention, the others states. A drafter has one of attention."""
    from layouts.models import attention

    hf = config.model_config.hf_config
    for layer, kind in enumerate(hf.layer_types):
        if kind == "linear_attention":
            gated_delta_net(config, f"model.layers.{layer}.linear_attn")
        else:
            name = f"model.layers.{layer}.self_attn.attn"
            attention(config, name, hf.num_key_value_heads, hf.head_dim)
    if config.num_speculative_tokens:  # The MTP module.
        name = f"mtp.layers.{hf.num_hidden_layers}.self_attn.attn"
        attention(config, name, hf.num_key_value_heads, hf.head_dim, is_draft_layer=True)


def qwen4_exp() -> ModelConfig:
    """Qwen4-Exp, 12 of its 40 layers. What its indexer is made of has no default."""
    from transformers import Qwen4ExpTextConfig

    hf = Qwen4ExpTextConfig(
        num_hidden_layers=12,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        ple_layer_ids=[1],
        ple_embed_dim=1024,
        eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )
    heads, size = hf.num_key_value_heads, hf.head_dim
    return ModelConfig(hf, "Qwen4ExpForConditionalGeneration", heads, size, False, True, 4096)


def qwen4_exp_layers(config: VllmConfig) -> None:
    """As Qwen3.5, with an indexer of four tokens a key, and one layer that looks at n-grams."""
    from vllm.models.qwen4_exp.common.qsa_cache import QSACompressedKeyCache, QSAKeyStateCache
    from vllm.models.qwen4_exp.nvidia.model import Qwen4ExpPLELayer  # before what it imports
    from vllm.models.qwen4_exp.nvidia.qsa import Qwen4ExpQSAAttention, Qwen4ExpQSAFlashAttentionBackend

    hf, ranks = config.model_config.hf_config, config.parallel_config.tensor_parallel_size
    for layer, kind in enumerate(hf.layer_types):
        if layer + 1 in hf.ple_layer_ids:
            name = f"model.layers.{layer}.ple"
            made = bare(
                Qwen4ExpPLELayer,
                prefix=name,
                model_config=config.model_config,
                cache_config=config.cache_config,
                hc_hidden_size=hf.hidden_size * hf.hc_count,
                conv_state_len=(hf.ple_conv_kernel_size - 1) * hf.ngram_size,
                num_spec_tokens=config.num_speculative_tokens,
            )
            at(config, name, made)
        if kind == "linear_attention":
            gated_delta_net(config, f"model.layers.{layer}.linear_attn")
            continue
        name = f"model.layers.{layer}.self_attn"
        same = {
            "head_size": hf.indexer_head_dim,
            "dtype": torch.bfloat16,
            "compress_ratio": hf.indexer_compress_ratio,
            "cache_config": config.cache_config,
            "vllm_config": config,
        }
        QSAKeyStateCache(prefix=f"{name}.indexer.raw_key_cache", **same)
        QSACompressedKeyCache(prefix=f"{name}.indexer.compressed_key_cache", **same)
        made = bare(
            Qwen4ExpQSAAttention,
            layer_name=f"{name}.attn",
            kv_cache_dtype="auto",
            kv_cache_torch_dtype=torch.bfloat16,
            num_kv_heads=max(1, hf.num_key_value_heads // ranks),
            head_dim=hf.head_dim,
            attn_backend=Qwen4ExpQSAFlashAttentionBackend,
        )
        at(config, f"{name}.attn", made)


def step5() -> ModelConfig:
    """Step5, 16 of its 48 layers. Which of them see a window has no default."""
    from vllm.transformers_utils.configs.step5 import Step5Config

    hf = Step5Config(
        num_hidden_layers=16,
        head_dim=128,
        layer_types=["full_attention", *["sliding_attention"] * 3] * 4,
        sliding_window=512,
    )
    return ModelConfig(hf, "Step5ForCausalLM", hf.num_attention_groups, hf.head_dim)


def step5_layers(config: VllmConfig) -> None:
    """One layer in four has summaries of eight tokens and a ring, the others see a window."""
    from vllm.triton_utils import tl

    from layouts.models import attention

    # There is no Triton without a GPU, and a kernel's file wants this name of it.
    vars(tl).setdefault("extra", said(cuda=said(libdevice=None)))
    from vllm.models.step5.nvidia.csa_tail_ring import Step5CSATailRing
    from vllm.models.step5.nvidia.sparse_attention import Step5DSAAttentionBackend
    from vllm.models.step5.nvidia.sparse_summary_cache import Step5SparseSummaryCacheLayer

    hf, there = config.model_config.hf_config, config.compilation_config.static_forward_context
    for layer, kind in enumerate(hf.layer_types):
        name, heads = f"model.layers.{layer}.self_attn.attn", hf.num_attention_groups
        if kind == "sliding_attention":
            attention(config, name, heads, hf.head_dim, hf.sliding_window)
            continue
        attention(config, name, heads, hf.head_dim, backend=Step5DSAAttentionBackend)
        summary = f"{name}.sparse_summary_cache"
        Step5SparseSummaryCacheLayer(prefix=summary, target_impl=None, static_forward_context=there)
        Step5CSATailRing(
            prefix=f"{name}.csa_tail_ring",
            main_layer_name=name,
            num_speculative_tokens=config.num_speculative_tokens,
            static_forward_context=there,
        )


LATENT_MODELS = (
    Model(
        "deepseek_v4",
        "transformers' default, DeepSeek-V4-Flash",
        deepseek_v4,
        deepseek_v4_layers,
        cache_dtype="fp8_ds_mla",
    ),
    Model(
        "deepseek_v41",
        "DeepSeek-V4.1: widths as in vLLM's code, layers assumed",
        deepseek_v41,
        deepseek_v41_layers,
        tokens=434,  # no pair of tokens is whole behind it
        cache_dtype="fp8_ds_mla",
        pools={"compressor.state_cache": 2},
    ),
    Model(
        "glm_5_2",
        "transformers' default, GLM-5 (78 layers)",
        glm_5_2,
        glm_5_2_layers,
        cache_dtype="fp8_ds_mla",
    ),
    Model(
        "glm_5_next",
        "transformers' default, GLM-5.3-Flash",
        glm_5_next,
        glm_5_next_layers,
        step=4096,
        pools={"tail_cache": 16},
    ),
    Model(
        "kimi_k3", "Kimi-K3: hidden size as in vLLM's code, the rest assumed", kimi_k3, kimi_layers, step=4096
    ),
    Model("kimi_linear", "transformers' default, Kimi-Linear-48B", kimi_linear, kimi_layers, step=4096),
    Model("minimax_m3", "vLLM's default, MiniMax-M3", minimax_m3, minimax_m3_layers),
    Model("qwen3_5", "transformers' default, Qwen3.5-35B-A3B", qwen3_5, qwen3_5_layers, drafts=3, step=4096),
    Model(
        "qwen4_exp",
        "transformers' default, Qwen4-Exp; indexer assumed",
        qwen4_exp,
        qwen4_exp_layers,
        step=4096,
        pools={"raw_key_cache": 4},
        layout="NHD",
    ),
    Model(
        "step5",
        "vLLM's default, Step5; windows assumed",
        step5,
        step5_layers,
        pools={"tail_ring": 8},
        tokens=900,
        layout="NHD",
    ),
)
