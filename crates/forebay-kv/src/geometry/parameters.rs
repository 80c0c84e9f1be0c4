//! The parameters of a model's config that change KV without changing its size.
//!
//! Knows which fields shape attention and rotary embeddings, and one way to write their values as text. Must
//! never know how a namespace is digested.

use std::collections::BTreeMap;

use serde_json::Value;

use super::error::GeometryError;
use super::hf;

/// Fields whose values enter a namespace. A field that is missing here would let KV of two settings mix; one
/// too many costs a miss after a change that did not matter.
const FIELDS: [&str; 24] = [
    "alibi",
    "attention_bias",
    "attn_logit_softcapping",
    "attn_temperature_tuning",
    "head_dim",
    "kv_lora_rank",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "no_rope_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "position_embedding_type",
    "qk_layernorm",
    "qk_rope_head_dim",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "sliding_window_pattern",
    "use_qk_norm",
    "use_sliding_window",
];

/// The rotary and attention parameters of a `config.json`, for
/// [`Namespace::attention`](crate::Namespace::attention).
///
/// Nested fields get dotted names. Pass the config as the engine runs it, overrides included.
///
/// ```
/// let config = r#"{"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}"#;
/// let parameters = forebay_kv::attention_parameters(config)?;
/// assert_eq!(parameters["rope_theta"], "500000.0");
/// assert_eq!(parameters["rope_scaling.factor"], "8.0");
/// # Ok::<(), forebay_kv::GeometryError>(())
/// ```
///
/// # Errors
/// When the text is not a JSON object.
pub fn attention_parameters(json: &str) -> Result<BTreeMap<String, String>, GeometryError> {
    let value: Value = serde_json::from_str(json)?;
    let config = hf::language_model(&value)?;
    let mut parameters = BTreeMap::new();
    for field in FIELDS {
        if let Some(value) = config.get(field) {
            flatten(field.to_owned(), value, &mut parameters);
        }
    }
    Ok(parameters)
}

/// Writes an object's fields one by one, so that their order in the file does not matter.
fn flatten(name: String, value: &Value, parameters: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(field, value)| flatten(format!("{name}.{field}"), value, parameters));
        }
        other => {
            parameters.insert(name, other.to_string());
        }
    }
}
