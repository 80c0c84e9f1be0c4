//! Guarantees of the config reader: it never panics, and what it refuses it names with what is allowed.

use forebay_kv::{Cache, Geometry, Group, KvDtype, MAX_BYTES_PER_TOKEN, MAX_STATE_BYTES, StateShape};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn plain() -> Value {
    json!({
        "model_type": "llama", "dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8
    })
}

fn states() -> Value {
    json!({
        "model_type": "qwen3_next", "dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128
    })
}

/// The config with some fields replaced, null meaning removed.
fn with(mut config: Value, fields: Value) -> String {
    for (field, value) in fields.as_object().expect("an object") {
        config[field] = value.clone();
    }
    config.to_string()
}

fn error(config: &str) -> String {
    Geometry::from_hf_config(config).expect_err("an impossible config").to_string()
}

#[test]
fn what_is_refused_is_named_with_its_value_and_what_is_allowed() {
    for (fields, expected) in [
        (json!({"num_hidden_layers": 0}), "num_hidden_layers is 0; allowed: 1 to 4096"),
        (json!({"num_hidden_layers": 4097}), "num_hidden_layers is 4097; allowed: 1 to 4096"),
        (json!({"num_hidden_layers": null}), "num_hidden_layers is missing; needed: the number of layers"),
        (json!({"num_attention_heads": 0}), "num_attention_heads is 0; allowed: 1 to 65536"),
        (json!({"num_attention_heads": -8}), "num_attention_heads is -8; allowed: 1 to 65536"),
        (json!({"num_attention_heads": 2.5}), "num_attention_heads is 2.5; allowed: 1 to 65536"),
        (json!({"num_attention_heads": "32"}), "num_attention_heads is \"32\"; allowed: 1 to 65536"),
        (
            json!({"num_attention_heads": null}),
            "num_attention_heads is missing; needed: the number of query heads",
        ),
        (
            json!({"num_key_value_heads": 5}),
            "num_key_value_heads is 5; allowed: a divisor of num_attention_heads, 32",
        ),
        (json!({"num_key_value_heads": [1, 2]}), "num_key_value_heads is [1,2]; allowed: 1 to 65536"),
        (
            json!({"hidden_size": 4100}),
            "hidden_size is 4100; allowed: a multiple of num_attention_heads, 32, where there is no head_dim",
        ),
        (
            json!({"hidden_size": null}),
            "head_dim is missing; needed: this, or hidden_size to divide by num_attention_heads",
        ),
        (json!({"head_dim": 0}), "head_dim is 0; allowed: 1 to 65536"),
        (json!({"head_dim": 1e30}), "head_dim is 1e+30; allowed: 1 to 65536"),
        (json!({"head_dim": u64::MAX}), "head_dim is 18446744073709551615; allowed: 1 to 65536"),
        (
            json!({"v_head_dim": 64}),
            "v_head_dim is 64; allowed: 128, like a key: values of another size are not known here",
        ),
        (
            json!({"num_attention_heads": 65536, "num_key_value_heads": 65536, "head_dim": 65536}),
            "bytes per token is 68719476736; allowed: 0 to 1073741824",
        ),
        (json!({"dtype": null}), "dtype is missing; needed: this or torch_dtype, the format of the weights"),
        (json!({"dtype": 16}), "dtype is 16; allowed: a string"),
        (json!({"sliding_window": 0}), "sliding_window is 0; allowed: 1 to 4294967295"),
        (
            json!({"sliding_window": 64, "use_sliding_window": 1}),
            "use_sliding_window is 1; allowed: true or false",
        ),
        (
            json!({"sliding_window": 64, "sliding_window_pattern": 0}),
            "sliding_window_pattern is 0; allowed: 1 to 4096",
        ),
        (json!({"layer_types": "full"}), "layer_types is \"full\"; allowed: a list"),
        (
            json!({"layer_types": ["full_attention"]}),
            "layer_types is 1 layers; allowed: 4 layers, as num_hidden_layers says",
        ),
        (
            json!({"layer_types": vec!["sliding_attention"; 4]}),
            "sliding_window is missing; needed: the window in tokens",
        ),
        (
            json!({"hybrid_override_pattern": "M*x-"}),
            "hybrid_override_pattern is x; allowed: only the letters * M - E",
        ),
        (json!({"kv_lora_rank": 512}), "qk_rope_head_dim is missing; needed: the rotary part of the latent"),
        (
            json!({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "sliding_window": 64}),
            "kv_lora_rank is 512; allowed: absent in layers with a window",
        ),
        (
            json!({"attention_chunk_size": 8192}),
            "attention_chunk_size is 8192; allowed: absent, for it means chunked attention, whose geometry is not \
             known here",
        ),
        (
            json!({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}}),
            "quantization_config.kv_cache_scheme is {\"num_bits\":4,\"type\":\"int\"}; allowed: type float with num_bits 8",
        ),
        (
            json!({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}),
            "quantization_config.kv_cache_quant_algo is NVFP4; allowed: FP8",
        ),
        (
            json!({"text_config": {"num_hidden_layers": 0}}),
            "text_config.num_hidden_layers is 0; allowed: 1 to 4096",
        ),
    ] {
        assert_eq!(error(&with(plain(), fields.clone())), expected, "{fields}");
    }
}

#[test]
fn an_impossible_state_is_named_too() {
    for (fields, expected) in [
        (json!({"linear_conv_kernel_dim": 0}), "linear_conv_kernel_dim is 0; allowed: 1 to 64"),
        (
            json!({"linear_key_head_dim": null}),
            "linear_key_head_dim is missing; needed: a size of the state layers",
        ),
        (json!({"full_attention_interval": 0}), "full_attention_interval is 0; allowed: 1 to 4096"),
        (
            json!({"full_attention_interval": null}),
            "layer_types is missing; needed: which layers attend and which keep a state",
        ),
        (
            json!({"full_attention_interval": null, "attn_layer_period": 4, "attn_layer_offset": 4}),
            "attn_layer_offset is 4; allowed: 0 to 3",
        ),
        (
            json!({"full_attention_interval": null, "attn_layer_indices": [1, 8]}),
            "attn_layer_indices is 8; allowed: 0 to 7",
        ),
        (
            json!({"linear_num_value_heads": 65536, "linear_value_head_dim": 65536, "linear_key_head_dim": 65536}),
            "bytes per sequence is 3377854414848000; allowed: 0 to 1099511627776",
        ),
        (
            json!({"linear_num_value_heads": null, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2000}),
            "mamba_expand is 2000; allowed: up to 512 for a hidden_size of 2048",
        ),
        (
            json!({"linear_num_value_heads": null, "mamba_n_heads": 48, "mamba_expand": 2}),
            "mamba_n_heads is 48; allowed: a divisor of the 4096 channels",
        ),
    ] {
        assert_eq!(error(&with(states(), fields.clone())), expected, "{fields}");
    }
    let unsized_states = with(plain(), json!({"layer_types": vec!["linear_attention"; 4]}));
    assert!(
        error(&unsized_states)
            .starts_with("linear_num_value_heads is missing; needed: this or another family's")
    );
}

#[test]
fn a_long_value_is_cut_in_the_message() {
    let message = error(&with(plain(), json!({"dtype": "é".repeat(10_000)})));
    assert!(message.contains(&format!("{}...", "é".repeat(80))), "{message}");
    assert!(message.len() < 500);
}

#[test]
fn what_is_not_an_object_is_refused() {
    assert!(error("").starts_with("the config is not JSON"));
    assert!(error("{\"a\": 1").starts_with("the config is not JSON"));
    assert!(error("version https://git-lfs.github.com/spec/v1").starts_with("the config is not JSON"));
    assert!(error(&"[".repeat(100_000)).starts_with("the config is not JSON"));
    assert_eq!(error("[1,2]"), "the config is [1,2]; allowed: an object");
    assert_eq!(error("null"), "the config is null; allowed: an object");
}

#[test]
fn fields_that_are_switched_off_do_not_refuse_a_model() {
    let config = with(
        plain(),
        json!({"is_encoder_decoder": false, "num_kv_shared_layers": 0, "cross_attention_layers": [],
               "attention_chunk_size": null}),
    );
    assert!(Geometry::from_hf_config(&config).is_ok());
}

#[test]
fn groups_that_contradict_each_other_are_refused() {
    let cache = Cache::KeyValue { heads: 8, head_dim: 128, dtype: KvDtype::Float16, window_tokens: None };
    let group = |layers: Vec<u32>| Group { layers, cache };
    let error = |layers, groups| Geometry::from_groups(layers, groups).unwrap_err().to_string();
    assert_eq!(error(0, vec![]), "layers is 0; allowed: 1 to 4096");
    assert_eq!(error(2, vec![group(vec![])]), "layers of a group is 0; allowed: 1 to 2");
    assert_eq!(error(2, vec![group(vec![2])]), "a layer of a group is 2; allowed: 0 to 1");
    assert_eq!(
        error(2, vec![group(vec![0, 1]), group(vec![1])]),
        "a layer of a group is 1; allowed: layers of no other group"
    );
    let no_window =
        Cache::KeyValue { heads: 8, head_dim: 128, dtype: KvDtype::Float16, window_tokens: Some(0) };
    assert!(error(1, vec![Group { layers: vec![0], cache: no_window }]).starts_with("window_tokens is 0"));
    let huge =
        Cache::KeyValue { heads: u32::MAX, head_dim: u32::MAX, dtype: KvDtype::Float32, window_tokens: None };
    assert!(error(1, vec![Group { layers: vec![0], cache: huge }]).starts_with("bytes per token is"));
    let huge = StateShape { heads: 2, bytes_per_head: u64::MAX, groups: 2, bytes_per_group: u64::MAX };
    assert!(
        error(1, vec![Group { layers: vec![0], cache: Cache::State(huge) }])
            .starts_with("bytes per sequence is")
    );
}

/// Names that the reader looks at, so that arbitrary objects reach deep into it.
const FIELDS: [&str; 38] = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "dtype",
    "torch_dtype",
    "model_type",
    "text_config",
    "thinker_config",
    "quantization_config",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "full_attention_interval",
    "attn_layer_period",
    "attn_layer_offset",
    "attn_layer_indices",
    "linear_num_value_heads",
    "linear_conv_kernel_dim",
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_num_heads",
    "state_size",
    "conv_kernel",
    "num_heads",
];

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0u32..70).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![
            "bfloat16",
            "fp8",
            "gemma3_text",
            "full_attention",
            "sliding_attention",
            "mamba",
            "auto",
            "FP8",
            "M*-E",
        ])
        .prop_map(Value::from),
        ".*".prop_map(Value::from),
    ]
}

fn field_name() -> impl Strategy<Value = String> {
    prop_oneof![8 => prop::sample::select(FIELDS.to_vec()).prop_map(str::to_owned), 1 => "[a-z_]{0,8}"]
}

fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(3, 64, 16, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            object(inner).prop_map(Value::from),
        ]
    })
}

fn object(inner: impl Strategy<Value = Value>) -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::vec((field_name(), inner), 0..20).prop_map(Map::from_iter)
}

/// What holds for every geometry that the reader returns.
fn check(config: &str) -> Result<(), TestCaseError> {
    let Ok(geometry) = Geometry::from_hf_config(config) else { return Ok(()) };
    prop_assert!(geometry.bytes_per_token() <= MAX_BYTES_PER_TOKEN);
    prop_assert!(geometry.bytes_per_sequence() <= MAX_STATE_BYTES);
    let mut layers: Vec<u32> = geometry.groups().iter().flat_map(|group| group.layers.clone()).collect();
    layers.sort_unstable();
    layers.dedup();
    prop_assert_eq!(layers.len(), geometry.groups().iter().map(|group| group.layers.len()).sum::<usize>());
    prop_assert!(layers.iter().all(|&layer| layer < geometry.layers()));
    prop_assert!(geometry.bytes_at(u32::MAX) >= geometry.bytes_per_sequence());
    if let Ok(shard) = geometry.shard(2) {
        prop_assert!(shard.bytes_per_token() * 2 >= geometry.bytes_per_token());
    }
    Ok(())
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in ".*") {
        check(&text)?;
        let _ = forebay_kv::attention_parameters(&text);
    }

    #[test]
    fn arbitrary_objects_never_panic(config in object(value())) {
        let text = Value::from(config).to_string();
        check(&text)?;
        let _ = forebay_kv::attention_parameters(&text);
    }

    #[test]
    fn a_good_config_with_a_few_fields_changed_never_panics(
        base in prop::sample::select(vec![plain(), states()]),
        changes in prop::collection::vec((field_name(), value()), 1..4),
    ) {
        check(&with(base, Value::from(Map::from_iter(changes))))?;
    }
}
