//! The table of chunks that a successor gets with the memory, as bytes. Pure; whoever wrote it may
//! have been wrong.
//!
//! ```text
//! magic     8 bytes
//! version   u16
//! pages     u8   0: base, 1: transparent, 2: huge
//! shapes    u32, and for each its runs of layers
//! chunks    u32, and for each: id, tenant u16, pinned u8, parent u32 (2^32 - 1: none), offset u64,
//!           number of its shape u32, a CRC-32C for each layer
//! order     u32, and as many u32: places in the list of chunks, the one used longest ago first
//! digest    BLAKE3 of all before
//! ```

use super::message::VERSION;
use forebay_client::protocol::bytes::{BadBytes, Reader, Writer};
use forebay_store::{ChunkShape, Kept, KeptChunk, TenantId};
use forebay_transfer::Pages;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

const MAGIC: [u8; 8] = *b"FBKEPT\r\n";
const DIGEST_BYTES: usize = 32;
const NO_PARENT: u32 = u32::MAX;
const PAGES: [Pages; 3] = [Pages::Base, Pages::Transparent, Pages::Huge];
/// A chunk of one layer.
const CHUNK_BYTES_MIN: usize = 32 + 2 + 1 + 4 + 8 + 4 + 4;

/// Memory that a node leaves, with what is in it.
#[derive(Debug)]
pub struct Left {
    pub arena: OwnedFd,
    pub pages: Pages,
    pub kept: Kept,
}

/// Why bytes are no table.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadTable {
    #[error("it does not begin as one, or was changed on the way")]
    NotATable,
    #[error("it has version {found}; this program knows {VERSION}")]
    Version { found: u16 },
    #[error(transparent)]
    Bytes(#[from] BadBytes),
}

pub fn encode(pages: Pages, kept: &Kept) -> Vec<u8> {
    let (mut shapes, mut numbers) = (Vec::new(), HashMap::new());
    for chunk in &kept.chunks {
        numbers.entry(&chunk.shape).or_insert_with(|| {
            shapes.push(Arc::clone(&chunk.shape));
            shapes.len() as u32 - 1
        });
    }
    let kind = PAGES.iter().position(|one| *one == pages).unwrap_or_default() as u8;
    let chunk = |writer: Writer, chunk: &KeptChunk| {
        let named = writer.bytes(chunk.id.as_bytes()).u16(chunk.tenant.0).u8(chunk.pinned.into());
        let placed = named.u32(chunk.parent.unwrap_or(NO_PARENT)).u64(chunk.offset_bytes);
        let shaped = placed.u32(numbers.get(&chunk.shape).copied().unwrap_or_default());
        chunk.checksums.iter().fold(shaped, |writer, sum| writer.u32(*sum))
    };
    let head = Writer::default().bytes(&MAGIC).u16(VERSION).u8(kind);
    let listed = head.list(&shapes, |writer, shape| writer.shape(shape)).list(&kept.chunks, chunk);
    let whole = listed.list(&kept.coldest_first, |writer, place| writer.u32(*place));
    let digest = blake3::hash(&whole.0);
    whole.bytes(digest.as_bytes()).0
}

pub fn decode(bytes: &[u8]) -> Result<(Pages, Kept), BadTable> {
    let (bytes, digest) = bytes.split_last_chunk::<DIGEST_BYTES>().ok_or(BadTable::NotATable)?;
    if !bytes.starts_with(&MAGIC) || blake3::hash(bytes) != *digest {
        return Err(BadTable::NotATable);
    }
    let mut body = Reader(&bytes[MAGIC.len()..]);
    let found = body.u16("the version")?;
    if found != VERSION {
        return Err(BadTable::Version { found });
    }
    let kind = body.u8("the pages")?;
    let bad = BadBytes::Value { what: "the pages", value: kind.into(), allowed: "0 to 2" };
    let pages = *PAGES.get(usize::from(kind)).ok_or(bad)?;
    let shapes = body.list("shapes", 4, |body| body.shape().map(Arc::new))?;
    let chunks = body.list("chunks", CHUNK_BYTES_MIN, |body| chunk(body, &shapes))?;
    let coldest_first = body.list("places", 4, |body| body.u32("a place"))?;
    body.end()?;
    Ok((pages, Kept { chunks, coldest_first }))
}

fn chunk(body: &mut Reader, shapes: &[Arc<ChunkShape>]) -> Result<KeptChunk, BadBytes> {
    let (id, tenant) = (body.id()?, TenantId(body.u16("a tenant")?));
    let (pinned, parent) = (body.bool("whether it is pinned")?, body.u32("a parent")?);
    let (offset_bytes, number) = (body.u64("an offset")?, body.u32("a shape")?);
    let allowed = "one that was given";
    let bad = BadBytes::Value { what: "the number of a shape", value: number.into(), allowed };
    let shape = Arc::clone(shapes.get(number as usize).ok_or(bad)?);
    let sums = body.bytes("checksums", 4 * shape.layers())?.chunks_exact(4);
    let checksums =
        sums.map(|sum| sum.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte))).collect();
    let parent = Some(parent).filter(|parent| *parent != NO_PARENT);
    Ok(KeptChunk { id, tenant, pinned, parent, offset_bytes, shape, checksums })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_kv::ChunkId;
    use proptest::prelude::*;

    fn kept(chunks: usize) -> Kept {
        let shapes = [vec![100; 3], vec![7]].map(|layers| Arc::new(ChunkShape::new(layers).unwrap()));
        let chunk = |number: usize| KeptChunk {
            id: ChunkId::from_bytes([number as u8; 32]),
            tenant: TenantId(number as u16),
            pinned: number % 2 == 1,
            parent: number.checked_sub(1).map(|parent| parent as u32),
            offset_bytes: 4096 * number as u64,
            shape: Arc::clone(&shapes[number % 2]),
            checksums: (0..shapes[number % 2].layers() as u32).map(|layer| 0xfedc_ba98 - layer).collect(),
        };
        let coldest_first = (0..chunks as u32).rev().collect();
        Kept { chunks: (0..chunks).map(chunk).collect(), coldest_first }
    }

    /// The bytes with a digest that is right.
    fn signed(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.truncate(bytes.len() - DIGEST_BYTES);
        let digest = blake3::hash(&bytes);
        [bytes, digest.as_bytes().to_vec()].concat()
    }

    #[test]
    fn every_table_comes_back_and_none_can_be_cut_changed_or_lengthened() {
        for (pages, chunks) in [(Pages::Base, 0), (Pages::Transparent, 1), (Pages::Huge, 5)] {
            let bytes = encode(pages, &kept(chunks));
            assert_eq!(decode(&bytes), Ok((pages, kept(chunks))));
            for cut in 0..bytes.len() {
                assert!(decode(&bytes[..cut]).is_err(), "cut to {cut}");
                let mut changed = bytes.clone();
                changed[cut] ^= 1;
                assert_eq!(decode(&changed), Err(BadTable::NotATable), "changed at {cut}");
            }
            let long = signed([bytes, vec![0]].concat());
            assert!(decode(&long).is_err());
        }
    }

    #[test]
    fn a_table_of_another_version_is_refused_by_number() {
        let mut bytes = encode(Pages::Base, &kept(2));
        bytes[MAGIC.len()] = 2;
        let said = decode(&signed(bytes)).unwrap_err().to_string();
        assert_eq!(said, "it has version 2; this program knows 1");
    }

    proptest! {
        #[test]
        fn tables_that_lie_never_panic(
            chunks in 0usize..5,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = encode(Pages::Base, &kept(chunks));
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            let _ = decode(&signed(bytes.clone()));
            bytes.truncate(DIGEST_BYTES + cut.index(bytes.len() - DIGEST_BYTES + 1));
            let _ = decode(&signed(bytes));
        }
    }
}
