//! What a client asks of its node. Pure: this file knows the words and their bytes; it must never know how they are answered.

use super::bytes::{BadBytes, Reader, Writer};
use super::frame::Frame;
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, TenantId};
use forebay_transfer::Class;

/// The first bytes of every connection.
pub const MAGIC: [u8; 8] = *b"FBLOCAL\n";
/// The version that this program speaks, and no other.
pub const VERSION: u16 = 5;
/// Longest token.
pub const TOKEN_BYTES_MAX: usize = 4096;
/// Longest name of a client.
pub const NAME_BYTES_MAX: usize = 256;
/// Chunks that can be named at a time.
pub const IDS_MAX: usize = 65_536;

/// Who a client says that it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// What the node has to be shown.
    pub token: Vec<u8>,
    /// For people who read the node's counters.
    pub name: String,
    /// Whose chunks it uses.
    pub tenant: TenantId,
}

/// What a client says. Those that are not answered say so.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// The first frame.
    Hello(Hello),
    /// How much of a sequence is there?
    Lookup(Vec<ChunkId>),
    /// Lease what is there.
    Lease {
        /// For how long, unless it is renewed.
        ttl_us: u64,
        /// Whether that is to load it. Otherwise it is only kept: that is no hit, and where it lies is not said.
        to_load: bool,
        /// The sequence.
        ids: Vec<ChunkId>,
    },
    /// Lend a chunk of a lease, wherever it is.
    Bring {
        /// The lease.
        lease: u64,
        /// Its place there.
        chunk: u32,
        /// How urgent it is.
        class: Class,
        /// How long it is of any use.
        within_us: Option<u64>,
    },
    /// Let leases live on.
    Renew {
        /// For how long.
        ttl_us: u64,
        /// Which.
        leases: Vec<u64>,
    },
    /// End leases. Not answered.
    Release(Vec<u64>),
    /// Reserve a slot for a chunk.
    Reserve {
        /// The chunk.
        id: ChunkId,
        /// The chunk before it.
        parent: Option<ChunkId>,
        /// The lengths of its layers.
        shape: ChunkShape,
    },
    /// The chunk is in its slot.
    Commit {
        /// The slot.
        slot: u64,
        /// The CRC-32C of each layer.
        sums: Vec<u32>,
    },
    /// The chunk will never be in its slot, and nobody writes it any more. Not answered.
    Abort {
        /// The slot.
        slot: u64,
    },
    /// What a chunk of a lease has for bytes is not what was stored. Not answered.
    Corrupt {
        /// The lease.
        lease: u64,
        /// The chunk's place there.
        chunk: u32,
    },
    /// A request uses these chunks. Not answered.
    Used {
        /// Length of each.
        chunk_bytes: u64,
        /// Which.
        ids: Vec<ChunkId>,
    },
    /// Say when these chunks have gone, and now which of them are not there.
    Watch(Vec<ChunkId>),
    /// What does the node count?
    Stat,
    /// Is anybody there?
    Ping,
    /// The client goes; nothing of it reads or writes the arena any more. Not answered.
    Bye,
}

const HELLO: u16 = 1;
const LOOKUP: u16 = 2;
const LEASE: u16 = 3;
const BRING: u16 = 4;
const RENEW: u16 = 5;
const RELEASE: u16 = 6;
const RESERVE: u16 = 7;
const COMMIT: u16 = 8;
const ABORT: u16 = 9;
const CORRUPT: u16 = 10;
const USED: u16 = 11;
const STAT: u16 = 13;
const PING: u16 = 14;
const BYE: u16 = 15;
const WATCH: u16 = 16;

impl Request {
    /// Whether a node takes it: on whoever names too many chunks at once it hangs up.
    pub fn check(&self) -> Result<(), BadBytes> {
        match self {
            Request::Lookup(ids)
            | Request::Lease { ids, .. }
            | Request::Used { ids, .. }
            | Request::Watch(ids) => check_number(ids),
            _ => Ok(()),
        }
    }

    /// The frame that says it.
    pub fn encode(&self, number: u64) -> Frame {
        let start = Writer::default();
        let (kind, Writer(body)) = match self {
            Request::Hello(hello) => (HELLO, hello.encode(start)),
            Request::Lookup(ids) => (LOOKUP, start.ids(ids)),
            Request::Lease { ttl_us, to_load, ids } => {
                (LEASE, start.u64(*ttl_us).u8((*to_load).into()).ids(ids))
            }
            Request::Bring { lease, chunk, class, within_us } => {
                let rank = Class::ALL.iter().position(|one| one == class).unwrap_or_default() as u8;
                let within_us = within_us.unwrap_or(u64::MAX);
                (BRING, start.u64(*lease).u32(*chunk).u8(rank).u64(within_us))
            }
            Request::Renew { ttl_us, leases } => (RENEW, numbers(start.u64(*ttl_us), leases)),
            Request::Release(leases) => (RELEASE, numbers(start, leases)),
            Request::Reserve { id, parent, shape } => {
                let named = start.bytes(id.as_bytes()).u8(parent.is_some().into());
                let parent = parent.as_ref().map_or([0; 32], |parent| *parent.as_bytes());
                (RESERVE, named.bytes(&parent).shape(shape))
            }
            Request::Commit { slot, sums } => {
                (COMMIT, start.u64(*slot).list(sums, |writer, sum| writer.u32(*sum)))
            }
            Request::Abort { slot } => (ABORT, start.u64(*slot)),
            Request::Corrupt { lease, chunk } => (CORRUPT, start.u64(*lease).u32(*chunk)),
            Request::Used { chunk_bytes, ids } => (USED, start.u64(*chunk_bytes).ids(ids)),
            Request::Watch(ids) => (WATCH, start.ids(ids)),
            Request::Stat => (STAT, start),
            Request::Ping => (PING, start),
            Request::Bye => (BYE, start),
        };
        Frame::new(kind, number, body)
    }

    /// What it is called where it is worth a trace: it is answered, and more than a look at counters.
    pub fn traced_as(&self) -> Option<&'static str> {
        match self {
            Request::Lookup(_) => Some("lookup"),
            Request::Lease { .. } => Some("lease"),
            Request::Bring { .. } => Some("bring"),
            Request::Renew { .. } => Some("renew"),
            Request::Reserve { .. } => Some("reserve"),
            Request::Commit { .. } => Some("commit"),
            Request::Watch(_) => Some("watch"),
            _ => None,
        }
    }

    /// What a frame says.
    pub fn decode(frame: &Frame) -> Result<Request, BadBytes> {
        let mut body = Reader(&frame.body);
        let request = match frame.kind {
            HELLO => Request::Hello(Hello::decode(&mut body)?),
            LOOKUP => Request::Lookup(ids(&mut body)?),
            LEASE => Request::Lease {
                ttl_us: body.u64("a time to live")?,
                to_load: body.bool("whether it is to be loaded")?,
                ids: ids(&mut body)?,
            },
            BRING => Request::Bring {
                lease: body.u64("a lease")?,
                chunk: body.u32("a chunk's place")?,
                class: class(body.u8("a class")?)?,
                within_us: Some(body.u64("a deadline")?).filter(|within_us| *within_us != u64::MAX),
            },
            RENEW => Request::Renew { ttl_us: body.u64("a time to live")?, leases: leases(&mut body)? },
            RELEASE => Request::Release(leases(&mut body)?),
            RESERVE => reserve(&mut body)?,
            COMMIT => Request::Commit {
                slot: body.u64("a slot")?,
                sums: body.list("checksums", 4, |body| body.u32("a checksum"))?,
            },
            ABORT => Request::Abort { slot: body.u64("a slot")? },
            CORRUPT => Request::Corrupt { lease: body.u64("a lease")?, chunk: body.u32("a chunk's place")? },
            USED => Request::Used { chunk_bytes: body.u64("a chunk's length")?, ids: ids(&mut body)? },
            WATCH => Request::Watch(ids(&mut body)?),
            STAT => Request::Stat,
            PING => Request::Ping,
            BYE => Request::Bye,
            kind => return Err(value("the kind of a request", kind.into(), "1 to 16")),
        };
        body.end()?;
        Ok(request)
    }
}

impl Hello {
    fn encode(&self, start: Writer) -> Writer {
        let token = start.bytes(&MAGIC).u16(VERSION).list(&self.token, |writer, byte| writer.u8(*byte));
        token.text(&self.name).u16(self.tenant.0)
    }

    fn decode(body: &mut Reader) -> Result<Hello, BadBytes> {
        let magic = body.array("the magic bytes")?;
        if magic != MAGIC {
            return Err(value("the magic bytes", u64::from_le_bytes(magic), "those of this protocol"));
        }
        match body.u16("a version")? {
            VERSION => {}
            version => return Err(value("the protocol's version", version.into(), "5")),
        }
        let token = body.list("a token", 1, |body| body.u8("a token"))?;
        let (name, tenant) = (body.text("a name")?, TenantId(body.u16("a tenant")?));
        if token.len() > TOKEN_BYTES_MAX {
            return Err(value("the length of a token", token.len() as u64, "0 to 4096"));
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(value("the length of a name", name.len() as u64, "0 to 256"));
        }
        Ok(Hello { token, name, tenant })
    }
}

fn numbers(start: Writer, numbers: &[u64]) -> Writer {
    start.list(numbers, |writer, number| writer.u64(*number))
}

fn leases(body: &mut Reader) -> Result<Vec<u64>, BadBytes> {
    body.list("leases", 8, |body| body.u64("a lease"))
}

fn ids(body: &mut Reader) -> Result<Vec<ChunkId>, BadBytes> {
    let ids = body.ids()?;
    check_number(&ids).map(|()| ids)
}

fn check_number(ids: &[ChunkId]) -> Result<(), BadBytes> {
    match ids.len() {
        0..=IDS_MAX => Ok(()),
        len => Err(value("the number of chunk ids", len as u64, "0 to 65536")),
    }
}

fn reserve(body: &mut Reader) -> Result<Request, BadBytes> {
    let (id, has_parent, parent) = (body.id()?, body.bool("whether there is a parent")?, body.id()?);
    Ok(Request::Reserve { id, parent: has_parent.then_some(parent), shape: body.shape()? })
}

fn class(rank: u8) -> Result<Class, BadBytes> {
    Class::ALL.get(usize::from(rank)).copied().ok_or(value("a class", rank.into(), "0 to 3"))
}

fn value(what: &'static str, value: u64, allowed: &'static str) -> BadBytes {
    BadBytes::Value { what, value, allowed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples() -> Vec<Request> {
        let id = |byte| ChunkId::from_bytes([byte; 32]);
        let hello = Hello { token: b"secret".to_vec(), name: "engine 3".into(), tenant: TenantId(7) };
        let shape = ChunkShape::new([10, 10, 12]).unwrap();
        vec![
            Request::Hello(hello),
            Request::Lookup(vec![id(1), id(2)]),
            Request::Lease { ttl_us: 5, to_load: true, ids: vec![] },
            Request::Lease { ttl_us: 5, to_load: false, ids: vec![id(4)] },
            Request::Bring { lease: 3, chunk: 4, class: Class::Prefetch, within_us: None },
            Request::Bring { lease: 3, chunk: 4, class: Class::Scrub, within_us: Some(9) },
            Request::Renew { ttl_us: 6, leases: vec![1, u64::MAX] },
            Request::Release(vec![1]),
            Request::Reserve { id: id(3), parent: None, shape: shape.clone() },
            Request::Reserve { id: id(3), parent: Some(id(0)), shape },
            Request::Commit { slot: 8, sums: vec![1, 2, 3] },
            Request::Abort { slot: 8 },
            Request::Corrupt { lease: 1, chunk: 0 },
            Request::Used { chunk_bytes: 77, ids: vec![id(9)] },
            Request::Watch(vec![id(5), id(6)]),
            Request::Stat,
            Request::Ping,
            Request::Bye,
        ]
    }

    #[test]
    fn every_request_comes_back_and_none_can_be_cut_or_lengthened() {
        for request in samples() {
            let frame = request.encode(5);
            assert_eq!(Request::decode(&frame).as_ref(), Ok(&request));
            for cut in 0..frame.body.len() {
                let short = Frame { body: frame.body[..cut].to_vec(), ..frame.clone() };
                assert!(Request::decode(&short).is_err(), "{request:?} cut to {cut}");
            }
            let mut long = frame;
            long.body.push(0);
            assert!(Request::decode(&long).is_err(), "{request:?} with a byte more");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(kind in 0u16..20, body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::decode(&Frame::new(kind, 0, body));
        }
    }
}
