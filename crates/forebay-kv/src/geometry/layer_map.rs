//! Which kind of cache each layer of a model keeps.
//!
//! Knows the several ways in which configs spell the pattern of layers. Must never know the sizes of a cache.

use serde_json::Value;

use super::error::GeometryError;
use super::fields::Fields;
use super::{MAX_LAYERS, state};

/// What a layer keeps, if it keeps anything: layers that are only an MLP do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// KV of all tokens.
    Full,
    /// KV of the latest tokens.
    Window,
    /// A state.
    State,
}

/// One entry a layer.
pub(super) type Kinds = Vec<Option<Kind>>;

/// The kind of each layer, in order.
pub(super) fn read(config: &Fields) -> Result<Kinds, GeometryError> {
    let layers = config.count("num_hidden_layers", 1, MAX_LAYERS)?;
    for field in ["layer_types", "layers_block_type"] {
        if let Some(list) = config.list(field)? {
            return named(config, field, list, layers);
        }
    }
    if let Some(pattern) = config.text("hybrid_override_pattern")? {
        return lettered(config, pattern, layers);
    }
    let layers = layers.ok_or_else(|| config.missing("num_hidden_layers", "the number of layers"))?;
    if state::is_described(config) { with_states(config, layers) } else { attention_only(config, layers) }
}

/// A list of names, as Transformers writes it.
fn named(config: &Fields, field: &str, list: &[Value], layers: Option<u32>) -> Result<Kinds, GeometryError> {
    check_length(config, field, list.len(), layers)?;
    list.iter()
        .enumerate()
        .map(|(layer, name)| match name.as_str() {
            Some("full_attention" | "attention") => Ok(Some(Kind::Full)),
            Some("sliding_attention") => Ok(Some(Kind::Window)),
            Some("linear_attention" | "mamba") => Ok(Some(Kind::State)),
            Some("mlp" | "moe") => Ok(None),
            _ => Err(config.invalid(
                &format!("{field}[{layer}]"),
                name,
                "full_attention, attention, sliding_attention, linear_attention, mamba, mlp, moe",
            )),
        })
        .collect()
}

/// Nemotron-H's string of one letter a layer.
fn lettered(config: &Fields, pattern: &str, layers: Option<u32>) -> Result<Kinds, GeometryError> {
    let field = "hybrid_override_pattern";
    check_length(config, field, pattern.chars().count(), layers)?;
    pattern
        .chars()
        .map(|letter| match letter {
            '*' => Ok(Some(Kind::Full)),
            'M' => Ok(Some(Kind::State)),
            '-' | 'E' => Ok(None),
            _ => Err(GeometryError::invalid(config.name(field), letter, "only the letters * M - E")),
        })
        .collect()
}

fn check_length(config: &Fields, field: &str, len: usize, layers: Option<u32>) -> Result<(), GeometryError> {
    let allowed = match layers {
        Some(layers) if len == layers as usize => return Ok(()),
        Some(layers) => format!("{layers} layers, as num_hidden_layers says"),
        None if (1..=MAX_LAYERS as usize).contains(&len) => return Ok(()),
        None => format!("1 to {MAX_LAYERS} layers"),
    };
    Err(GeometryError::invalid(config.name(field), format_args!("{len} layers"), allowed))
}

/// Models with state layers: a full layer now and then (Qwen3-Next, Jamba), at given places (Bamba), or none
/// (Mamba).
fn with_states(config: &Fields, layers: u32) -> Result<Kinds, GeometryError> {
    let full_where = |is_full: &dyn Fn(u32) -> bool| {
        (0..layers).map(|layer| Some(if is_full(layer) { Kind::Full } else { Kind::State })).collect()
    };
    if let Some(interval) = config.count("full_attention_interval", 1, MAX_LAYERS)? {
        return Ok(full_where(&|layer| (layer + 1).is_multiple_of(interval)));
    }
    if let Some(period) = config.count("attn_layer_period", 1, MAX_LAYERS)? {
        let offset = config
            .count("attn_layer_offset", 0, period - 1)?
            .ok_or_else(|| config.missing("attn_layer_offset", "the first attention layer"))?;
        return Ok(full_where(&|layer| layer % period == offset));
    }
    if let Some(list) = config.list("attn_layer_indices")? {
        let places = list
            .iter()
            .map(|place| match place.as_u64().filter(|&place| place < layers.into()) {
                Some(place) => Ok(place),
                None => Err(config.invalid("attn_layer_indices", place, format!("0 to {}", layers - 1))),
            })
            .collect::<Result<Vec<_>, _>>()?;
        return Ok(full_where(&|layer| places.contains(&layer.into())));
    }
    if config.has("num_attention_heads") {
        return Err(config.missing("layer_types", "which layers attend and which keep a state"));
    }
    Ok(full_where(&|_| false))
}

/// Models of attention layers only: all full, all with a window (Mistral), or a pattern (Gemma, gpt-oss,
/// Qwen).
fn attention_only(config: &Fields, layers: u32) -> Result<Kinds, GeometryError> {
    let window_where = |has_window: &dyn Fn(u32) -> bool| {
        (0..layers).map(|layer| Some(if has_window(layer) { Kind::Window } else { Kind::Full })).collect()
    };
    let first_windowed = config.count("max_window_layers", 0, u32::MAX)?;
    // Only Qwen's configs say from which layer on, and only theirs need to be told that the window is in use.
    let in_use = config.flag("use_sliding_window")?.unwrap_or(first_windowed.is_none());
    if !in_use || config.count("sliding_window", 1, u32::MAX)?.is_none() {
        return Ok(window_where(&|_| false));
    }
    if let Some(first) = first_windowed {
        return Ok(window_where(&|layer| layer >= first));
    }
    if let Some(pattern) = config.count("sliding_window_pattern", 1, MAX_LAYERS)? {
        return Ok(window_where(&|layer| !(layer + 1).is_multiple_of(pattern)));
    }
    Ok(window_where(&|_| true))
}
