"""Makes a tiny Llama, DeepSeek or LFM2 with random weights, and a tokenizer with the words `t0`, `t1`, ...

Knows the files that vLLM reads. Weights are wide enough that greedy tokens vary: a wrong byte of KV changes
them. With a window, two layers of three, or all of them, see no more than so many tokens. Adapters, for LoRA,
lie in folders in it: `adapter0`, `adapter1`, ...
"""

import argparse
import json
import math
from pathlib import Path

VOCABULARY = 1024
LAYERS, LAYERS_WITH_WINDOWS = 4, 6
HEADS, KV_HEADS, HEAD = 4, 2, 64
WIDTH = HEADS * HEAD
INNER = 2 * WIDTH
LONGEST = 8192
SPREAD = 0.15
RANK = 4
LATENT, ROPE, LATENT_HEAD = 512, 64, 128  # the only sizes that vLLM's kernels have
SEEN = 33  # tokens that a convolution of LFM2 sees: a state is as large as a block of KV, as CPUs want it


def of_attention(latent: bool, kv_heads: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's attention, by the names that Llama's files have, or DeepSeek's."""
    if not latent:
        return {
            "q_proj.weight": (HEADS * HEAD, WIDTH),
            "k_proj.weight": (kv_heads * HEAD, WIDTH),
            "v_proj.weight": (kv_heads * HEAD, WIDTH),
            "o_proj.weight": (WIDTH, HEADS * HEAD),
        }
    return {
        "q_proj.weight": (HEADS * (LATENT_HEAD + ROPE), WIDTH),
        "kv_a_proj_with_mqa.weight": (LATENT + ROPE, WIDTH),
        "kv_a_layernorm.weight": (LATENT,),
        "kv_b_proj.weight": (HEADS * (LATENT_HEAD + LATENT_HEAD), LATENT),
        "o_proj.weight": (WIDTH, HEADS * LATENT_HEAD),
    }


def shapes(layers: int, latent: bool, kv_heads: int = KV_HEADS) -> dict[str, tuple[int, ...]]:
    """The tensors of a model."""
    attention = of_attention(latent, kv_heads)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        found |= {
            name + "input_layernorm.weight": (WIDTH,),
            name + "post_attention_layernorm.weight": (WIDTH,),
            **{f"{name}self_attn.{tensor}": shape for tensor, shape in attention.items()},
            name + "mlp.gate_proj.weight": (INNER, WIDTH),
            name + "mlp.up_proj.weight": (INNER, WIDTH),
            name + "mlp.down_proj.weight": (WIDTH, INNER),
        }
    return found


def shapes_with_states(seen: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a small LFM2: every second layer has attention, the others have convolutions.

    Attention has one head, as wide as the model: vLLM on CPUs turns only some of the queries of several heads
    by their positions, other ones with each cut of a prompt, and its tokens differ.
    """
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.embedding_norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    attention = {
        "self_attn.q_proj.weight": (WIDTH, WIDTH),
        "self_attn.k_proj.weight": (WIDTH, WIDTH),
        "self_attn.v_proj.weight": (WIDTH, WIDTH),
        "self_attn.out_proj.weight": (WIDTH, WIDTH),
        "self_attn.q_layernorm.weight": (WIDTH,),
        "self_attn.k_layernorm.weight": (WIDTH,),
    }
    convolution = {
        "conv.in_proj.weight": (3 * WIDTH, WIDTH),
        "conv.conv.weight": (WIDTH, 1, seen),
        "conv.out_proj.weight": (WIDTH, WIDTH),
    }
    for layer in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {
            "operator_norm.weight": (WIDTH,),
            "ffn_norm.weight": (WIDTH,),
            "feed_forward.w1.weight": (INNER, WIDTH),
            "feed_forward.w2.weight": (WIDTH, INNER),
            "feed_forward.w3.weight": (INNER, WIDTH),
            **(attention if layer % 2 else convolution),
        }
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Seeded noise; ones where vectors scale."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=random) * SPREAD if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_adapter(folder: Path, layers: int, seed: int) -> None:
    """An adapter of queries, keys and values that changes what comes out."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            of_module = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            for part, shape in (("lora_A", (RANK, WIDTH)), ("lora_B", (heads * HEAD, RANK))):
                tensors[f"{of_module}{part}.weight"] = torch.randn(shape, generator=random) * SPREAD
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    modules = ["q_proj", "k_proj", "v_proj"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_config(
    folder: Path,
    layers: int,
    window: int | None,
    full: bool,
    latent: bool,
    seen: int | None,
    kv_heads: int,
) -> None:
    """What kind of model it is. With a window, some layers see everything if it is `full`. Convolutions have
    `seen` so many tokens.
    """
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "initializer_range": 1 / math.sqrt(WIDTH),
    }
    if window is not None:
        kinds = [
            "full_attention" if full and layer % 3 == 2 else "sliding_attention" for layer in range(layers)
        ]
        config |= {"sliding_window": window, "layer_types": kinds}
    if latent:
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": HEADS,
            "q_lora_rank": None,
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": LATENT_HEAD,
            "v_head_dim": LATENT_HEAD,
            "first_k_dense_replace": layers,
        }
        del config["head_dim"]
    if seen is not None:
        config |= {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention" if layer % 2 else "conv" for layer in range(layers)],
            "conv_L_cache": seen,
            "conv_bias": False,
            "conv_dim": WIDTH,
            "block_dim": WIDTH,
            "block_multiple_of": 1,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
            "norm_eps": 1e-6,
            "tie_embedding": False,
        }
        del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_tokenizer(folder: Path) -> None:
    """One word, one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make(
    folder: Path,
    window: int | None,
    full: bool,
    latent: bool,
    seen: int | None,
    adapters: int,
    kv_heads: int,
) -> None:
    """Writes all of it."""
    layers = LAYERS_WITH_WINDOWS if window is not None and full else LAYERS
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, layers, window, full, latent, seen, kv_heads)
    write_tokenizer(folder)
    write_weights(
        folder, shapes(layers, latent, kv_heads) if seen is None else shapes_with_states(seen), seed=7
    )
    for number in range(adapters):
        write_adapter(folder / f"adapter{number}", layers, seed=100 + number)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--window", type=int)
    parser.add_argument("--all-windows", action="store_true", help="no layer sees everything")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--latent", action="store_true", help="a small DeepSeek, for MLA")
    parser.add_argument("--states", action="store_true", help="a small LFM2, for layers with states")
    parser.add_argument("--seen", type=int, default=SEEN, help="tokens that a state comes from")
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS, help="of a Llama without adapters")
    said = parser.parse_args()
    seen = said.seen if said.states else None
    make(said.folder, said.window, not said.all_windows, said.latent, seen, said.adapters, said.kv_heads)


if __name__ == "__main__":
    main()
