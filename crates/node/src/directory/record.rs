//! What a node says about itself so that others can reach it: the record's fields and their bounds.

use hex::FromHex;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use thiserror::Error;

pub const NAME_BYTES_MAX: usize = 255;

/// A node that others can reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    /// The node, the same after every start.
    pub node: [u8; 16],
    /// This start of the node; zeros where it is not known.
    pub instance: [u8; 16],
    /// What people call it.
    pub name: String,
    /// Where peers connect to.
    pub address: SocketAddr,
}

/// Why a record is not one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RecordError {
    #[error("not a record: {0}")]
    Json(String),
    #[error("{field} is {value:?}; allowed: 32 hexadecimal digits")]
    Id { field: &'static str, value: String },
    /// The name is empty or too long, or would garble a log.
    #[error("name has {bytes} bytes; allowed: 1 to {NAME_BYTES_MAX}, without control characters")]
    Name { bytes: usize },
}

/// The record as JSON; unknown fields are left to later versions.
#[derive(Serialize, Deserialize)]
struct Written {
    node: String,
    instance: String,
    name: String,
    address: SocketAddr,
}

/// The id of a node that is given a name only.
pub fn node_of_name(name: &str) -> [u8; 16] {
    let digest = blake3::derive_key("forebay node id from name, 1", name.as_bytes());
    let mut node = [0; 16];
    node.copy_from_slice(&digest[..16]);
    node
}

impl NodeRecord {
    pub fn to_json(&self) -> String {
        let (node, instance) = (hex::encode(self.node), hex::encode(self.instance));
        let written = Written { node, instance, name: self.name.clone(), address: self.address };
        serde_json::to_string(&written).unwrap_or_default()
    }

    /// Reads a record that somebody else wrote.
    pub fn from_json(json: &[u8]) -> Result<NodeRecord, RecordError> {
        let written: Written =
            serde_json::from_slice(json).map_err(|error| RecordError::Json(error.to_string()))?;
        let node = id_of("node", &written.node)?;
        let instance = id_of("instance", &written.instance)?;
        check_name(&written.name)?;
        Ok(NodeRecord { node, instance, name: written.name, address: written.address })
    }
}

/// Whether a node may be called so.
pub(crate) fn check_name(name: &str) -> Result<(), RecordError> {
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
    fits.then_some(()).ok_or(RecordError::Name { bytes: name.len() })
}

/// The id that a field of hexadecimal digits stands for.
pub(super) fn id_of(field: &'static str, value: &str) -> Result<[u8; 16], RecordError> {
    let start = value.char_indices().nth(64).map_or(value.len(), |(at, _)| at);
    <[u8; 16]>::from_hex(value).map_err(|_| RecordError::Id { field, value: value[..start].to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> NodeRecord {
        let address = "127.0.0.1:7000".parse().unwrap();
        NodeRecord { node: [1; 16], instance: [0xAB; 16], name: "rack 3 \"left\"".into(), address }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        assert_eq!(NodeRecord::from_json(record().to_json().as_bytes()), Ok(record()));
    }

    #[test]
    fn a_bad_record_is_refused_with_the_field_and_what_is_allowed() {
        let json = record().to_json();
        let bad_id = json.replace(&"01".repeat(16), "01AB");
        let error = NodeRecord::from_json(bad_id.as_bytes()).unwrap_err();
        assert_eq!(error, RecordError::Id { field: "node", value: "01AB".into() });
        let no_name = NodeRecord { name: String::new(), ..record() }.to_json();
        assert_eq!(NodeRecord::from_json(no_name.as_bytes()), Err(RecordError::Name { bytes: 0 }));
        let long = NodeRecord { name: "x".repeat(256), ..record() }.to_json();
        assert_eq!(NodeRecord::from_json(long.as_bytes()), Err(RecordError::Name { bytes: 256 }));
        assert!(matches!(NodeRecord::from_json(b"{}"), Err(RecordError::Json(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = NodeRecord::from_json(&bytes);
        }
    }
}
