//! What a node answers its clients, as values and as the bytes of frames. Pure.

use super::bytes::{BadBytes, Reader, Writer};
use super::control::Report;
use super::explain::Explained;
use super::frame::{Asked, Frame};
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, ReadGuard};
use std::sync::Arc;

/// Where a chunk of a lease lies in the arena, still until the lease ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkPlace {
    /// Where it starts in the arena.
    pub offset_bytes: u64,
    /// The lengths of its layers, which lie one behind the other.
    pub shape: Arc<ChunkShape>,
    /// The CRC-32C that each layer must have.
    pub sums: Vec<u32>,
}

/// How many chunks of a sequence are where, from the first on: those that are farther away lie
/// behind the nearer ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Found {
    /// In the node's memory.
    pub in_memory: u32,
    pub on_disk: u32,
    /// On other nodes, as they say.
    pub on_peers: u32,
}

/// What a lease is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Leased {
    /// Its name; 0 for a lease of nothing, which need not be released.
    pub lease: u64,
    /// For how long it lives unless it is renewed: at most what was wished.
    pub ttl_us: u64,
    /// Chunks in memory, the first ones.
    pub in_memory: u32,
    /// Chunks on the node's disk, behind those.
    pub on_disk: u32,
    /// Chunks that other nodes are said to have, behind those.
    pub on_peers: u32,
    /// The first chunks, as many as could be told at once.
    pub places: Vec<ChunkPlace>,
}

/// What a node counts, as far as its clients care.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeStat {
    /// Length of the arena.
    pub capacity_bytes: u64,
    /// Bytes of slots that are in use.
    pub used_bytes: u64,
    /// Chunks in memory.
    pub chunks: u64,
    pub corrupt: u64,
    pub clients: u64,
    pub leases: u64,
    /// Slots that clients write.
    pub slots: u64,
    /// Slots whose client went without a word, since the start.
    pub orphans: u64,
    /// Clients that were not let in.
    pub refused: u64,
    /// Chunks leased to be loaded, in memory, on disk, and on peers.
    pub hits: [u64; 3],
    /// Chunks that came from peers, verified.
    pub pulled: u64,
    /// Chunks that were to come from peers, and did not.
    pub not_pulled: u64,
}

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Too much at a time, or too large.
    Limit,
    /// There is no such lease, slot or chunk.
    Gone,
    Draining,
    /// The store does not take it in.
    NotTaken,
    /// The bytes could not be had.
    NotRead,
    /// The client may not connect.
    NotAllowed,
    /// What the client said is not the protocol. The connection ends.
    BadRequest,
}

pub const REFUSALS: usize = KINDS.len();

const KINDS: [Refusal; 7] = [
    Refusal::Limit,
    Refusal::Gone,
    Refusal::Draining,
    Refusal::NotTaken,
    Refusal::NotRead,
    Refusal::NotAllowed,
    Refusal::BadRequest,
];

/// What becomes of a chunk for which a slot was to be reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reservation {
    /// There is a slot. `offset_bytes` is where it starts in the arena.
    Slot {
        slot: u64,
        offset_bytes: u64,
    },
    Here,
    Refused(Refusal, String),
}

/// What becomes of a chunk whose slot was filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Commitment {
    Visible,
    /// It was deleted meanwhile.
    Deleted,
    Refused(Refusal, String),
}

/// What becomes of a chunk that was to be brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Brought {
    pub chunk: u32,
    pub end: Result<ChunkPlace, (Refusal, String)>,
}

/// What a node says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To a hello: the client is let in. The arena's descriptor comes with it.
    Welcome {
        /// The node, drawn at its start.
        instance: [u8; 16],
        arena_bytes: u64,
    },
    /// A ring for the client's requests. Its descriptor comes with it.
    Ring,
    /// How many chunks, from the first on, are there.
    Found(Found),
    Leased(Leased),
    /// Some of the chunks that were to be brought: those that have come, or will not, since the
    /// answer before.
    Brought(Vec<Brought>),
    /// These leases are dead; the others live on.
    Renewed(Vec<u64>),
    /// What became of each chunk, in the order of the request.
    Reserved(Vec<Reservation>),
    /// The same.
    Committed(Vec<Commitment>),
    Stat(NodeStat),
    /// To a ping.
    Pong,
    /// These of the chunks that are to be watched are not there, or are too many. They are not
    /// watched.
    Watched(Vec<ChunkId>),
    /// These watched chunks are not there any more, and are not watched any more. Nobody has asked
    /// for this: its number is 0.
    Gone(Vec<ChunkId>),
    Explained(Box<Explained>),
    /// What became of each chunk of a Control, in its order.
    Controlled(Vec<Report>),
    /// What a prompt's first chunks are called, 16,384 at most, and how many namespaces there are.
    Named {
        ids: Vec<ChunkId>,
        namespaces: u32,
    },
    Refused(Refusal, String),
}

/// What is read where it says how a chunk has ended.
const AN_END: &str = "the end of a chunk";

const WELCOME: u16 = 1;
const FOUND: u16 = 2;
const LEASED: u16 = 3;
const BROUGHT: u16 = 4;
const RENEWED: u16 = 5;
const RESERVED: u16 = 7;
const COMMITTED: u16 = 8;
const STAT: u16 = 13;
const PONG: u16 = 14;
const REFUSED: u16 = 16;
const WATCHED: u16 = 17;
const GONE: u16 = 18;
const EXPLAINED: u16 = 19;
const RING: u16 = 20;
const CONTROLLED: u16 = 21;
const NAMED: u16 = 22;

impl Answer {
    /// The frame that says it, to whoever asked this.
    pub fn encode(&self, asked: Asked) -> Frame {
        let start = Writer::default();
        let (kind, Writer(body)) = match self {
            Answer::Welcome { instance, arena_bytes } => (WELCOME, start.bytes(instance).u64(*arena_bytes)),
            Answer::Found(found) => (FOUND, found.encode(start)),
            Answer::Leased(leased) => (LEASED, leased.encode(start)),
            Answer::Brought(brought) => (BROUGHT, Brought::encode_all(brought, start)),
            Answer::Renewed(dead) => (RENEWED, start.list(dead, |writer, lease| writer.u64(*lease))),
            Answer::Reserved(all) => (RESERVED, start.list(all, |writer, one| one.encode(writer))),
            Answer::Committed(all) => (COMMITTED, start.list(all, |writer, one| one.encode(writer))),
            Answer::Stat(stat) => (STAT, stat.encode(start)),
            Answer::Pong => (PONG, start),
            Answer::Watched(ids) => (WATCHED, start.ids(ids)),
            Answer::Gone(ids) => (GONE, start.ids(ids)),
            Answer::Ring => (RING, start),
            Answer::Explained(explained) => (EXPLAINED, explained.encode(start)),
            Answer::Controlled(all) => (CONTROLLED, start.list(all, |writer, one| one.encode(writer))),
            Answer::Named { ids, namespaces } => (NAMED, start.u32(*namespaces).ids(ids)),
            Answer::Refused(refusal, why) => (REFUSED, refusal.encode(why, start)),
        };
        Frame::answering(asked, kind, body)
    }

    pub fn decode(frame: &Frame) -> Result<Answer, BadBytes> {
        let mut body = Reader(&frame.body);
        let answer = match frame.kind {
            WELCOME => {
                Answer::Welcome { instance: body.array("an instance")?, arena_bytes: body.u64("a length")? }
            }
            FOUND => Answer::Found(Found::decode(&mut body)?),
            LEASED => Answer::Leased(Leased::decode(&mut body)?),
            BROUGHT => Answer::Brought(Brought::decode_all(&mut body)?),
            RENEWED => Answer::Renewed(body.list("leases", 8, |body| body.u64("a lease"))?),
            RESERVED => Answer::Reserved(body.list("slots", 1, Reservation::decode)?),
            COMMITTED => Answer::Committed(body.list("ends", 1, Commitment::decode)?),
            STAT => Answer::Stat(NodeStat::decode(&mut body)?),
            PONG => Answer::Pong,
            WATCHED => Answer::Watched(body.ids()?),
            GONE => Answer::Gone(body.ids()?),
            RING => Answer::Ring,
            EXPLAINED => Answer::Explained(Box::new(Explained::decode(&mut body)?)),
            CONTROLLED => Answer::Controlled(body.list("chunks", 11, Report::decode)?),
            NAMED => Answer::Named { namespaces: body.u32("namespaces")?, ids: body.ids()? },
            REFUSED => {
                let (refusal, why) = Refusal::decode(&mut body)?;
                Answer::Refused(refusal, why)
            }
            kind => {
                let (what, value) = ("the kind of an answer", kind.into());
                return Err(BadBytes::Value { what, value, allowed: "1 to 5, 7, 8, 12 to 14 and 16 to 22" });
            }
        };
        body.end()?;
        Ok(answer)
    }
}

impl Refusal {
    fn encode(self, why: &str, start: Writer) -> Writer {
        start.u8(KINDS.iter().position(|one| *one == self).unwrap_or_default() as u8).text(why)
    }

    fn decode(body: &mut Reader) -> Result<(Refusal, String), BadBytes> {
        let code = body.u8("a refusal")?;
        let bad = BadBytes::Value { what: "a refusal", value: code.into(), allowed: "0 to 6" };
        Ok((KINDS.get(usize::from(code)).copied().ok_or(bad)?, body.text("a reason")?))
    }
}

impl Reservation {
    fn encode(&self, start: Writer) -> Writer {
        match self {
            Reservation::Slot { slot, offset_bytes } => start.u8(0).u64(*slot).u64(*offset_bytes),
            Reservation::Here => start.u8(1),
            Reservation::Refused(refusal, why) => refusal.encode(why, start.u8(2)),
        }
    }

    fn decode(body: &mut Reader) -> Result<Reservation, BadBytes> {
        Ok(match body.u8(AN_END)? {
            0 => Reservation::Slot { slot: body.u64("a slot")?, offset_bytes: body.u64("an offset")? },
            1 => Reservation::Here,
            2 => {
                let (refusal, why) = Refusal::decode(body)?;
                Reservation::Refused(refusal, why)
            }
            value => return Err(BadBytes::Value { what: AN_END, value: value.into(), allowed: "0 to 2" }),
        })
    }
}

impl Commitment {
    fn encode(&self, start: Writer) -> Writer {
        match self {
            Commitment::Visible => start.u8(0),
            Commitment::Deleted => start.u8(1),
            Commitment::Refused(refusal, why) => refusal.encode(why, start.u8(2)),
        }
    }

    fn decode(body: &mut Reader) -> Result<Commitment, BadBytes> {
        Ok(match body.u8(AN_END)? {
            0 => Commitment::Visible,
            1 => Commitment::Deleted,
            2 => {
                let (refusal, why) = Refusal::decode(body)?;
                Commitment::Refused(refusal, why)
            }
            value => return Err(BadBytes::Value { what: AN_END, value: value.into(), allowed: "0 to 2" }),
        })
    }
}

impl Brought {
    fn encode_all(all: &[Brought], start: Writer) -> Writer {
        let shapes = Shapes::of(all.iter().filter_map(|brought| brought.end.as_ref().ok()));
        shapes.encode(start).list(all, |writer, brought| {
            let head = writer.u32(brought.chunk);
            match &brought.end {
                Ok(place) => place.encode(head.u8(0).u32(shapes.number(place))),
                Err((refusal, why)) => refusal.encode(why, head.u8(1)),
            }
        })
    }

    fn decode_all(body: &mut Reader) -> Result<Vec<Brought>, BadBytes> {
        let shapes = decode_shapes(body)?;
        body.list("chunks", 5, |body| {
            let chunk = body.u32("a chunk's place")?;
            let end = match body.bool(AN_END)? {
                false => Ok(ChunkPlace::decode(body, &shapes)?),
                true => Err(Refusal::decode(body)?),
            };
            Ok(Brought { chunk, end })
        })
    }
}

/// The shapes of chunks, each once: most chunks of a sequence have the same.
struct Shapes<'a>(Vec<&'a ChunkShape>);

impl<'a> Shapes<'a> {
    fn of(all: impl Iterator<Item = &'a ChunkPlace>) -> Shapes<'a> {
        let mut shapes: Vec<&ChunkShape> = Vec::new();
        for place in all {
            if !shapes.contains(&&*place.shape) {
                shapes.push(&place.shape);
            }
        }
        Shapes(shapes)
    }

    fn number(&self, place: &ChunkPlace) -> u32 {
        self.0.iter().position(|shape| **shape == *place.shape).unwrap_or_default() as u32
    }

    fn encode(&self, start: Writer) -> Writer {
        start.list(&self.0, |writer, shape| writer.shape(shape))
    }
}

fn decode_shapes(body: &mut Reader) -> Result<Vec<Arc<ChunkShape>>, BadBytes> {
    body.list("shapes", 4, |body| body.shape().map(Arc::new))
}

impl From<&ReadGuard> for ChunkPlace {
    fn from(guard: &ReadGuard) -> ChunkPlace {
        let (shape, sums) = (Arc::new(guard.shape().clone()), guard.checksums().to_vec());
        ChunkPlace { offset_bytes: guard.offset_bytes(), shape, sums }
    }
}

impl ChunkPlace {
    fn encode(&self, start: Writer) -> Writer {
        start.u64(self.offset_bytes).sums(&self.sums)
    }

    /// Behind the number of its shape.
    fn decode(body: &mut Reader, shapes: &[Arc<ChunkShape>]) -> Result<ChunkPlace, BadBytes> {
        let number = body.u32("a shape")?;
        let what = "the number of a shape";
        let bad = BadBytes::Value { what, value: number.into(), allowed: "one that was given" };
        let shape = Arc::clone(shapes.get(number as usize).ok_or(bad)?);
        let (offset_bytes, sums) = (body.u64("an offset")?, body.sums()?);
        if sums.len() != shape.layers() {
            let (what, value) = ("the number of checksums", sums.len() as u64);
            return Err(BadBytes::Value { what, value, allowed: "one for each layer" });
        }
        Ok(ChunkPlace { offset_bytes, shape, sums })
    }
}

impl Found {
    pub fn chunks(&self) -> u32 {
        self.in_memory.saturating_add(self.on_disk).saturating_add(self.on_peers)
    }

    /// Those of a sequence that is kept in two parts, both of which are needed: as far away as the
    /// farther part.
    pub fn and(self, other: Found) -> Found {
        let on_host = |found: Found| found.in_memory.saturating_add(found.on_disk);
        let in_memory = self.in_memory.min(other.in_memory);
        let here = on_host(self).min(on_host(other));
        let all = self.chunks().min(other.chunks());
        Found { in_memory, on_disk: here - in_memory, on_peers: all - here }
    }

    fn encode(&self, start: Writer) -> Writer {
        start.u32(self.in_memory).u32(self.on_disk).u32(self.on_peers)
    }

    fn decode(body: &mut Reader) -> Result<Found, BadBytes> {
        let mut chunks = || body.u32("chunks");
        Ok(Found { in_memory: chunks()?, on_disk: chunks()?, on_peers: chunks()? })
    }
}

impl Leased {
    fn encode(&self, start: Writer) -> Writer {
        let shapes = Shapes::of(self.places.iter());
        let head = start.u64(self.lease).u64(self.ttl_us);
        let counts = head.u32(self.in_memory).u32(self.on_disk).u32(self.on_peers);
        shapes
            .encode(counts)
            .list(&self.places, |writer, place| place.encode(writer.u32(shapes.number(place))))
    }

    fn decode(body: &mut Reader) -> Result<Leased, BadBytes> {
        let (lease, ttl_us) = (body.u64("a lease")?, body.u64("a time to live")?);
        let (in_memory, on_disk, on_peers) = (body.u32("chunks")?, body.u32("chunks")?, body.u32("chunks")?);
        let shapes = decode_shapes(body)?;
        let places = body.list("chunks", 16, |body| ChunkPlace::decode(body, &shapes))?;
        Ok(Leased { lease, ttl_us, in_memory, on_disk, on_peers, places })
    }
}

impl NodeStat {
    fn encode(&self, start: Writer) -> Writer {
        let memory = [self.capacity_bytes, self.used_bytes, self.chunks, self.corrupt];
        let clients = [self.clients, self.leases, self.slots, self.orphans, self.refused];
        let all = memory.into_iter().chain(clients).chain(self.hits).chain([self.pulled, self.not_pulled]);
        all.fold(start, Writer::u64)
    }

    fn decode(body: &mut Reader) -> Result<NodeStat, BadBytes> {
        let mut next = || body.u64("a counter");
        Ok(NodeStat {
            capacity_bytes: next()?,
            used_bytes: next()?,
            chunks: next()?,
            corrupt: next()?,
            clients: next()?,
            leases: next()?,
            slots: next()?,
            orphans: next()?,
            refused: next()?,
            hits: [next()?, next()?, next()?],
            pulled: next()?,
            not_pulled: next()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples() -> Vec<Answer> {
        let place = |offset_bytes, layers: usize| ChunkPlace {
            offset_bytes,
            shape: Arc::new(ChunkShape::new(vec![100; layers]).unwrap()),
            sums: (0..layers as u32).collect(),
        };
        let refused = || (Refusal::Gone, "slot 3 is not reserved".to_owned());
        let leased = Leased {
            lease: 4,
            ttl_us: 1000,
            in_memory: 3,
            on_disk: 2,
            on_peers: 1,
            places: vec![place(0, 2), place(4096, 2), place(8192, 3)],
        };
        vec![
            Answer::Welcome { instance: [3; 16], arena_bytes: 1 << 40 },
            Answer::Ring,
            Answer::Found(Found { in_memory: 2, on_disk: 3, on_peers: 1 }),
            Answer::Leased(leased),
            Answer::Leased(Leased::default()),
            Answer::Brought(vec![
                Brought { chunk: 3, end: Ok(place(77, 80)) },
                Brought { chunk: 1, end: Err(refused()) },
                Brought { chunk: 2, end: Ok(place(8, 1)) },
                Brought { chunk: 9, end: Ok(place(9, 80)) },
            ]),
            Answer::Renewed(vec![1, 2]),
            Answer::Reserved(vec![
                Reservation::Slot { slot: 1, offset_bytes: 2 },
                Reservation::Here,
                Reservation::Refused(refused().0, refused().1),
            ]),
            Answer::Committed(vec![
                Commitment::Deleted,
                Commitment::Visible,
                Commitment::Refused(refused().0, refused().1),
            ]),
            Answer::Stat(NodeStat { hits: [1, 2, 3], pulled: 9, ..NodeStat::default() }),
            Answer::Pong,
            Answer::Watched(vec![ChunkId::from_bytes([1; 32])]),
            Answer::Gone(vec![ChunkId::from_bytes([2; 32]), ChunkId::from_bytes([3; 32])]),
            Answer::Explained(Box::new(Explained { up_s: 3, ..Explained::default() })),
            Answer::Named { ids: vec![ChunkId::from_bytes([4; 32])], namespaces: 2 },
            Answer::Refused(Refusal::Draining, "the node is shutting down".into()),
        ]
    }

    #[test]
    fn every_answer_comes_back_and_none_can_be_cut_or_lengthened() {
        for answer in samples() {
            let frame = answer.encode(Asked { number: 5, digest: 6 });
            assert_eq!(Answer::decode(&frame).as_ref(), Ok(&answer));
            for cut in 0..frame.body.len() {
                let short = Frame { body: frame.body[..cut].to_vec(), ..frame.clone() };
                assert!(Answer::decode(&short).is_err(), "{answer:?} cut to {cut}");
            }
            let mut long = frame;
            long.body.push(0);
            assert!(Answer::decode(&long).is_err(), "{answer:?} with a byte more");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(kind in 0u16..22, body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Answer::decode(&Frame::new(kind, 0, body));
        }
    }
}
