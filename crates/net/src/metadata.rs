//! What an agent tells others about itself, as bytes that travel by any way: a socket, a file,
//! another program. Those who read them trust nothing: every field is checked.
//!
//! ```text
//!  0  magic      8 bytes   "FBYAGENT"
//!  8  version    u16       1
//! 10  name       u16, and as many bytes of UTF-8
//!     node       16 bytes
//!     instance   16 bytes  new at every start
//!     address    u16, and as many bytes of text, as in 127.0.0.1:7000; 0: nobody can connect
//!     regions    u32, and as many times 32 bytes: base, len, key, generation, each u64
//!     crc        u32       CRC-32C of all before
//! ```
//! All numbers are little endian.

use crate::addresses::{Addresses, BadRange};
use crate::bytes::{Field, Reader, put_bytes};
use crate::tcp::{Identity, PeerRegion, REGIONS_MAX};
use crc_fast::{CrcAlgorithm, checksum};
use std::net::SocketAddr;
use thiserror::Error;

const MAGIC: &[u8; 8] = b"FBYAGENT";
const VERSION: u16 = 1;
/// Bytes of an agent's name at most.
pub const NAME_BYTES_MAX: usize = 256;

/// What an agent is, and what it offers.
#[derive(Debug, Clone)]
pub(crate) struct Metadata {
    pub name: String,
    pub identity: Identity,
    pub address: Option<SocketAddr>,
    pub regions: Addresses<PeerRegion>,
}

/// Why bytes are not an agent's metadata.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadMetadata {
    #[error("these {bytes} bytes are not the metadata of a Forebay agent")]
    Magic { bytes: usize },
    #[error("metadata of version {version}; this agent reads version {VERSION}")]
    Version { version: u16 },
    #[error("the metadata's checksum is {found:#010x}; its bytes have {expected:#010x}")]
    Damaged { found: u32, expected: u32 },
    #[error("the metadata's {field} is cut, or too long")]
    Cut { field: &'static str },
    #[error("an agent's name has 1 to {NAME_BYTES_MAX} bytes of UTF-8")]
    Name,
    #[error("the agent's address is not an IP address and a port")]
    Address,
    #[error("{regions} regions; at most {REGIONS_MAX} may be")]
    TooMany { regions: u32 },
    #[error("the region of {len} bytes at {base:#x} is empty, ends beyond 2^64 or overlaps another")]
    Region { base: u64, len: u64 },
}

impl Metadata {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        VERSION.put(&mut out);
        put_bytes(self.name.as_bytes(), u16::MAX, &mut out);
        self.identity.put(&mut out);
        let address = self.address.map(|address| address.to_string()).unwrap_or_default();
        put_bytes(address.as_bytes(), u16::MAX, &mut out);
        (self.regions.iter().count() as u32).put(&mut out);
        for region in self.regions.iter() {
            (region.base, region.len, region.what.key, region.what.generation).put(&mut out);
        }
        (checksum(CrcAlgorithm::Crc32Iscsi, &out) as u32).put(&mut out);
        out
    }

    pub fn parse(bytes: &[u8]) -> Result<Metadata, BadMetadata> {
        let cut = |field| BadMetadata::Cut { field };
        let mut reader = Reader(bytes.strip_prefix(MAGIC).ok_or(BadMetadata::Magic { bytes: bytes.len() })?);
        let version = reader.get().ok_or(cut("version"))?;
        if version != VERSION {
            return Err(BadMetadata::Version { version });
        }
        let (body, crc) = bytes.split_last_chunk().ok_or(BadMetadata::Cut { field: "checksum" })?;
        let (found, expected) = (u32::from_le_bytes(*crc), checksum(CrcAlgorithm::Crc32Iscsi, body) as u32);
        if found != expected {
            return Err(BadMetadata::Damaged { found, expected });
        }
        let name = std::str::from_utf8(reader.bytes().ok_or(cut("name"))?).ok();
        let name = name.filter(|name| is_name(name)).ok_or(BadMetadata::Name)?.to_owned();
        let (node, instance) = (reader.get().ok_or(cut("node"))?, reader.get().ok_or(cut("instance"))?);
        let address = match reader.bytes().ok_or(cut("address"))? {
            [] => None,
            text => {
                let parsed = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
                Some(parsed.ok_or(BadMetadata::Address)?)
            }
        };
        let regions = parse_regions(&mut reader)?;
        if reader.0.len() != crc.len() {
            return Err(cut("end"));
        }
        Ok(Metadata { name, identity: Identity { node, instance }, address, regions })
    }
}

/// Whether an agent may be called so.
/// Where metadata say that their agent listens. `None`: nowhere.
pub fn address_in(metadata: &[u8]) -> Result<Option<SocketAddr>, BadMetadata> {
    Metadata::parse(metadata).map(|metadata| metadata.address)
}

pub(crate) fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
}

fn parse_regions(reader: &mut Reader<'_>) -> Result<Addresses<PeerRegion>, BadMetadata> {
    let cut = BadMetadata::Cut { field: "regions" };
    let regions: u32 = reader.get().ok_or(cut.clone())?;
    if regions as usize > REGIONS_MAX {
        return Err(BadMetadata::TooMany { regions });
    }
    let mut found = Addresses::default();
    for _ in 0..regions {
        let (base, len, key, generation) = reader.get().ok_or(cut.clone())?;
        let region = PeerRegion { key, generation, len };
        let unsound = |_: BadRange| BadMetadata::Region { base, len };
        found.insert(base, len, region).map_err(unsound)?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_metadata() -> impl Strategy<Value = Metadata> {
        let region = (1u64..1 << 40, any::<u64>(), any::<u64>());
        let address = prop::option::of((any::<[u8; 4]>(), any::<u16>()).prop_map(SocketAddr::from));
        let regions = prop::collection::vec(region, 0..20);
        ("[a-zä-ü]{1,40}", any::<[u8; 16]>(), any::<[u8; 16]>(), address, regions).prop_map(
            |(name, node, instance, address, given)| {
                let mut regions = Addresses::default();
                let mut base = 0;
                for (len, key, generation) in given {
                    regions.insert(base, len, PeerRegion { key, generation, len }).unwrap();
                    base += len;
                }
                Metadata { name, identity: Identity { node, instance }, address, regions }
            },
        )
    }

    fn with_right_crc(mut bytes: Vec<u8>) -> Vec<u8> {
        if let Some((body, crc)) = bytes.split_last_chunk_mut::<4>() {
            *crc = (checksum(CrcAlgorithm::Crc32Iscsi, body) as u32).to_le_bytes();
        }
        bytes
    }

    proptest! {
        #[test]
        fn metadata_survive_their_way(metadata in any_metadata()) {
            let bytes = metadata.encode();
            let back = Metadata::parse(&bytes).unwrap();
            prop_assert_eq!(&back.name, &metadata.name);
            prop_assert_eq!(back.identity, metadata.identity);
            prop_assert_eq!(back.address, metadata.address);
            prop_assert!(back.regions.iter().eq(metadata.regions.iter()));
            prop_assert_eq!(back.encode(), bytes);
        }

        #[test]
        fn damaged_metadata_are_refused(metadata in any_metadata(), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut bytes = metadata.encode();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(Metadata::parse(&bytes).is_err());
            prop_assert!(Metadata::parse(&bytes[..at]).is_err());
        }

        /// Whoever wants to deceive can compute a checksum.
        #[test]
        fn hostile_metadata_are_refused_or_sound(
            metadata in any_metadata(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = metadata.encode();
            for (at, byte) in changes {
                let at = at.index(bytes.len() - 10) + 10;
                bytes[at] = byte;
            }
            bytes.truncate(bytes.len() - cut.index(bytes.len().min(40)));
            if let Ok(metadata) = Metadata::parse(&with_right_crc(bytes)) {
                prop_assert!(is_name(&metadata.name));
                for region in metadata.regions.iter() {
                    prop_assert!(region.len > 0 && region.base.checked_add(region.len).is_some());
                    prop_assert_eq!(region.what.len, region.len);
                }
            }
        }
    }
}
