//! A JSON object written anew with other fields; the values of those that stay are copied as bytes.

use crate::json::{self, SyntaxError};
use bytes::Bytes;

/// An object with `more`, fields as JSON has them, and without some.
pub fn with_fields(body: &[u8], more: &str, without: &[&str]) -> Result<Bytes, SyntaxError> {
    let mut changed = Vec::with_capacity(body.len() + more.len() + 2);
    changed.push(b'{');
    changed.extend_from_slice(more.as_bytes());
    let mut is_first = more.is_empty();
    for field in json::fields(body) {
        let (key, value) = field?;
        if without.contains(&&*key) {
            continue;
        }
        if !std::mem::take(&mut is_first) {
            changed.push(b',');
        }
        changed.extend_from_slice(serde_json::Value::from(key).to_string().as_bytes());
        changed.push(b':');
        changed.extend_from_slice(&body[value.at]);
    }
    changed.push(b'}');
    Ok(changed.into())
}
