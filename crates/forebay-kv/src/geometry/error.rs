//! What can be wrong with a geometry, and the checks that say so.
//!
//! Knows how to name a field, its value and what is allowed. Must never know which fields there are.

use std::fmt;

/// Why a geometry could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GeometryError {
    /// The text is not JSON.
    #[error("the config is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A field that is needed is absent or null.
    #[error("{field} is missing; needed: {needed}")]
    Missing {
        /// The field, with the objects that it lies in: `text_config.head_dim`.
        field: String,
        /// What it should say.
        needed: &'static str,
    },
    /// A field has a value that cannot be, or that stands for something not known here.
    #[error("{field} is {value}; allowed: {allowed}")]
    Invalid {
        /// The field, with the objects that it lies in.
        field: String,
        /// Its value, cut to 80 characters.
        value: String,
        /// What it could have been.
        allowed: String,
    },
}

/// How much of a wrong value an error repeats.
const MAX_VALUE_CHARS: usize = 80;

impl GeometryError {
    pub(super) fn invalid(
        field: impl Into<String>,
        value: impl fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        let value = value.to_string();
        let value = match value.char_indices().nth(MAX_VALUE_CHARS) {
            Some((cut, _)) => format!("{}...", &value[..cut]),
            None => value,
        };
        Self::Invalid { field: field.into(), value, allowed: allowed.into() }
    }
}

pub(super) fn check_count(field: &str, value: u64, least: u64, most: u64) -> Result<(), GeometryError> {
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err(GeometryError::invalid(field, value, format!("{least} to {most}")))
    }
}
