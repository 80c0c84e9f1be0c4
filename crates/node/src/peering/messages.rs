//! What nodes ask each other beside memory: who has which chunks, and leases of them. Pure: this
//! file knows the words and their bytes, from peers that may be lying.
//!
//! A lease is of a few chunks at a time, and is renewed only while they come.

use forebay_client::protocol::answer::ChunkPlace;
use forebay_client::protocol::bytes::{BadBytes, Reader, Writer};
use forebay_kv::ChunkId;
use forebay_store::TenantId;
use forebay_transfer::{Class, TraceContext};
use std::sync::Arc;

/// The version that this program speaks, and no other.
const VERSION: u8 = 3;
/// Chunks that a peer is asked for at a time.
pub const LOOKUP_IDS_MAX: usize = 16_384;
const FORGET_IDS_MAX: usize = 16_384;
pub const LEASE_IDS_MAX: usize = 64;
/// Longest time that a lease is for.
pub const LEASE_US_MAX: u64 = 60_000_000;

/// Whose chunks are meant: a number that both nodes give the same tenant, and a key that only those
/// can know who share the nodes' token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantKey {
    pub tenant: TenantId,
    pub key: [u8; 16],
}

/// What a node asks a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// How many of these chunks, from the first on, are there?
    Lookup(TenantKey, Vec<ChunkId>),
    /// Lease the longest prefix of these chunks for so long. The class is how urgent it is where
    /// they have to be read first. The last one is the span that it is for, if that is traced.
    Lease(TenantKey, u64, Class, Vec<ChunkId>, Option<TraceContext>),
    /// A lease is of no more use.
    Return(u64),
    /// Let a lease live for so long from now.
    Renew(u64, u64),
    /// This chunk came with other bytes than were leased: are they wrong where they lie?
    Wrong(TenantKey, ChunkId),
    /// Forget these chunks, and ask nobody else to.
    Forget(TenantKey, Vec<ChunkId>),
}

/// What a peer leases to this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteLease {
    /// The lease under which it can be read.
    pub lease: u64,
    /// The region: key, generation and length.
    pub region: (u64, u64, u64),
    /// Where the chunks start in it, of those asked for the first ones.
    pub chunks: Vec<ChunkPlace>,
}

/// What a peer answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Found(u32),
    Leased(RemoteLease),
    /// It is done, and there is nothing to say.
    Heard,
    /// As much is leased to the one that asks as may be: not before it has given something back.
    NotNow,
    /// They are forgotten: of each, whether it was there.
    Forgotten(Vec<bool>),
}

impl TenantKey {
    /// The key of a tenant among nodes that share a token.
    pub fn of(token: &[u8], tenant: TenantId) -> TenantKey {
        let mut hasher = blake3::Hasher::new_derive_key("forebay node-to-node tenant key, version 1");
        hasher.update(&(token.len() as u64).to_le_bytes()).update(token).update(&tenant.0.to_le_bytes());
        let mut key = [0; 16];
        key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        TenantKey { tenant, key }
    }
}

impl Question {
    pub fn encode(&self) -> Vec<u8> {
        let start = Writer::default().u8(VERSION);
        let Writer(bytes) = match self {
            Question::Lookup(key, ids) => write_key(start.u8(1), key).ids(ids),
            Question::Lease(key, ttl_us, class, ids, within) => {
                let lease = write_key(start.u8(2), key).u64(*ttl_us).class(*class).ids(ids);
                write_within(lease, within.as_ref())
            }
            Question::Return(lease) => start.u8(3).u64(*lease),
            Question::Renew(lease, ttl_us) => start.u8(4).u64(*lease).u64(*ttl_us),
            Question::Wrong(key, id) => write_key(start.u8(5), key).bytes(id.as_bytes()),
            Question::Forget(key, ids) => write_key(start.u8(6), key).ids(ids),
        };
        bytes
    }
    pub fn decode(bytes: &[u8]) -> Result<Question, BadBytes> {
        let mut body = versioned(bytes)?;
        let ask = match body.u8("a question")? {
            1 => Question::Lookup(read_key(&mut body)?, ids(&mut body, LOOKUP_IDS_MAX, "0 to 16384")?),
            2 => {
                let (key, ttl_us) = (read_key(&mut body)?, body.u64("a time to live")?);
                let (class, ids) = (body.class()?, ids(&mut body, LEASE_IDS_MAX, "0 to 64")?);
                Question::Lease(key, ttl_us.min(LEASE_US_MAX), class, ids, read_within(&mut body)?)
            }
            3 => Question::Return(body.u64("a lease")?),
            4 => Question::Renew(body.u64("a lease")?, body.u64("a time to live")?.min(LEASE_US_MAX)),
            5 => Question::Wrong(read_key(&mut body)?, body.id()?),
            6 => Question::Forget(read_key(&mut body)?, ids(&mut body, FORGET_IDS_MAX, "0 to 16384")?),
            kind => {
                return Err(BadBytes::Value { what: "a question", value: kind.into(), allowed: "1 to 6" });
            }
        };
        body.end()?;
        Ok(ask)
    }
}

impl Answer {
    pub fn encode(&self) -> Vec<u8> {
        let start = Writer::default().u8(VERSION);
        let Writer(bytes) = match self {
            Answer::Found(chunks) => start.u8(1).u32(*chunks),
            Answer::Leased(leased) => {
                let (key, generation, len) = leased.region;
                let head = start.u8(2).u64(leased.lease).u64(key).u64(generation).u64(len);
                head.list(&leased.chunks, |writer, chunk| {
                    let shaped = writer.u64(chunk.offset_bytes).shape(&chunk.shape);
                    shaped.sums(&chunk.sums)
                })
            }
            Answer::Heard => start.u8(3),
            Answer::NotNow => start.u8(4),
            Answer::Forgotten(had) => start.u8(5).list(had, |writer, had| writer.u8((*had).into())),
        };
        bytes
    }

    /// From bytes. Every chunk that is told lies in the region and has a checksum for each layer.
    pub fn decode(bytes: &[u8]) -> Result<Answer, BadBytes> {
        let mut body = versioned(bytes)?;
        let told = match body.u8("an answer")? {
            1 => Answer::Found(body.u32("chunks")?),
            2 => {
                let lease = body.u64("a lease")?;
                let region = (body.u64("a key")?, body.u64("a generation")?, body.u64("a length")?);
                let chunks = body.list("chunks", 16, |body| chunk(body, region.2))?;
                Answer::Leased(RemoteLease { lease, region, chunks })
            }
            3 => Answer::Heard,
            4 => Answer::NotNow,
            5 => Answer::Forgotten(body.list("chunks", 1, |body| body.bool("whether it was there"))?),
            kind => return Err(BadBytes::Value { what: "an answer", value: kind.into(), allowed: "1 to 5" }),
        };
        body.end()?;
        Ok(told)
    }
}

fn chunk(body: &mut Reader, region_bytes: u64) -> Result<ChunkPlace, BadBytes> {
    let (offset_bytes, shape) = (body.u64("an offset")?, Arc::new(body.shape()?));
    let sums = body.sums()?;
    let end = offset_bytes.checked_add(shape.bytes());
    if end.is_none_or(|end| end > region_bytes) {
        return Err(BadBytes::Value {
            what: "an offset",
            value: offset_bytes,
            allowed: "inside of the region",
        });
    }
    if sums.len() != shape.layers() {
        let (what, value) = ("the number of checksums", sums.len() as u64);
        return Err(BadBytes::Value { what, value, allowed: "one for each layer" });
    }
    Ok(ChunkPlace { offset_bytes, shape, sums })
}

fn versioned(bytes: &[u8]) -> Result<Reader<'_>, BadBytes> {
    let mut body = Reader(bytes);
    match body.u8("a version")? {
        VERSION => Ok(body),
        version => Err(BadBytes::Value { what: "the version", value: version.into(), allowed: "3" }),
    }
}

fn write_key(start: Writer, key: &TenantKey) -> Writer {
    start.u16(key.tenant.0).bytes(&key.key)
}

fn read_key(body: &mut Reader) -> Result<TenantKey, BadBytes> {
    Ok(TenantKey { tenant: TenantId(body.u16("a tenant")?), key: body.array("a tenant's key")? })
}

fn write_within(start: Writer, within: Option<&TraceContext>) -> Writer {
    match within {
        None => start.u8(0),
        Some(within) => start.u8(1).bytes(&within.trace).bytes(&within.span).u8(within.sampled.into()),
    }
}

fn read_within(body: &mut Reader) -> Result<Option<TraceContext>, BadBytes> {
    if !body.bool("whether it is traced")? {
        return Ok(None);
    }
    let (trace, span) = (body.array("a trace")?, body.array("a span")?);
    Ok(Some(TraceContext { trace, span, sampled: body.bool("whether it is sampled")? }))
}

fn ids(body: &mut Reader, most: usize, allowed: &'static str) -> Result<Vec<ChunkId>, BadBytes> {
    let ids = body.ids()?;
    let value = ids.len() as u64;
    if ids.len() > most {
        Err(BadBytes::Value { what: "the number of chunk ids", value, allowed })
    } else {
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_store::ChunkShape;
    use proptest::prelude::*;

    fn place(offset_bytes: u64) -> ChunkPlace {
        let shape = Arc::new(ChunkShape::new([10, 20]).unwrap());
        ChunkPlace { offset_bytes, shape, sums: vec![1, 2] }
    }

    #[test]
    fn what_is_said_is_heard_and_nothing_cut_or_lengthened_is() {
        let id = ChunkId::from_bytes([4; 32]);
        let key = TenantKey::of(b"token", TenantId(3));
        let told =
            Answer::Leased(RemoteLease { lease: 3, region: (1, 2, 100), chunks: vec![place(0), place(70)] });
        let within = TraceContext { trace: [1; 16], span: [2; 8], sampled: true };
        let traced = Question::Lease(key, 5, Class::Demand, vec![id], Some(within));
        let small = [traced, Question::Return(9), Question::Renew(9, 5), Question::Wrong(key, id)];
        let small = small.into_iter().chain([Question::Forget(key, vec![id; 2])]);
        let asks: Vec<Question> =
            [Question::Lookup(key, vec![id; 3]), Question::Lease(key, 5, Class::Prefetch, vec![id], None)]
                .into_iter()
                .chain(small)
                .collect();
        for (bytes, whole) in
            asks.iter().map(|ask| (ask.encode(), Question::decode(&ask.encode()).as_ref() == Ok(ask)))
        {
            assert!(whole && (0..bytes.len()).all(|cut| Question::decode(&bytes[..cut]).is_err()));
            assert!(Question::decode(&[bytes, vec![0]].concat()).is_err());
        }
        for told in
            [Answer::Found(7), told, Answer::Heard, Answer::NotNow, Answer::Forgotten(vec![true, false])]
        {
            let bytes = told.encode();
            assert_eq!(Answer::decode(&bytes), Ok(told));
            assert!((0..bytes.len()).all(|cut| Answer::decode(&bytes[..cut]).is_err()));
        }
    }

    #[test]
    fn what_a_node_of_another_version_says_is_refused_with_the_version() {
        for version in [2, 4] {
            let mut bytes = Question::Return(9).encode();
            bytes[0] = version;
            let refused = Question::decode(&bytes).unwrap_err().to_string();
            assert_eq!(refused, format!("the version is {version}; allowed is 3"));
        }
    }

    #[test]
    fn a_chunk_outside_of_its_region_is_no_chunk() {
        for offset_bytes in [71, u64::MAX] {
            let told = Answer::Leased(RemoteLease {
                lease: 3,
                region: (1, 2, 100),
                chunks: vec![place(offset_bytes)],
            });
            assert!(matches!(Answer::decode(&told.encode()), Err(BadBytes::Value { .. })));
        }
    }

    #[test]
    fn a_key_is_for_one_tenant_of_one_cluster() {
        let key = TenantKey::of(b"token", TenantId(3));
        assert_eq!(key, TenantKey::of(b"token", TenantId(3)));
        assert_ne!(key.key, TenantKey::of(b"token", TenantId(4)).key);
        assert_ne!(key.key, TenantKey::of(b"other", TenantId(3)).key);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Question::decode(&bytes), Answer::decode(&bytes));
        }
    }
}
