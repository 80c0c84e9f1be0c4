//! Where things are in etcd: the keys below the prefix, and how they are spelt.
//!
//! ```text
//! <prefix>/nodes/<node>           the node's record
//! <prefix>/chunks/<chunk>/<node>  nothing: that the key is there says that the node holds the chunk
//! ```
//!
//! Ids are lower-case hexadecimal digits.

use forebay_kv::ChunkId;
use hex::FromHex;

/// The spelling of keys below one prefix.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// Ends in a slash.
    prefix: String,
}

/// What a key stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Node([u8; 16]),
    Holding(ChunkId, [u8; 16]),
}

impl Keys {
    pub fn new(prefix: &str) -> Keys {
        Keys { prefix: format!("{}/", prefix.trim_end_matches('/')) }
    }

    pub fn write(&self, key: Key) -> Vec<u8> {
        let text = match key {
            Key::Node(node) => format!("{}nodes/{}", self.prefix, hex::encode(node)),
            Key::Holding(chunk, node) => format!("{}chunks/{chunk}/{}", self.prefix, hex::encode(node)),
        };
        text.into_bytes()
    }

    pub fn read(&self, key: &[u8]) -> Option<Key> {
        let text = std::str::from_utf8(key).ok()?.strip_prefix(&self.prefix)?;
        let read = if let Some(node) = text.strip_prefix("nodes/") {
            Key::Node(<[u8; 16]>::from_hex(node).ok()?)
        } else {
            let (chunk, node) = text.strip_prefix("chunks/")?.split_once('/')?;
            let chunk = ChunkId::from_bytes(<[u8; 32]>::from_hex(chunk).ok()?);
            Key::Holding(chunk, <[u8; 16]>::from_hex(node).ok()?)
        };
        // With capital digits it is another key of etcd, which stands for nothing.
        (self.write(read) == key).then_some(read)
    }

    /// The first key below the prefix that there can be.
    pub fn first(&self) -> Vec<u8> {
        self.prefix.clone().into_bytes()
    }

    /// The first key after all keys below the prefix.
    pub fn end(&self) -> Vec<u8> {
        let mut end = self.first();
        // The last byte is a slash: the byte after it exists.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_is_read_as_it_was_written_and_lies_below_the_prefix(chunk: [u8; 32], node: [u8; 16]) {
            let keys = Keys::new("/forebay//");
            for key in [Key::Node(node), Key::Holding(ChunkId::from_bytes(chunk), node)] {
                let written = keys.write(key);
                prop_assert!(keys.first() < written && written < keys.end());
                prop_assert_eq!(keys.read(&written), Some(key));
                prop_assert_eq!(keys.read(&written[..written.len() - 1]), None);
                prop_assert_eq!(Keys::new("/other").read(&written), None);
                let (prefix, below) = written.split_at(keys.first().len());
                let capitals = [prefix, &String::from_utf8_lossy(below).replace('a', "A").into_bytes()[..]].concat();
                prop_assert!(capitals == written || keys.read(&capitals).is_none());
            }
        }

        #[test]
        fn any_bytes_are_a_key_or_none(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Keys::new("").read(&bytes);
        }
    }
}
