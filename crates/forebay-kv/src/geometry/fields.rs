//! Typed access to the fields of a JSON object, with errors that name them.
//!
//! Knows JSON and the path to an object. Must never know what any field means.

use serde_json::{Map, Value};

use super::error::GeometryError;
use crate::dtype::KvDtype;

/// An object of a config, and the way to it. A null field counts as absent.
pub(super) struct Fields<'a> {
    path: String,
    map: &'a Map<String, Value>,
    /// Counts to read where the object has none.
    defaults: &'static [(&'static str, u32)],
}

impl<'a> Fields<'a> {
    pub(super) fn root(value: &'a Value) -> Result<Self, GeometryError> {
        match value {
            Value::Object(map) => Ok(Self { path: String::new(), map, defaults: &[] }),
            other => Err(GeometryError::invalid("the config", other, "an object")),
        }
    }

    pub(super) fn with_defaults(self, defaults: &'static [(&'static str, u32)]) -> Self {
        Self { defaults, ..self }
    }

    /// The field's full name, for messages.
    pub(super) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub(super) fn has(&self, field: &str) -> bool {
        self.get(field).is_some()
    }

    pub(super) fn object(&self, field: &str) -> Option<Fields<'a>> {
        let map = self.get(field)?.as_object()?;
        Some(Fields { path: format!("{}{field}.", self.path), map, defaults: &[] })
    }

    pub(super) fn missing(&self, field: &str, needed: &'static str) -> GeometryError {
        GeometryError::Missing { field: self.name(field), needed }
    }

    pub(super) fn invalid(&self, field: &str, value: &Value, allowed: impl Into<String>) -> GeometryError {
        GeometryError::invalid(self.name(field), value, allowed)
    }

    /// A whole number from `least` to `most`, or the default.
    pub(super) fn count(&self, field: &str, least: u32, most: u32) -> Result<Option<u32>, GeometryError> {
        let Some(value) = self.get(field) else {
            return Ok(self.defaults.iter().find(|(name, _)| *name == field).map(|(_, count)| *count));
        };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        match number.filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.invalid(field, value, format!("{least} to {most}"))),
        }
    }

    pub(super) fn flag(&self, field: &str) -> Result<Option<bool>, GeometryError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.invalid(field, value, "true or false"))
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>, GeometryError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.invalid(field, value, "a string"))
    }

    pub(super) fn dtype(&self, field: &str) -> Result<Option<KvDtype>, GeometryError> {
        let Some(name) = self.text(field)? else { return Ok(None) };
        name.parse().map(Some).map_err(|_| GeometryError::invalid(self.name(field), name, KvDtype::SPELLINGS))
    }

    pub(super) fn list(&self, field: &str) -> Result<Option<&'a [Value]>, GeometryError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_array().map(|list| Some(list.as_slice())).ok_or_else(|| self.invalid(field, value, "a list"))
    }
}
