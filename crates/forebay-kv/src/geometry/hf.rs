//! Reads a geometry from a Hugging Face `config.json`.
//!
//! Knows where configs keep the sizes of attention layers and the format of the cache. Must never know how
//! the layers alternate (`layer_map`) or what is in a state (`state`).

use serde_json::Value;

use super::error::GeometryError;
use super::fields::Fields;
use super::layer_map::Kind;
use super::{Cache, Geometry, Group, layer_map, state};
use crate::dtype::KvDtype;

/// The most heads of any sort.
pub(super) const MAX_HEADS: u32 = 1 << 16;
/// The most elements of a head, a latent part or a state.
pub(super) const MAX_DIM: u32 = 1 << 16;
/// The largest hidden size, and the most channels of a state layer.
pub(super) const MAX_HIDDEN: u32 = 1 << 20;

/// Objects in which multimodal models keep the config of their language model.
const LANGUAGE_MODELS: [&str; 4] = ["text_config", "llm_config", "language_config", "thinker_config"];

/// Fields of models whose cache has a shape that is not known here: they are refused, not misread.
const UNKNOWN_CACHES: [(&str, &str); 15] = [
    ("attention_chunk_size", "chunked attention"),
    ("attn_type_list", "lightning attention"),
    ("block_configs", "heads that differ by layer"),
    ("compress_rates", "compressed attention"),
    ("compress_ratios", "compressed attention"),
    ("cross_attention_layers", "cross attention"),
    ("global_head_dim", "heads that differ by layer"),
    ("index_head_dim", "an indexer's keys"),
    ("indexer_head_dim", "an indexer's keys"),
    ("is_encoder_decoder", "cross attention"),
    ("kv_source_layers", "layers that share a cache"),
    ("linear_attn_config", "Kimi delta attention"),
    ("multi_query", "multi-query attention by flag"),
    ("num_kv_shared_layers", "layers that share a cache"),
    ("swa_num_key_value_heads", "heads that differ by layer"),
];

/// Values that published configs leave out because the model's class has them, from Transformers 5.23.
const CLASS_DEFAULTS: [(&str, &[(&str, u32)]); 3] = [
    ("gemma2", &[("sliding_window_pattern", 2)]),
    ("gpt_oss", &[("sliding_window_pattern", 2)]),
    (
        "gemma3_text",
        &[
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("sliding_window", 4096),
            ("sliding_window_pattern", 6),
        ],
    ),
];

pub(super) fn read(json: &str, cache_dtype: Option<KvDtype>) -> Result<Geometry, GeometryError> {
    let value: Value = serde_json::from_str(json)?;
    let outer = Fields::root(&value)?;
    let config = language_model(&value)?;
    refuse_unknown_caches(&config)?;
    let kinds = layer_map::read(&config)?;
    let formats = Formats { inner: &config, outer: &outer, cache: cache_dtype };
    let mut groups = Vec::new();
    for kind in [Kind::Full, Kind::Window, Kind::State] {
        let layers: Vec<u32> = (0..)
            .zip(&kinds)
            .filter(|(_, of_layer)| **of_layer == Some(kind))
            .map(|(layer, _)| layer)
            .collect();
        if !layers.is_empty() {
            groups.push(Group { layers, cache: cache_of(kind, &config, &formats)? });
        }
    }
    Geometry::from_groups(kinds.len() as u32, groups)
}

/// The config of the language model, which may lie in other objects.
pub(super) fn language_model(value: &Value) -> Result<Fields<'_>, GeometryError> {
    let mut config = Fields::root(value)?;
    while let Some(inner) = LANGUAGE_MODELS.iter().find_map(|field| config.object(field)) {
        config = inner;
    }
    let class = config.text("model_type")?;
    let defaults = CLASS_DEFAULTS.iter().find(|(name, _)| class == Some(name));
    Ok(config.with_defaults(defaults.map_or(&[], |(_, defaults)| defaults)))
}

fn refuse_unknown_caches(config: &Fields) -> Result<(), GeometryError> {
    for (field, cache) in UNKNOWN_CACHES {
        let Some(value) = config.get(field) else { continue };
        let is_off = match value {
            Value::Bool(on) => !on,
            Value::Number(number) => number.as_u64() == Some(0),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        if !is_off {
            let allowed = format!("absent, for it means {cache}, whose geometry is not known here");
            return Err(config.invalid(field, value, allowed));
        }
    }
    Ok(())
}

fn cache_of(kind: Kind, config: &Fields, formats: &Formats) -> Result<Cache, GeometryError> {
    match kind {
        Kind::State => Ok(Cache::State(state::read(config, formats.state()?)?)),
        Kind::Window => {
            let window = config.count("sliding_window", 1, u32::MAX)?;
            let window = window.ok_or_else(|| config.missing("sliding_window", "the window in tokens"))?;
            attention(config, Some(window), formats.cache()?)
        }
        Kind::Full => attention(config, None, formats.cache()?),
    }
}

fn attention(config: &Fields, window: Option<u32>, dtype: KvDtype) -> Result<Cache, GeometryError> {
    match (config.count("kv_lora_rank", 1, MAX_DIM)?, window) {
        (None, window_tokens) => key_value(config, window_tokens, dtype),
        (Some(rank), None) => {
            let rope = config.count("qk_rope_head_dim", 0, MAX_DIM)?;
            let rope =
                rope.ok_or_else(|| config.missing("qk_rope_head_dim", "the rotary part of the latent"))?;
            Ok(Cache::Latent { width: rank + rope, dtype })
        }
        (Some(rank), Some(_)) => {
            Err(GeometryError::invalid(config.name("kv_lora_rank"), rank, "absent in layers with a window"))
        }
    }
}

fn key_value(config: &Fields, window_tokens: Option<u32>, dtype: KvDtype) -> Result<Cache, GeometryError> {
    let query_heads = config
        .count("num_attention_heads", 1, MAX_HEADS)?
        .ok_or_else(|| config.missing("num_attention_heads", "the number of query heads"))?;
    let heads = config.count("num_key_value_heads", 1, MAX_HEADS)?.unwrap_or(query_heads);
    if !query_heads.is_multiple_of(heads) {
        let allowed = format!("a divisor of num_attention_heads, {query_heads}");
        return Err(GeometryError::invalid(config.name("num_key_value_heads"), heads, allowed));
    }
    let head_dim = match config.count("head_dim", 1, MAX_DIM)? {
        Some(head_dim) => head_dim,
        None => hidden_per_head(config, query_heads)?,
    };
    match config.count("v_head_dim", 1, MAX_DIM)? {
        Some(value_dim) if value_dim != head_dim => {
            let allowed = format!("{head_dim}, like a key: values of another size are not known here");
            Err(GeometryError::invalid(config.name("v_head_dim"), value_dim, allowed))
        }
        _ => Ok(Cache::KeyValue { heads, head_dim, dtype, window_tokens }),
    }
}

fn hidden_per_head(config: &Fields, query_heads: u32) -> Result<u32, GeometryError> {
    let hidden = config
        .count("hidden_size", 1, MAX_HIDDEN)?
        .ok_or_else(|| config.missing("head_dim", "this, or hidden_size to divide by num_attention_heads"))?;
    if hidden.is_multiple_of(query_heads) {
        Ok(hidden / query_heads)
    } else {
        let allowed = format!("a multiple of num_attention_heads, {query_heads}, where there is no head_dim");
        Err(GeometryError::invalid(config.name("hidden_size"), hidden, allowed))
    }
}

/// The formats that a config states, in the language model's own object or else in the outermost.
struct Formats<'a> {
    inner: &'a Fields<'a>,
    outer: &'a Fields<'a>,
    /// What the engine was told to use for keys and values.
    cache: Option<KvDtype>,
}

impl Formats<'_> {
    fn objects(&self) -> [&Fields<'_>; 2] {
        [self.inner, self.outer]
    }

    /// Of keys, values and latents.
    fn cache(&self) -> Result<KvDtype, GeometryError> {
        if let Some(dtype) = self.cache {
            return Ok(dtype);
        }
        for object in self.objects() {
            if let Some(quantization) = object.object("quantization_config")
                && let Some(dtype) = quantized(&quantization)?
            {
                return Ok(dtype);
            }
        }
        self.weights()
    }

    /// Of states, which vLLM keeps in the weights' format unless the config says otherwise of the recurrent
    /// part.
    fn state(&self) -> Result<state::Formats, GeometryError> {
        let conv = self.weights()?;
        let recurrent = match self.inner.dtype("mamba_ssm_cache_dtype")? {
            Some(dtype) => Some(dtype),
            None => self.inner.dtype("mamba_ssm_dtype")?,
        };
        Ok(state::Formats { conv, recurrent: recurrent.unwrap_or(conv) })
    }

    fn weights(&self) -> Result<KvDtype, GeometryError> {
        for object in self.objects() {
            for field in ["dtype", "torch_dtype"] {
                if let Some(dtype) = object.dtype(field)? {
                    return Ok(dtype);
                }
            }
        }
        Err(self.inner.missing("dtype", "this or torch_dtype, the format of the weights"))
    }
}

/// The format that a quantized checkpoint wants its cache in: by compressed-tensors' scheme or by ModelOpt's
/// name.
fn quantized(config: &Fields) -> Result<Option<KvDtype>, GeometryError> {
    if let Some(scheme) = config.object("kv_cache_scheme") {
        return match (scheme.text("type")?, scheme.count("num_bits", 1, 64)?) {
            (Some("float"), Some(8)) => Ok(Some(KvDtype::Fp8E4m3)),
            _ => {
                let value = config.get("kv_cache_scheme").unwrap_or(&Value::Null);
                Err(config.invalid("kv_cache_scheme", value, "type float with num_bits 8"))
            }
        };
    }
    match config.text("kv_cache_quant_algo")? {
        None => Ok(None),
        Some("FP8") => Ok(Some(KvDtype::Fp8E4m3)),
        Some(other) => Err(GeometryError::invalid(config.name("kv_cache_quant_algo"), other, "FP8")),
    }
}
