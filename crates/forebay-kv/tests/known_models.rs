//! Known models have their known sizes. The configs are the public ones, cut to the fields that matter here.

use forebay_kv::{AxisOrder, Cache, Geometry, Group, KvDtype, Layout, PoolShape, StateShape};

const QWEN3_CODER_30B: &str = r#"{
    "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_window_layers": 28,
    "sliding_window": null, "use_sliding_window": false, "rope_theta": 10000000}"#;

const LLAMA_31_8B: &str = r#"{
    "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0}"#;

const DEEPSEEK_V3: &str = r#"{
    "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}"#;

fn read(json: &str) -> Geometry {
    Geometry::from_hf_config(json).expect("a known model")
}

/// The group whose first layer this is.
fn group_of(geometry: &Geometry, first_layer: u32) -> &Group {
    geometry.groups().iter().find(|group| group.layers[0] == first_layer).expect("a group")
}

#[test]
fn qwen3_coder_30b_takes_96_kib_a_token() {
    let geometry = read(QWEN3_CODER_30B);
    assert_eq!(geometry.bytes_per_token(), 98_304);
    let all = Cache::KeyValue { heads: 4, head_dim: 128, dtype: KvDtype::Bfloat16, window_tokens: None };
    assert_eq!(geometry.groups(), [Group { layers: (0..48).collect(), cache: all }]);
    assert_eq!(geometry.shard(2).unwrap().bytes_per_token(), 49_152);
    // With more workers than heads each worker still holds a whole head.
    assert_eq!(geometry.shard(8).unwrap().bytes_per_token(), 24_576);
    assert!(geometry.shard(3).is_err());
}

#[test]
fn the_pool_of_the_h20_report_holds_281_888_tokens_in_25_8_gib() {
    let geometry = read(QWEN3_CODER_30B);
    let group = &geometry.groups()[0];
    let shape = PoolShape {
        layers: geometry.layers(),
        blocks: 17_618,
        heads: group.heads(),
        block_tokens: 16,
        cell_bytes: group.cell_bytes() as u32,
    };
    let pool = Layout::new(AxisOrder::Lbhnc, shape).unwrap();
    let bytes = u64::from(pool.tensors()) * pool.tensor_bytes();
    assert_eq!(bytes / geometry.bytes_per_token(), 281_888);
    assert_eq!(bytes * 10 / (1 << 30), 258);
}

#[test]
fn llama_31_8b_takes_128_kib_a_token_and_half_of_that_in_fp8() {
    assert_eq!(read(LLAMA_31_8B).bytes_per_token(), 131_072);
    let fp8 = Geometry::from_hf_config_with(LLAMA_31_8B, KvDtype::Fp8E4m3).unwrap();
    assert_eq!(fp8.bytes_per_token(), 65_536);
}

#[test]
fn without_a_number_of_kv_heads_every_head_has_its_own() {
    let config = r#"{"model_type": "llama", "torch_dtype": "float16", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32}"#;
    assert_eq!(read(config).bytes_per_token(), 524_288);
}

#[test]
fn a_checkpoint_may_ask_for_an_fp8_cache() {
    let scheme = r#""quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}"#;
    let algo = r#""quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}"#;
    for quantization in [scheme, algo] {
        let config = LLAMA_31_8B.replace(r#""model_type": "llama""#, quantization);
        assert_eq!(read(&config).bytes_per_token(), 65_536, "{quantization}");
        let asked = Geometry::from_hf_config_with(&config, KvDtype::Float16).unwrap();
        assert_eq!(asked.bytes_per_token(), 131_072, "what the engine is told wins");
    }
}

#[test]
fn deepseek_v3_keeps_one_latent_of_576_a_layer_on_every_worker() {
    let geometry = read(DEEPSEEK_V3);
    assert_eq!(geometry.bytes_per_token(), 70_272);
    assert_eq!(geometry.groups()[0].cache, Cache::Latent { width: 576, dtype: KvDtype::Bfloat16 });
    assert_eq!((geometry.groups()[0].heads(), geometry.groups()[0].cell_bytes()), (1, 1152));
    assert_eq!(geometry.shard(8).unwrap(), geometry);
}

#[test]
fn deepseek_v2_lite_keeps_the_same_latent_in_27_layers() {
    let config = r#"{"model_type": "deepseek_v2", "torch_dtype": "bfloat16", "num_hidden_layers": 27,
        "num_attention_heads": 16, "kv_lora_rank": 512, "q_lora_rank": null, "qk_rope_head_dim": 64}"#;
    assert_eq!(read(config).bytes_per_token(), 27 * 576 * 2);
}

#[test]
fn qwen2_with_its_window_switched_off_has_none() {
    let config = r#"{"model_type": "qwen2", "torch_dtype": "bfloat16", "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "sliding_window": 131072, "max_window_layers": 28,
        "use_sliding_window": false}"#;
    let geometry = read(config);
    assert_eq!(geometry.bytes_per_token(), 57_344);
    assert_eq!(geometry.groups()[0].window_tokens(), None);
    // Nor has it one when nothing is said: Qwen's classes switch it off.
    let unsaid =
        config.replace("false", "null").replace(r#""max_window_layers": 28"#, r#""max_window_layers": 20"#);
    assert_eq!(read(&unsaid), geometry);
    // Switched on, layers from max_window_layers on have one.
    let geometry = read(&unsaid.replace("null", "true"));
    assert_eq!(group_of(&geometry, 0).layers, (0..20).collect::<Vec<_>>());
    assert_eq!(group_of(&geometry, 20).window_tokens(), Some(131_072));
}

#[test]
fn mistral_7b_forgets_beyond_its_window_in_every_layer() {
    let geometry = read(
        r#"{"model_type": "mistral", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096}"#,
    );
    assert_eq!(geometry.bytes_per_token(), 131_072);
    assert_eq!(geometry.bytes_at(1000), 1000 * 131_072);
    assert_eq!(geometry.bytes_at(32_768), 4096 * 131_072);
}

#[test]
fn gemma2_9b_slides_in_every_other_layer_though_its_config_does_not_say_so() {
    let geometry = read(
        r#"{"model_type": "gemma2", "torch_dtype": "float32", "hidden_size": 3584, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096}"#,
    );
    assert_eq!(group_of(&geometry, 0).layers, (0..42).step_by(2).collect::<Vec<_>>());
    assert_eq!(group_of(&geometry, 0).window_tokens(), Some(4096));
    assert_eq!(group_of(&geometry, 1).window_tokens(), None);
    assert_eq!(geometry.bytes_per_token(), 42 * 2 * 8 * 256 * 4);
}

#[test]
fn gemma3_4b_leaves_its_heads_to_its_class_and_nests_its_text_model() {
    let geometry = read(
        r#"{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27}}"#,
    );
    assert_eq!(geometry.bytes_per_token(), 34 * 4096);
    assert_eq!(group_of(&geometry, 5).layers, [5, 11, 17, 23, 29]);
    assert_eq!(group_of(&geometry, 0).window_tokens(), Some(1024));
    assert_eq!(geometry.bytes_at(8192), (5 * 8192 + 29 * 1024) * 4096);
}

#[test]
fn gemma3_27b_says_what_differs_from_its_class() {
    let geometry = read(
        r#"{"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {"head_dim": 128, "hidden_size": 5376,
        "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
        "sliding_window": 1024}}"#,
    );
    assert_eq!(geometry.bytes_per_token(), 62 * 8192);
    assert_eq!(group_of(&geometry, 5).layers.len(), 10);
}

#[test]
fn gpt_oss_20b_lists_the_type_of_each_layer() {
    let types = ["\"sliding_attention\", \"full_attention\""; 12].join(", ");
    let config = format!(
        r#"{{"model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "layer_types": [{types}]}}"#
    );
    let geometry = read(&config);
    assert_eq!(geometry.bytes_per_token(), 49_152);
    assert_eq!(group_of(&geometry, 0).window_tokens(), Some(128));
    assert_eq!(group_of(&geometry, 1).layers, (1..24).step_by(2).collect::<Vec<_>>());
    assert_eq!(geometry.bytes_at(8192), 12 * 2048 * (8192 + 128));
}

#[test]
fn qwen3_next_attends_in_every_fourth_layer_and_keeps_states_in_the_others() {
    let geometry = read(
        r#"{"model_type": "qwen3_next", "torch_dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128}"#,
    );
    assert_eq!(group_of(&geometry, 3).layers, (3..48).step_by(4).collect::<Vec<_>>());
    assert_eq!(geometry.bytes_per_token(), 12 * 2048);
    // Per layer: 3 taps of 2 x 16 x 128 + 32 x 128 channels, and 32 x 128 x 128 elements, 2 bytes each.
    let state = 2 * (3 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * 128);
    assert_eq!(geometry.bytes_per_sequence(), 36 * state);
    assert_eq!(geometry.bytes_at(1000), 36 * state + 1000 * 12 * 2048);
    assert_eq!(geometry.shard(2).unwrap().bytes_per_sequence(), 18 * state);
}

#[test]
fn jamba_attends_in_4_of_32_layers_and_its_states_have_channels_for_heads() {
    let geometry = read(
        r#"{"model_type": "jamba", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_offset": 4, "attn_layer_period": 8,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "sliding_window": null}"#,
    );
    assert_eq!(group_of(&geometry, 4).layers, [4, 12, 20, 28]);
    assert_eq!(geometry.bytes_per_token(), 4 * 4096);
    assert_eq!(geometry.bytes_per_sequence(), 28 * 2 * (3 * 8192 + 8192 * 16));
    assert_eq!(geometry.shard(4).unwrap().bytes_per_sequence(), 7 * 2 * (3 * 8192 + 8192 * 16));
}

#[test]
fn nemotron_h_8b_has_layers_that_keep_nothing() {
    let geometry = read(
        r#"{"model_type": "nemotron_h", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "conv_kernel": 4, "mamba_head_dim": 64,
        "mamba_num_heads": 128, "n_groups": 8, "ssm_state_size": 128}"#,
    );
    assert_eq!(group_of(&geometry, 7).layers, [7, 18, 29, 40]);
    assert_eq!(group_of(&geometry, 0).layers.len(), 24);
    assert_eq!(geometry.layers(), 52);
    let state = 2 * (3 * (128 * 64 + 2 * 8 * 128) + 128 * 64 * 128);
    assert_eq!(geometry.bytes_per_sequence(), 24 * state);
}

#[test]
fn bamba_9b_says_where_it_attends_and_its_one_group_is_copied_to_every_worker() {
    let geometry = read(
        r#"{"model_type": "bamba", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_d_conv": 4,
        "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128}"#,
    );
    assert_eq!(group_of(&geometry, 9).layers, [9, 18, 27]);
    let conv = |groups: u64| 2 * 3 * (128 * 64 + 2 * groups * 128);
    assert_eq!(geometry.bytes_per_sequence(), 29 * (conv(1) + 2 * 128 * 64 * 128));
    // vLLM widens one group to one a worker: a quarter of (channels + 4 groups) each.
    assert_eq!(geometry.shard(4).unwrap().bytes_per_sequence(), 29 * (conv(4) + 2 * 128 * 64 * 128) / 4);
    assert!(geometry.shard(256).is_err(), "heads of a state are never copied");
}

#[test]
fn granite_4_tells_states_from_attention_by_name() {
    let geometry = read(
        r#"{"model_type": "granitemoehybrid", "torch_dtype": "bfloat16", "hidden_size": 1536, "num_hidden_layers": 3,
        "num_attention_heads": 12, "num_key_value_heads": 4, "layer_types": ["mamba", "attention", "mamba"],
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 48}"#,
    );
    assert_eq!((group_of(&geometry, 0).layers.len(), group_of(&geometry, 1).layers.len()), (2, 1));
}

#[test]
fn pure_state_models_take_nothing_per_token() {
    let mamba = read(
        r#"{"model_type": "mamba", "torch_dtype": "float32", "hidden_size": 768, "num_hidden_layers": 24,
        "intermediate_size": 1536, "expand": 2, "conv_kernel": 4, "state_size": 16}"#,
    );
    assert_eq!((mamba.bytes_per_token(), mamba.bytes_per_sequence()), (0, 24 * 4 * 1536 * (3 + 16)));
    let mamba2 = read(
        r#"{"model_type": "mamba2", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 64,
        "num_heads": 128, "head_dim": 64, "n_groups": 8, "expand": 2, "conv_kernel": 4, "state_size": 128}"#,
    );
    let state = 2 * (3 * (8192 + 2 * 8 * 128) + 8192 * 128);
    assert_eq!(mamba2.bytes_per_sequence(), 64 * state);
}

#[test]
fn a_recurrent_state_may_have_a_format_of_its_own_that_the_cache_does_not_change() {
    let config = r#"{"text_config": {"model_type": "qwen3_5_text", "dtype": "bfloat16", "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 1024,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"}}"#;
    let state = StateShape {
        heads: 16,
        bytes_per_head: 128 * (3 * 2 + 128 * 4),
        groups: 16,
        bytes_per_group: 2 * 128 * 3 * 2,
    };
    for geometry in [read(config), Geometry::from_hf_config_with(config, KvDtype::Fp8E5m2).unwrap()] {
        assert_eq!(group_of(&geometry, 0).cache, Cache::State(state));
    }
}

#[test]
fn groups_come_in_the_order_of_their_layers() {
    let group =
        |layers: Vec<u32>, width| Group { layers, cache: Cache::Latent { width, dtype: KvDtype::Float16 } };
    let geometry = Geometry::from_groups(4, vec![group(vec![3, 1], 1), group(vec![2, 0], 2)]).unwrap();
    assert_eq!(geometry.groups(), [group(vec![0, 2], 2), group(vec![1, 3], 1)]);
}

#[test]
fn parameters_of_attention_are_those_of_the_text_model() {
    let config = r#"{"model_type": "x", "text_config": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn",
        "factor": 4.0}, "sliding_window": null, "vocab_size": 5}}"#;
    let parameters = forebay_kv::attention_parameters(config).unwrap();
    let shown: Vec<_> = parameters.iter().map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(shown, ["rope_scaling.factor=4.0", "rope_scaling.type=\"yarn\"", "rope_theta=1000000.0"]);
}
