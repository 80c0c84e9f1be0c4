"""Makes tiny models of the kinds that people serve today, with random weights.

`tiny_kinds.py FOLDER KIND ...` makes a folder of each in FOLDER.

Knows their files: the fields of `config.json` and the names of tensors, as they are published. All have the
words and the width of `tiny_model.py`. A drafter is a folder in that of its model, `drafter`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from tiny_model import HEAD, HEADS, INNER, KV_HEADS, LONGEST, SPREAD, VOCABULARY, WIDTH, write_tokenizer

Shapes = dict[str, tuple[int, ...]]

# Windows of gpt-oss, Gemma 3 and Gemma 4: a block, more than a block, less than one. All less than
# a chunk.
BLOCK_WINDOW, WINDOW, SMALL_WINDOW = 32, 40, 20
LOCAL = 96  # tokens that see each other, with local attention
EXPERTS, OF_EXPERT = 4, 128
# A layer's state of a gated delta net, or of Mamba: as large as a block of KV of one layer with
# heads of 256.
DELTA = {"keys": 1, "values": 2, "head": 64, "seen": 4}
WIDE_HEAD = 256


def of_all(architecture: str, kind: str, layers: int, **more: object) -> dict[str, object]:
    """What all kinds say."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **more,
    }


def under(prefix: str, shapes: Shapes) -> Shapes:
    """The same with longer names."""
    return {prefix + name: shape for name, shape in shapes.items()}


def linear(name: str, out: int, into: int, bias: bool = False) -> Shapes:
    """A matrix."""
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def attention(head: int = HEAD, bias: bool = False, gated: bool = False, kv_heads: int = KV_HEADS) -> Shapes:
    """Queries, keys, values and what comes out. Queries may have a gate beside them."""
    return {
        **linear("q_proj", HEADS * head * (2 if gated else 1), WIDTH, bias),
        **linear("k_proj", kv_heads * head, WIDTH, bias),
        **linear("v_proj", kv_heads * head, WIDTH, bias),
        **linear("o_proj", WIDTH, HEADS * head, bias),
    }


def norms(*names: str, size: int = WIDTH) -> Shapes:
    """Vectors that scale."""
    return {f"{name}.weight": (size,) for name in names}


def gated(inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    """A network of one hidden layer."""
    gate, up, down = names
    return linear(gate, inner, WIDTH) | linear(up, inner, WIDTH) | linear(down, WIDTH, inner)


def several_experts(names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    """Experts, each with tensors of its own."""
    found: Shapes = {}
    for number in range(EXPERTS):
        found |= under(f"experts.{number}.", gated(OF_EXPERT, names))
    return found


def model(layers: list[Shapes], norm: str = "norm") -> Shapes:
    """Layers between words."""
    found = under("model.", linear("embed_tokens", VOCABULARY, WIDTH) | norms(norm))
    for number, shapes in enumerate(layers):
        found |= under(f"model.layers.{number}.", shapes)
    return found | linear("lm_head", VOCABULARY, WIDTH)


TWO_NORMS = norms("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = TWO_NORMS | norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def gpt_oss() -> tuple[dict[str, object], Shapes]:
    """Sinks, a window in every second layer, experts."""
    layers = 4
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    config = of_all(
        "GptOssForCausalLM",
        "gpt_oss",
        layers,
        intermediate_size=OF_EXPERT,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=BLOCK_WINDOW,
        layer_types=kinds,
        attention_bias=True,
        swiglu_limit=7.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": LONGEST // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )
    layer = {
        **TWO_NORMS,
        **under("self_attn.", attention(bias=True) | {"sinks": (HEADS,)}),
        **linear("mlp.router", EXPERTS, WIDTH, bias=True),
        "mlp.experts.gate_up_proj": (EXPERTS, WIDTH, 2 * OF_EXPERT),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * OF_EXPERT),
        "mlp.experts.down_proj": (EXPERTS, OF_EXPERT, WIDTH),
        "mlp.experts.down_proj_bias": (EXPERTS, WIDTH),
    }
    return config, model([layer] * layers)


def gemma_3() -> tuple[dict[str, object], Shapes]:
    """Five layers with a window to one without."""
    layers = 6
    config = of_all(
        "Gemma3ForCausalLM",
        "gemma3_text",
        layers,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=HEAD,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
    )
    layer = {
        **FOUR_NORMS,
        **under("self_attn.", attention()),
        **norms(*HEAD_NORMS, size=HEAD),
        **under("mlp.", gated(INNER)),
    }
    return config, model([layer] * layers)


def gemma_4() -> tuple[dict[str, object], Shapes]:
    """Windows with small heads, full attention with large ones whose values are keys, and layers that read
    the KV of earlier ones.
    """
    layers, own = 8, 6
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention", "full_attention"]
    config = of_all(
        "Gemma4ForCausalLM",
        "gemma4_text",
        layers,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=SMALL_WINDOW,
        layer_types=kinds,
        global_head_dim=2 * HEAD,
        num_global_key_value_heads=1,
        num_kv_shared_layers=layers - own,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=False,
        use_double_wide_mlp=False,
        final_logit_softcapping=30.0,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    )
    del config["rope_theta"]
    made = []
    for number, kind in enumerate(kinds):
        full = kind == "full_attention"
        head = 2 * HEAD if full else HEAD
        parts = attention(head, kv_heads=1 if full else KV_HEADS)
        names = [HEAD_NORMS[0]] if number >= own else HEAD_NORMS
        if full:
            del parts["v_proj.weight"]
        made.append(
            {
                **FOUR_NORMS,
                **{
                    name: shape
                    for name, shape in under("self_attn.", parts).items()
                    if number < own or name.split(".")[1] in ("q_proj", "o_proj")
                },
                **norms(*names, size=head),
                **under("mlp.", gated(INNER)),
                "layer_scalar": (1,),
            }
        )
    return config, model(made)


def llama_4() -> tuple[dict[str, object], Shapes]:
    """Local attention in three layers of four, full attention without positions in the fourth, experts in
    every second layer.
    """
    layers = 4
    config = of_all(
        "Llama4ForCausalLM",
        "llama4_text",
        layers,
        intermediate_size=OF_EXPERT,
        intermediate_size_mlp=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=LOCAL,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
        attn_temperature_tuning=True,
        floor_scale=512,
        attn_scale=0.1,
        rope_theta=500000.0,
    )
    experts = {
        **linear("router", EXPERTS, WIDTH),
        "experts.gate_up_proj": (EXPERTS, WIDTH, 2 * OF_EXPERT),
        "experts.down_proj": (EXPERTS, OF_EXPERT, WIDTH),
        **under("shared_expert.", gated(OF_EXPERT)),
    }
    made = [
        {
            **TWO_NORMS,
            **under("self_attn.", attention()),
            **under("feed_forward.", experts if number % 2 else gated(INNER)),
        }
        for number in range(layers)
    ]
    return config, model(made)


def delta_net(together: bool) -> Shapes:
    """A gated delta net. What goes in is in one matrix, as in Qwen3-Next, or in several, as in Qwen3.5."""
    keys, values = DELTA["keys"] * DELTA["head"], DELTA["values"] * DELTA["head"]
    into = (
        linear("in_proj_qkvz", 2 * keys + 2 * values, WIDTH)
        | linear("in_proj_ba", 2 * DELTA["values"], WIDTH)
        if together
        else {
            **linear("in_proj_qkv", 2 * keys + values, WIDTH),
            **linear("in_proj_z", values, WIDTH),
            **linear("in_proj_b", DELTA["values"], WIDTH),
            **linear("in_proj_a", DELTA["values"], WIDTH),
        }
    )
    return {
        **into,
        "conv1d.weight": (2 * keys + values, 1, DELTA["seen"]),
        "A_log": (DELTA["values"],),
        "dt_bias": (DELTA["values"],),
        **norms("norm", size=DELTA["head"]),
        **linear("out_proj", WIDTH, values),
    }


def qwen(architecture: str, kind: str, experts: bool) -> tuple[dict[str, object], Shapes]:
    """Three layers of a gated delta net to one with attention, and a layer that predicts one more token."""
    layers = 4
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    config = of_all(
        architecture,
        kind,
        layers,
        head_dim=WIDE_HEAD,
        layer_types=kinds,
        full_attention_interval=4,
        partial_rotary_factor=0.25,
        linear_num_key_heads=DELTA["keys"],
        linear_num_value_heads=DELTA["values"],
        linear_key_head_dim=DELTA["head"],
        linear_value_head_dim=DELTA["head"],
        linear_conv_kernel_dim=DELTA["seen"],
        attn_output_gate=True,
        mtp_num_hidden_layers=1,
        num_nextn_predict_layers=1,
    )
    mlp = gated(INNER)
    if experts:
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS,  # whichever is chosen, rounding would decide
            "moe_intermediate_size": OF_EXPERT,
            "shared_expert_intermediate_size": OF_EXPERT,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
        mlp = {
            **linear("gate", EXPERTS, WIDTH),
            **several_experts(),
            **under("shared_expert.", gated(OF_EXPERT)),
            **linear("shared_expert_gate", 1, WIDTH),
        }
    full = {
        **TWO_NORMS,
        **under("self_attn.", attention(WIDE_HEAD, gated=True)),
        **norms(*HEAD_NORMS, size=WIDE_HEAD),
        **under("mlp.", mlp),
    }
    delta = {**TWO_NORMS, **under("linear_attn.", delta_net(experts)), **under("mlp.", mlp)}
    predicts = {
        **linear("fc", WIDTH, 2 * WIDTH),
        **norms("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"),
        **under("layers.0.", full),
    }
    return config, model([delta, delta, delta, full]) | under("mtp.", predicts)


def qwen_3_next() -> tuple[dict[str, object], Shapes]:
    """With experts."""
    return qwen("Qwen3NextForCausalLM", "qwen3_next", experts=True)


def qwen_3_5() -> tuple[dict[str, object], Shapes]:
    """Without experts."""
    return qwen("Qwen3_5ForCausalLM", "qwen3_5_text", experts=False)


def falcon_h1() -> tuple[dict[str, object], Shapes]:
    """Attention and Mamba beside each other in each layer."""
    layers, heads, head, groups, state, seen = 3, 4, 32, 1, 64, 4
    inner = heads * head
    config = of_all(
        "FalconH1ForCausalLM",
        "falcon_h1",
        layers,
        head_dim=WIDE_HEAD,
        mamba_d_ssm=inner,
        mamba_n_heads=heads,
        mamba_d_head=head,
        mamba_n_groups=groups,
        mamba_d_state=state,
        mamba_d_conv=seen,
        mamba_expand=2,
        mamba_chunk_size=64,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=False,
        mlp_bias=False,
    )
    layer = {
        **norms("input_layernorm", "pre_ff_layernorm"),
        **under("self_attn.", attention(WIDE_HEAD)),
        **under(
            "mamba.",
            {
                **linear("in_proj", 2 * inner + 2 * groups * state + heads, WIDTH),
                "conv1d.weight": (inner + 2 * groups * state, 1, seen),
                "conv1d.bias": (inner + 2 * groups * state,),
                "A_log": (heads,),
                "D": (heads,),
                "dt_bias": (heads,),
                **norms("norm", size=inner),
                **linear("out_proj", WIDTH, inner),
            },
        ),
        **under("feed_forward.", gated(INNER)),
    }
    return config, model([layer] * layers, norm="final_layernorm")


def minimax_m2() -> tuple[dict[str, object], Shapes]:
    """Norms over all heads together, experts."""
    layers = 3
    config = of_all(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        layers,
        intermediate_size=OF_EXPERT,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        scoring_func="softmax",  # vLLM's router for CPUs has no sigmoid without groups
        use_routing_bias=False,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        rotary_dim=HEAD // 2,
        num_mtp_modules=0,
    )
    layer = {
        **TWO_NORMS,
        **under("self_attn.", attention()),
        **norms(HEAD_NORMS[0], size=HEADS * HEAD),
        **norms(HEAD_NORMS[1], size=KV_HEADS * HEAD),
        **linear("block_sparse_moe.gate", EXPERTS, WIDTH),
        **under("block_sparse_moe.", several_experts(("w1", "w3", "w2"))),
    }
    return config, model([layer] * layers)


def glm_4() -> tuple[dict[str, object], Shapes]:
    """Dense, with norms behind each part."""
    layers = 3
    config = of_all("Glm4ForCausalLM", "glm4", layers, partial_rotary_factor=0.5, attention_bias=True)
    qkv = attention(bias=True)
    del qkv["o_proj.bias"]
    layer = {
        **TWO_NORMS,
        **norms("post_self_attn_layernorm", "post_mlp_layernorm"),
        **under("self_attn.", qkv),
        **linear("mlp.gate_up_proj", 2 * INNER, WIDTH),
        **linear("mlp.down_proj", WIDTH, INNER),
    }
    return config, model([layer] * layers)


def mimo() -> tuple[dict[str, object], Shapes]:
    """A Qwen2 with a layer that predicts one more token, which has KV of its own."""
    layers = 3
    config = of_all("MiMoForCausalLM", "qwen2", layers, num_nextn_predict_layers=1)
    qkv = attention(bias=True)
    del qkv["o_proj.bias"]
    layer = {**TWO_NORMS, **under("self_attn.", qkv), **under("mlp.", gated(INNER))}
    predicts = {
        **layer,
        **norms("token_layernorm", "hidden_layernorm", "final_layernorm"),
        **linear("input_proj", WIDTH, 2 * WIDTH),
    }
    return config, model([layer] * layers) | under("model.mtp_layers.0.", predicts)


def llama() -> tuple[dict[str, object], Shapes]:
    """For a drafter."""
    layer = {**TWO_NORMS, **under("self_attn.", attention()), **under("mlp.", gated(INNER))}
    return of_all("LlamaForCausalLM", "llama", 3, mlp_bias=False), model([layer] * 3)


def eagle() -> tuple[dict[str, object], Shapes]:
    """A drafter of one layer for `llama`, which has KV of its own."""
    config = of_all("LlamaForCausalLM", "llama", 1, mlp_bias=False)
    layer = {
        **norms("post_attention_layernorm"),
        **under("self_attn.", attention()),
        **under("mlp.", gated(INNER)),
    }
    return config, under("layers.0.", layer) | linear("fc", WIDTH, 2 * WIDTH)


KINDS: dict[str, Callable[[], tuple[dict[str, object], Shapes]]] = {
    "gpt-oss": gpt_oss,
    "gemma-3": gemma_3,
    "gemma-4": gemma_4,
    "llama-4": llama_4,
    "qwen-3-next": qwen_3_next,
    "qwen-3.5": qwen_3_5,
    "falcon-h1": falcon_h1,
    "minimax-m2": minimax_m2,
    "glm-4": glm_4,
    "mimo": mimo,
    "llama": llama,
}
DRAFTERS = {"llama": eagle}


def write_weights(folder: Path, shapes: Shapes, seed: int) -> None:
    """Seeded noise; ones where vectors scale. States keep for long what they have seen."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=random) * SPREAD
        if name.endswith("A_log"):
            tensor = tensor - 3
        elif name.endswith(("norm.weight", "norm_hidden.weight", "norm_embedding.weight", ".D", "scalar")):
            tensor = torch.ones(shape)
        tensors[name] = tensor
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write(folder: Path, made: tuple[dict[str, object], Shapes], seed: int) -> None:
    """A model of these."""
    config, shapes = made
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder)
    write_weights(folder, shapes, seed)


def make(folder: Path, kind: str, seed: int) -> None:
    """One of them, and its drafter if it has one."""
    write(folder, KINDS[kind](), seed)
    if kind in DRAFTERS:
        write(folder / "drafter", DRAFTERS[kind](), seed + 1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="in it, each model has a folder that is called as its kind")
    parser.add_argument("kinds", nargs="+", choices=sorted(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=7)
    said = parser.parse_args()
    for kind in said.kinds:
        make(said.folder / kind, kind, said.seed)


if __name__ == "__main__":
    main()
