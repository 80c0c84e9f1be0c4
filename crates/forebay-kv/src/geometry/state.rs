//! The sizes of a state layer, from the fields of the several families.
//!
//! Knows the shapes of Mamba 1, Mamba 2 and gated delta net states. Must never know which layers have one.
//!
//! The shapes are those of vLLM's `MambaStateShapeCalculator` without speculative tokens. With `t` the taps
//! of the convolution less one, a state keeps
//!
//! ```text
//! Mamba 1          conv t x channels                                   recurrent channels x state
//! Mamba 2          conv t x (heads x head_dim + 2 x groups x state)    recurrent heads x head_dim x state
//! gated delta net  conv t x (v_heads x v_dim + 2 x k_heads x k_dim)    recurrent v_heads x v_dim x k_dim
//! ```

use super::StateShape;
use super::error::GeometryError;
use super::fields::Fields;
use super::hf::{MAX_DIM, MAX_HEADS, MAX_HIDDEN};
use crate::dtype::KvDtype;

/// The most taps of a convolution.
const MAX_TAPS: u32 = 64;

/// Whether the config describes state layers at all.
pub(super) fn is_described(config: &Fields) -> bool {
    MARKS.iter().any(|(mark, _)| config.has(mark))
}

type Reader = fn(&Fields, Formats) -> Result<StateShape, GeometryError>;

/// The field that marks each family. Pure Mamba 2 and Mamba 1 share `state_size`; see [`pure_mamba`].
const MARKS: [(&str, Reader); 5] = [
    ("linear_num_value_heads", gated_delta_net),
    ("mamba_n_heads", bamba),
    ("mamba_num_heads", nemotron_h),
    ("mamba_d_state", jamba),
    ("state_size", pure_mamba),
];

/// Formats of the two parts of a state.
#[derive(Clone, Copy)]
pub(super) struct Formats {
    /// Of the convolution's inputs.
    pub(super) conv: KvDtype,
    /// Of the recurrent state.
    pub(super) recurrent: KvDtype,
}

/// The state of one layer.
pub(super) fn read(config: &Fields, formats: Formats) -> Result<StateShape, GeometryError> {
    match MARKS.iter().find(|(mark, _)| config.has(mark)) {
        Some((_, reader)) => reader(config, formats),
        None => Err(config.missing(
            "linear_num_value_heads",
            "this or another family's sizes (mamba_n_heads, mamba_num_heads, mamba_d_state, state_size)",
        )),
    }
}

fn gated_delta_net(config: &Fields, formats: Formats) -> Result<StateShape, GeometryError> {
    let value_heads = need(config, "linear_num_value_heads", MAX_HEADS)?;
    let key_heads = need(config, "linear_num_key_heads", MAX_HEADS)?;
    let value_dim = need(config, "linear_value_head_dim", MAX_DIM)?;
    let key_dim = need(config, "linear_key_head_dim", MAX_DIM)?;
    let conv_bytes = conv_bytes(config, "linear_conv_kernel_dim", formats)?;
    let recurrent_bytes = u64::from(key_dim) * formats.recurrent.bytes();
    Ok(StateShape {
        heads: value_heads,
        bytes_per_head: u64::from(value_dim) * (conv_bytes + recurrent_bytes),
        groups: key_heads,
        bytes_per_group: 2 * u64::from(key_dim) * conv_bytes,
    })
}

fn bamba(config: &Fields, formats: Formats) -> Result<StateShape, GeometryError> {
    let heads = need(config, "mamba_n_heads", MAX_HEADS)?;
    let head_dim = match config.get("mamba_d_head").filter(|value| value.as_str() != Some("auto")) {
        Some(_) => need(config, "mamba_d_head", MAX_DIM)?,
        None => divided(config, channels(config, "mamba_expand")?, "mamba_n_heads", heads)?,
    };
    let groups = need(config, "mamba_n_groups", MAX_HEADS)?;
    let state = need(config, "mamba_d_state", MAX_DIM)?;
    let conv_bytes = conv_bytes(config, "mamba_d_conv", formats)?;
    Ok(mamba2(heads, head_dim, groups, state, conv_bytes, formats))
}

fn nemotron_h(config: &Fields, formats: Formats) -> Result<StateShape, GeometryError> {
    let heads = need(config, "mamba_num_heads", MAX_HEADS)?;
    let head_dim = need(config, "mamba_head_dim", MAX_DIM)?;
    let groups = need(config, "n_groups", MAX_HEADS)?;
    let state = need(config, "ssm_state_size", MAX_DIM)?;
    let conv_bytes = conv_bytes(config, "conv_kernel", formats)?;
    Ok(mamba2(heads, head_dim, groups, state, conv_bytes, formats))
}

fn jamba(config: &Fields, formats: Formats) -> Result<StateShape, GeometryError> {
    let state = need(config, "mamba_d_state", MAX_DIM)?;
    let conv_bytes = conv_bytes(config, "mamba_d_conv", formats)?;
    Ok(mamba1(channels(config, "mamba_expand")?, state, conv_bytes, formats))
}

/// Mamba 2 has heads, Mamba 1 has not.
fn pure_mamba(config: &Fields, formats: Formats) -> Result<StateShape, GeometryError> {
    let state = need(config, "state_size", MAX_DIM)?;
    let conv_bytes = conv_bytes(config, "conv_kernel", formats)?;
    let Some(heads) = config.count("num_heads", 1, MAX_HEADS)? else {
        let channels = match config.count("intermediate_size", 1, MAX_HIDDEN)? {
            Some(channels) => channels,
            None => channels(config, "expand")?,
        };
        return Ok(mamba1(channels, state, conv_bytes, formats));
    };
    let head_dim = need(config, "head_dim", MAX_DIM)?;
    let groups = need(config, "n_groups", MAX_HEADS)?;
    Ok(mamba2(heads, head_dim, groups, state, conv_bytes, formats))
}

fn mamba1(channels: u32, state: u32, conv_bytes: u64, formats: Formats) -> StateShape {
    let bytes_per_head = conv_bytes + u64::from(state) * formats.recurrent.bytes();
    StateShape { heads: channels, bytes_per_head, groups: 0, bytes_per_group: 0 }
}

fn mamba2(
    heads: u32,
    head_dim: u32,
    groups: u32,
    state: u32,
    conv_bytes: u64,
    formats: Formats,
) -> StateShape {
    let recurrent_bytes = u64::from(state) * formats.recurrent.bytes();
    StateShape {
        heads,
        bytes_per_head: u64::from(head_dim) * (conv_bytes + recurrent_bytes),
        groups,
        bytes_per_group: 2 * u64::from(state) * conv_bytes,
    }
}

/// Bytes that the convolution keeps for one of its channels: all taps but the newest.
fn conv_bytes(config: &Fields, field: &str, formats: Formats) -> Result<u64, GeometryError> {
    Ok(u64::from(need(config, field, MAX_TAPS)? - 1) * formats.conv.bytes())
}

/// The channels of a Mamba layer: a multiple of the hidden size.
fn channels(config: &Fields, expand_field: &str) -> Result<u32, GeometryError> {
    let expand = need(config, expand_field, MAX_DIM)?;
    let hidden = need(config, "hidden_size", MAX_HIDDEN)?;
    match expand.checked_mul(hidden) {
        Some(channels) if channels <= MAX_HIDDEN => Ok(channels),
        _ => {
            let allowed = format!("up to {} for a hidden_size of {hidden}", MAX_HIDDEN / hidden);
            Err(GeometryError::invalid(config.name(expand_field), expand, allowed))
        }
    }
}

fn divided(config: &Fields, channels: u32, field: &str, heads: u32) -> Result<u32, GeometryError> {
    if channels.is_multiple_of(heads) {
        Ok(channels / heads)
    } else {
        Err(GeometryError::invalid(
            config.name(field),
            heads,
            format!("a divisor of the {channels} channels"),
        ))
    }
}

fn need(config: &Fields, field: &str, most: u32) -> Result<u32, GeometryError> {
    config.count(field, 1, most)?.ok_or_else(|| config.missing(field, "a size of the state layers"))
}
