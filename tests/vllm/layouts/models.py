"""The models whose KV no CPU makes: what each layer keeps, by published configurations.

Each layer is one of vLLM's own classes. Where its constructor needs a GPU or weights, it has what
the constructor would set of what its specification is made of (`bare`). Numbers are the defaults of
the configuration classes of transformers and vLLM where these are of a checkpoint, else written
here; `values` says which, and `assumed` what nobody has published.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.rswa_attention import RSWAAttention
from vllm.model_executor.layers.attention.static_sink_attention import StaticSinkAttention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend

from layouts.configs import Model, ModelConfig, bare
from layouts.models_latent import LATENT_MODELS


def attention(
    config: VllmConfig,
    name: str,
    heads: int,
    size: int,
    window: int | None = None,
    kind: type[Any] = Attention,
    backend: type[Any] = FlashAttentionBackend,
    **more: Any,
) -> None:
    """A layer of the usual attention, with `heads` KV heads over all ranks."""
    ranks = config.parallel_config.tensor_parallel_size
    config.compilation_config.static_forward_context[name] = bare(
        kind,
        layer_name=name,
        attn_type=AttentionType.DECODER,
        kv_cache_dtype=config.cache_config.cache_dtype,
        kv_cache_torch_dtype=torch.bfloat16,
        num_kv_heads=max(1, heads // ranks),
        head_size=size,
        sliding_window=window,
        attn_backend=backend,
        kv_sharing_target_layer_name=None,
        **({"head_size_v": size} | more),
    )


def gpt_oss() -> ModelConfig:
    """gpt-oss-120b, whose configuration is the default."""
    from transformers import GptOssConfig

    hf = GptOssConfig()
    return ModelConfig(hf, "GptOssForCausalLM", hf.num_key_value_heads, hf.head_dim)


def gpt_oss_layers(config: VllmConfig) -> None:
    """Every other layer sees a window, the first one too."""
    hf = config.model_config.hf_config
    for layer in range(hf.num_hidden_layers):
        window = hf.sliding_window if layer % 2 == 0 else None
        name = f"model.layers.{layer}.attn.attn"
        attention(config, name, hf.num_key_value_heads, hf.head_dim, window)


def gemma3() -> ModelConfig:
    """Gemma-3-27B, 12 of its 62 layers."""
    from transformers import Gemma3TextConfig

    hf = Gemma3TextConfig(
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        hidden_size=5376,
        sliding_window=1024,
    )
    return ModelConfig(hf, "Gemma3ForCausalLM", hf.num_key_value_heads, hf.head_dim)


def gemma_layers(config: VllmConfig) -> None:
    """One layer in six sees everything, the others a window."""
    hf = config.model_config.hf_config
    for layer, kind in enumerate(hf.layer_types):
        full = kind == "full_attention"
        # Gemma 4 has other heads where it sees everything.
        one = hf.per_layer_config[layer] if config.model_config.architecture.startswith("Gemma4") else hf
        window = None if full else hf.sliding_window
        name = f"model.layers.{layer}.self_attn.attn"
        attention(config, name, one.num_key_value_heads, one.head_dim, window)


def gemma4() -> ModelConfig:
    """Gemma-4-31B, a tenth of its layers. Those that see everything have other heads."""
    from transformers import Gemma4TextConfig

    hf = Gemma4TextConfig(
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=256,
        hidden_size=5376,
        sliding_window=1024,
        attention_k_eq_v=True,
        global_head_dim=512,
        num_global_key_value_heads=4,
    )
    return ModelConfig(hf, "Gemma4ForCausalLM", 16, 256)


def llama4() -> ModelConfig:
    """Llama-4-Scout, 4 of its 48 layers."""
    from transformers import Llama4TextConfig

    hf = Llama4TextConfig(num_hidden_layers=4)
    return ModelConfig(hf, "Llama4ForCausalLM", hf.num_key_value_heads, hf.head_dim, max_model_len=12288)


def llama4_layers(config: VllmConfig) -> None:
    """One layer in four sees everything, the others tokens of the same 8,192."""
    hf = config.model_config.hf_config
    for layer in range(hf.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn.attn"
        if hf.no_rope_layers[layer]:
            attention(
                config,
                name,
                hf.num_key_value_heads,
                hf.head_dim,
                kind=ChunkedLocalAttention,
                attention_chunk_size=hf.attention_chunk_size,
            )
        else:
            attention(config, name, hf.num_key_value_heads, hf.head_dim)


def unlimited_ocr() -> ModelConfig:
    """DeepSeek-VL2's text model, without MLA."""
    from types import SimpleNamespace

    hf = SimpleNamespace(num_hidden_layers=12, num_key_value_heads=10, head_dim=128, rswa_window=128)
    hf.to_dict = lambda: {name: value for name, value in vars(hf).items() if name != "to_dict"}
    return ModelConfig(hf, "UnlimitedOCRForCausalLM", hf.num_key_value_heads, hf.head_dim)


def rswa_layers(config: VllmConfig) -> None:
    """All layers see the prompt, and of the answer a window."""
    hf = config.model_config.hf_config
    for layer in range(hf.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn.attn"
        window = hf.rswa_window
        attention(config, name, hf.num_key_value_heads, hf.head_dim, kind=RSWAAttention, _rswa_window=window)


def openpangu() -> ModelConfig:
    """A model whose layers have learned keys and values before the prompt's."""
    from types import SimpleNamespace

    hf = SimpleNamespace(
        num_hidden_layers=12, num_key_value_heads=8, head_dim=192, v_channels=128, param_sink_number=128
    )
    hf.to_dict = lambda: {name: value for name, value in vars(hf).items() if name != "to_dict"}
    return ModelConfig(hf, "PanguProMoEV2ForCausalLM", hf.num_key_value_heads, hf.head_dim)


def sink_layers(config: VllmConfig) -> None:
    """They have blocks of their own, which no request's table has."""
    hf = config.model_config.hf_config
    for layer in range(hf.num_hidden_layers):
        attention(
            config,
            f"model.layers.{layer}.self_attn.attn",
            hf.num_key_value_heads,
            hf.head_dim,
            kind=StaticSinkAttention,
            backend=FlashAttentionDiffKVBackend,
            head_size_v=hf.v_channels,
            sink_len=hf.param_sink_number,
        )


MODELS = (
    *LATENT_MODELS,
    Model("gpt_oss", "transformers' default, gpt-oss-120b", gpt_oss, gpt_oss_layers, tokens=600),
    Model("gemma3", "Gemma-3-27B, published", gemma3, gemma_layers, tokens=1700),
    Model("gemma4", "Gemma-4-31B, assumed", gemma4, gemma_layers, tokens=1700),
    Model("llama4", "transformers' default, Llama-4-Scout", llama4, llama4_layers, step=2048, tokens=9000),
    Model("rswa", "Unlimited-OCR: window published, widths assumed", unlimited_ocr, rswa_layers, tokens=600),
    Model("sinks", "openPangu: assumed", openpangu, sink_layers, tokens=600),
)
