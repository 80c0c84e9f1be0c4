//! Names of chunks as Python has them: ids, and the namespaces that they follow from. This file
//! turns Python's objects into `forebay-kv`'s.

use crate::errors::invalid;
use forebay_kv::{ChunkId, Digest, Namespace, NamespaceKey, Rank};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::collections::BTreeMap;
use std::fmt::Display;

/// The fields of a namespace: all must be there, and no other.
const FIELDS: [&str; 9] =
    ["weights", "dtype", "order", "block_tokens", "tp", "pp", "attention", "lora", "salt"];

/// A chunk's id: 32 bytes.
pub fn id(value: &Bound<'_, PyAny>) -> PyResult<ChunkId> {
    thirty_two("a chunk's id", value).map(ChunkId::from_bytes)
}

fn thirty_two(name: &str, value: &Bound<'_, PyAny>) -> PyResult<[u8; 32]> {
    let bytes = value.cast::<PyBytes>().map_err(|_| invalid(format!("{name} is bytes")))?.as_bytes();
    let wrong = |_| invalid(format!("{name} has {} bytes; allowed: 32", bytes.len()));
    bytes.try_into().map_err(wrong)
}

/// Tokens as engines number them.
pub fn tokens(values: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    values.extract().or_else(|error| {
        let wrong = values.try_iter()?.flatten().find(|token| token.extract::<u32>().is_err());
        Err(wrong.map_or(error, |wrong| invalid(format!("a token is {wrong}; allowed: 0 to {}", u32::MAX))))
    })
}

/// Ids in their order.
pub fn ids(values: &Bound<'_, PyAny>) -> PyResult<Vec<ChunkId>> {
    values.try_iter()?.map(|value| id(&value?)).collect()
}

/// The ids of the whole chunks of a sequence of tokens, under the key of a namespace of 32 bytes.
/// With `parent` the tokens go on behind that chunk; with `tail` what is left at the end has an id
/// too.
#[pyfunction]
#[pyo3(signature = (namespace, tokens, chunk_tokens, *, parent = None, tail = false))]
pub fn chunk_ids<'py>(
    py: Python<'py>,
    namespace: &Bound<'py, PyAny>,
    tokens: &Bound<'py, PyAny>,
    chunk_tokens: usize,
    parent: Option<&Bound<'py, PyAny>>,
    tail: bool,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    if chunk_tokens == 0 {
        return Err(invalid("chunk_tokens is 0; allowed: 1 or more"));
    }
    let namespace = NamespaceKey::from_bytes(thirty_two("the key of a namespace", namespace)?);
    let (tokens, mut last) = (self::tokens(tokens)?, parent.map(id).transpose()?);
    let mut ids = Vec::with_capacity(tokens.len() / chunk_tokens + 1);
    for chunk in tokens.chunks(chunk_tokens).filter(|chunk| tail || chunk.len() == chunk_tokens) {
        let id = ChunkId::derive(&namespace, last.as_ref(), chunk);
        ids.push(PyBytes::new(py, id.as_bytes()));
        last = Some(id);
    }
    Ok(ids)
}

/// The key of a namespace: of all that KV depends on besides the tokens.
#[pyfunction]
pub fn namespace_key<'py>(fields: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyBytes>> {
    Ok(PyBytes::new(fields.py(), namespace(fields)?.key().as_bytes()))
}

/// A namespace of its fields.
pub fn namespace(fields: &Bound<'_, PyDict>) -> PyResult<Namespace> {
    for name in fields.keys() {
        let name: String = name.extract()?;
        if !FIELDS.contains(&name.as_str()) {
            return Err(invalid(format!("namespace has a field {name}; allowed: {}", FIELDS.join(", "))));
        }
    }
    Ok(Namespace {
        weights: digest("weights", field(fields, "weights")?)?,
        dtype: named("dtype", &field::<String>(fields, "dtype")?)?,
        order: named("order", &field::<String>(fields, "order")?)?,
        block_tokens: field(fields, "block_tokens")?,
        tensor_parallel: rank("tp", field(fields, "tp")?)?,
        pipeline_parallel: rank("pp", field(fields, "pp")?)?,
        attention: field::<BTreeMap<String, String>>(fields, "attention")?,
        lora: field::<Option<Vec<u8>>>(fields, "lora")?.map(|lora| digest("lora", lora)).transpose()?,
        tenant_salt: field(fields, "salt")?,
    })
}

fn field<'py, T: FromPyObjectOwned<'py>>(fields: &Bound<'py, PyDict>, name: &str) -> PyResult<T> {
    let value = fields.get_item(name)?.ok_or_else(|| invalid(format!("namespace lacks the field {name}")))?;
    value.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        invalid(format!("namespace: {name}: {error}"))
    })
}

fn digest(name: &str, bytes: Vec<u8>) -> PyResult<Digest> {
    let len = bytes.len();
    let bytes = <[u8; 32]>::try_from(bytes);
    bytes
        .map(Digest::from_bytes)
        .map_err(|_| invalid(format!("namespace: {name} has {len} bytes; allowed: 32")))
}

fn named<T: std::str::FromStr<Err: Display>>(name: &str, value: &str) -> PyResult<T> {
    value.parse().map_err(|error| invalid(format!("namespace: {name}: {error}")))
}

fn rank(name: &str, (rank, size): (u32, u32)) -> PyResult<Rank> {
    Rank::new(rank, size).map_err(|error| invalid(format!("namespace: {name}: {error}")))
}
