//! What a client asks of its node, as values and as the bytes of frames. Pure.

use super::bytes::{BadBytes, Reader, Writer};
use super::control::Control;
use super::explain::{Description, Outcome, Prompt, check_tokens};
use super::frame::Frame;
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, TenantId};
use forebay_transfer::{Class, TraceContext};

/// The first bytes of every connection.
pub const MAGIC: [u8; 8] = *b"FBLOCAL\n";
/// The version that this program speaks, and no other.
pub const VERSION: u16 = 8;
pub const TOKEN_BYTES_MAX: usize = 4096;
pub const NAME_BYTES_MAX: usize = 256;
/// Chunks that can be named at a time.
pub const IDS_MAX: usize = 65_536;
/// Chunks that a Reserve, a Commit or a Bring names at most; each names one at least.
pub const TOGETHER_MAX: usize = 256;

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

/// A chunk that is to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewChunk {
    pub id: ChunkId,
    pub parent: Option<ChunkId>,
}

/// A slot that the chunk is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filled {
    pub slot: u64,
    /// The CRC-32C of each layer.
    pub sums: Vec<u32>,
}

/// What a client says. Those that are not answered say so.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// The first frame.
    Hello(Hello),
    /// How much of a sequence is there?
    Lookup(Vec<ChunkId>),
    Lease {
        /// For how long, unless it is renewed.
        ttl_us: u64,
        /// Whether that is to load it. Otherwise it is only kept: that is no hit, and where it lies
        /// is not said.
        to_load: bool,
        ids: Vec<ChunkId>,
    },
    /// Have chunks of a lease lie in the arena, wherever they are. Answered as they come, in as
    /// many answers as it takes.
    Bring {
        lease: u64,
        /// Their places there.
        chunks: Vec<u32>,
        class: Class,
        /// How long they are of any use.
        within_us: Option<u64>,
    },
    /// Let leases live on.
    Renew {
        /// For how long.
        ttl_us: u64,
        leases: Vec<u64>,
    },
    /// End leases. Not answered.
    Release(Vec<u64>),
    Reserve {
        /// The lengths of the layers of each.
        shape: ChunkShape,
        chunks: Vec<NewChunk>,
    },
    /// Chunks are in their slots.
    Commit(Vec<Filled>),
    /// The chunk will never be in its slot, and nobody writes it any more. Not answered.
    Abort { slot: u64 },
    /// What a chunk of a lease has for bytes is not what was stored. Not answered.
    Corrupt {
        lease: u64,
        /// The chunk's place there.
        chunk: u32,
    },
    /// A request uses these chunks. Not answered.
    Used {
        /// Length of each.
        chunk_bytes: u64,
        ids: Vec<ChunkId>,
    },
    /// Say when these chunks have gone, and now which of them are not there.
    Watch(Vec<ChunkId>),
    /// The request that comes next, with the same number, is part of this span. Not answered.
    Traced(TraceContext),
    /// The request that comes next, with the same number, is for this tenant and not for the
    /// client's own. Not answered.
    For(TenantId),
    /// What a namespace is made of whose chunks the client uses. Not answered.
    Describe(Description),
    /// What a request found and loaded. Not answered.
    Outcome(Outcome),
    /// Why was this no hit? For root and the node's own user.
    Explain(Prompt),
    /// What is to become of chunks, by name.
    Control(Control),
    /// What are the chunks of a prompt called in one of the namespaces that clients of this tenant
    /// have described? For root and the node's own user.
    NameChunks { tokens: Vec<u32>, namespace: u32 },
    /// Make a ring for this client's requests. It comes with the answer.
    OpenRing,
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
const DESCRIBE: u16 = 17;
const OUTCOME: u16 = 18;
const EXPLAIN: u16 = 19;
const TRACED: u16 = 20;
const OPEN_RING: u16 = 21;
const CONTROL: u16 = 22;
const NAME_CHUNKS: u16 = 23;
const FOR: u16 = 24;

impl Request {
    /// Whether a node takes it: on whoever names too many chunks at once it hangs up.
    pub fn check(&self) -> Result<(), BadBytes> {
        match self {
            Request::Lookup(ids)
            | Request::Lease { ids, .. }
            | Request::Used { ids, .. }
            | Request::Explain(Prompt::Ids(ids))
            | Request::Watch(ids) => check_number(ids),
            Request::Reserve { chunks, .. } => check_together(chunks.len()),
            Request::Commit(filled) => check_together(filled.len()),
            Request::Bring { chunks, .. } => check_together(chunks.len()),
            Request::Describe(described) => described.check(),
            Request::Outcome(outcome) => outcome.check(),
            Request::Explain(prompt) => prompt.check(),
            Request::Control(control) => control.check(),
            Request::NameChunks { tokens, .. } => check_tokens(tokens),
            _ => Ok(()),
        }
    }

    pub fn encode(&self, number: u64) -> Frame {
        let start = Writer::default();
        let (kind, Writer(body)) = match self {
            Request::Hello(hello) => (HELLO, hello.encode(start)),
            Request::Lookup(ids) => (LOOKUP, start.ids(ids)),
            Request::Lease { ttl_us, to_load, ids } => {
                (LEASE, start.u64(*ttl_us).u8((*to_load).into()).ids(ids))
            }
            Request::Bring { lease, chunks, class, within_us } => {
                let head = start.u64(*lease).class(*class).u64(within_us.unwrap_or(u64::MAX));
                (BRING, head.list(chunks, |writer, chunk| writer.u32(*chunk)))
            }
            Request::Renew { ttl_us, leases } => (RENEW, numbers(start.u64(*ttl_us), leases)),
            Request::Release(leases) => (RELEASE, numbers(start, leases)),
            Request::Reserve { shape, chunks } => {
                (RESERVE, start.shape(shape).list(chunks, |writer, chunk| chunk.encode(writer)))
            }
            Request::Commit(filled) => {
                let one = |writer: Writer, filled: &Filled| writer.u64(filled.slot).sums(&filled.sums);
                (COMMIT, start.list(filled, one))
            }
            Request::Abort { slot } => (ABORT, start.u64(*slot)),
            Request::Corrupt { lease, chunk } => (CORRUPT, start.u64(*lease).u32(*chunk)),
            Request::Used { chunk_bytes, ids } => (USED, start.u64(*chunk_bytes).ids(ids)),
            Request::Watch(ids) => (WATCH, start.ids(ids)),
            Request::Traced(of) => (TRACED, start.bytes(&of.trace).bytes(&of.span).u8(of.sampled.into())),
            Request::For(tenant) => (FOR, start.u16(tenant.0)),
            Request::Describe(described) => (DESCRIBE, described.encode(start)),
            Request::Outcome(outcome) => (OUTCOME, outcome.encode(start)),
            Request::Explain(prompt) => (EXPLAIN, prompt.encode(start)),
            Request::Control(control) => (CONTROL, control.encode(start)),
            Request::NameChunks { tokens, namespace } => {
                let head = start.u32(*namespace);
                (NAME_CHUNKS, head.list(tokens, |writer, token| writer.u32(*token)))
            }
            Request::OpenRing => (OPEN_RING, start),
            Request::Stat => (STAT, start),
            Request::Ping => (PING, start),
            Request::Bye => (BYE, start),
        };
        Frame::new(kind, number, body)
    }

    /// What it is called where it is worth a trace: it is answered, and more than a look at
    /// counters.
    pub fn traced_as(&self) -> Option<&'static str> {
        match self {
            Request::Lookup(_) => Some("lookup"),
            Request::Lease { .. } => Some("lease"),
            Request::Bring { .. } => Some("bring"),
            Request::Renew { .. } => Some("renew"),
            Request::Reserve { .. } => Some("reserve"),
            Request::Commit { .. } => Some("commit"),
            Request::Watch(_) => Some("watch"),
            Request::Explain(_) => Some("explain"),
            Request::Control(control) => Some(control.verb.name()),
            Request::NameChunks { .. } => Some("name_chunks"),
            _ => None,
        }
    }

    pub fn decode(frame: &Frame) -> Result<Request, BadBytes> {
        let mut body = Reader(&frame.body);
        let request = match frame.kind {
            HELLO => Request::Hello(Hello::decode(&mut body)?),
            LOOKUP => Request::Lookup(body.ids()?),
            LEASE => Request::Lease {
                ttl_us: body.u64("a time to live")?,
                to_load: body.bool("whether it is to be loaded")?,
                ids: body.ids()?,
            },
            BRING => Request::Bring {
                lease: body.u64("a lease")?,
                class: body.class()?,
                within_us: Some(body.u64("a deadline")?).filter(|within_us| *within_us != u64::MAX),
                chunks: body.list("places of chunks", 4, |body| body.u32("a chunk's place"))?,
            },
            RENEW => Request::Renew { ttl_us: body.u64("a time to live")?, leases: leases(&mut body)? },
            RELEASE => Request::Release(leases(&mut body)?),
            RESERVE => {
                Request::Reserve { shape: body.shape()?, chunks: body.list("chunks", 65, NewChunk::decode)? }
            }
            COMMIT => Request::Commit(
                body.list("slots", 12, |body| Ok(Filled { slot: body.u64("a slot")?, sums: body.sums()? }))?,
            ),
            ABORT => Request::Abort { slot: body.u64("a slot")? },
            CORRUPT => Request::Corrupt { lease: body.u64("a lease")?, chunk: body.u32("a chunk's place")? },
            USED => Request::Used { chunk_bytes: body.u64("a chunk's length")?, ids: body.ids()? },
            WATCH => Request::Watch(body.ids()?),
            TRACED => Request::Traced(TraceContext {
                trace: body.array("a trace")?,
                span: body.array("a span")?,
                sampled: body.bool("whether it is sampled")?,
            }),
            FOR => Request::For(tenant(&mut body)?),
            DESCRIBE => Request::Describe(Description::decode(&mut body)?),
            OUTCOME => Request::Outcome(Outcome::decode(&mut body)?),
            EXPLAIN => Request::Explain(Prompt::decode(&mut body)?),
            CONTROL => Request::Control(Control::decode(&mut body)?),
            NAME_CHUNKS => Request::NameChunks {
                namespace: body.u32("a namespace's place")?,
                tokens: body.list("tokens", 4, |body| body.u32("a token"))?,
            },
            OPEN_RING => Request::OpenRing,
            STAT => Request::Stat,
            PING => Request::Ping,
            BYE => Request::Bye,
            kind => return Err(value("the kind of a request", kind.into(), "1 to 24")),
        };
        body.end()?;
        request.check()?;
        Ok(request)
    }
}

impl NewChunk {
    fn encode(&self, start: Writer) -> Writer {
        let named = start.bytes(self.id.as_bytes()).u8(self.parent.is_some().into());
        named.bytes(&self.parent.map_or([0; 32], |parent| *parent.as_bytes()))
    }

    fn decode(body: &mut Reader) -> Result<NewChunk, BadBytes> {
        let (id, has_parent, parent) = (body.id()?, body.bool("whether there is a parent")?, body.id()?);
        Ok(NewChunk { id, parent: has_parent.then_some(parent) })
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
            version => return Err(value("the protocol's version", version.into(), "8")),
        }
        let token = body.list("a token", 1, |body| body.u8("a token"))?;
        let (name, tenant) = (body.text("a name")?, tenant(body)?);
        if token.len() > TOKEN_BYTES_MAX {
            return Err(value("the length of a token", token.len() as u64, "0 to 4096"));
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(value("the length of a name", name.len() as u64, "0 to 256"));
        }
        Ok(Hello { token, name, tenant })
    }
}

fn tenant(body: &mut Reader) -> Result<TenantId, BadBytes> {
    match TenantId(body.u16("a tenant")?) {
        TenantId::NOBODY => Err(value("a tenant", TenantId::NOBODY.0.into(), "0 to 65534")),
        tenant => Ok(tenant),
    }
}

fn numbers(start: Writer, numbers: &[u64]) -> Writer {
    start.list(numbers, |writer, number| writer.u64(*number))
}

fn leases(body: &mut Reader) -> Result<Vec<u64>, BadBytes> {
    body.list("leases", 8, |body| body.u64("a lease"))
}

fn check_number(ids: &[ChunkId]) -> Result<(), BadBytes> {
    match ids.len() {
        0..=IDS_MAX => Ok(()),
        len => Err(value("the number of chunk ids", len as u64, "0 to 65536")),
    }
}

fn check_together(chunks: usize) -> Result<(), BadBytes> {
    match chunks {
        1..=TOGETHER_MAX => Ok(()),
        _ => Err(value("the number of chunks", chunks as u64, "1 to 256")),
    }
}

fn value(what: &'static str, value: u64, allowed: &'static str) -> BadBytes {
    BadBytes::Value { what, value, allowed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::control::Verb;
    use forebay_kv::NamespaceKey;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn samples() -> Vec<Request> {
        let id = |byte| ChunkId::from_bytes([byte; 32]);
        let hello = Hello { token: b"secret".to_vec(), name: "engine 3".into(), tenant: TenantId(7) };
        let shape = ChunkShape::new([10, 10, 12]).unwrap();
        let new = |parent| NewChunk { id: id(3), parent };
        let filled = |slot, sums| Filled { slot, sums: (0..sums).collect() };
        vec![
            Request::Hello(hello),
            Request::Lookup(vec![id(1), id(2)]),
            Request::Lease { ttl_us: 5, to_load: true, ids: vec![] },
            Request::Lease { ttl_us: 5, to_load: false, ids: vec![id(4)] },
            Request::Bring { lease: 3, chunks: vec![4], class: Class::Prefetch, within_us: None },
            Request::Bring { lease: 3, chunks: vec![4, 0, 9], class: Class::Scrub, within_us: Some(9) },
            Request::Renew { ttl_us: 6, leases: vec![1, u64::MAX] },
            Request::Release(vec![1]),
            Request::Reserve { shape, chunks: vec![new(None), new(Some(id(0)))] },
            Request::Commit(vec![filled(8, 3), filled(9, 0)]),
            Request::Abort { slot: 8 },
            Request::Corrupt { lease: 1, chunk: 0 },
            Request::Used { chunk_bytes: 77, ids: vec![id(9)] },
            Request::Watch(vec![id(5), id(6)]),
            Request::Traced(TraceContext { trace: [7; 16], span: [8; 8], sampled: true }),
            Request::For(TenantId(3)),
            Request::Describe(Description {
                key: NamespaceKey::from_bytes([2; 32]),
                chunk_tokens: 64,
                facts: BTreeMap::from([("dtype".into(), "bfloat16".into()), ("salt".into(), String::new())]),
            }),
            Request::Outcome(Outcome {
                request: "cmpl-1".into(),
                reason: "not_found".into(),
                prompt_tokens: 9,
                held_tokens: 1,
                loaded_tokens: 2,
                found: [3, 4, 5],
                missing: vec![id(7)],
            }),
            Request::Explain(Prompt::Tokens(vec![1, u32::MAX])),
            Request::Explain(Prompt::Ids(vec![id(1)])),
            Request::Explain(Prompt::Request("cmpl-1".into())),
            Request::Control(Control { verb: Verb::Pin { ttl_ms: 9 }, ids: vec![id(1), id(2)] }),
            Request::Control(Control { verb: Verb::Forget, ids: vec![] }),
            Request::NameChunks { tokens: vec![1, u32::MAX], namespace: 2 },
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

    #[test]
    fn a_message_names_no_more_chunks_than_it_may_and_one_at_least() {
        let bring = |chunks| Request::Bring { lease: 1, chunks, class: Class::Demand, within_us: None };
        let commit = |slots| {
            Request::Commit((0..slots).map(|slot| Filled { slot: slot as u64, sums: vec![1] }).collect())
        };
        let reserve = |chunks| {
            let one = NewChunk { id: ChunkId::from_bytes([1; 32]), parent: None };
            Request::Reserve { shape: ChunkShape::new([10]).unwrap(), chunks: vec![one; chunks] }
        };
        for (chunks, is_right) in [(0, false), (1, true), (TOGETHER_MAX, true), (TOGETHER_MAX + 1, false)] {
            for request in [bring(vec![0; chunks]), commit(chunks), reserve(chunks)] {
                assert_eq!(request.check().is_ok(), is_right, "{request:?}");
                assert_eq!(Request::decode(&request.encode(1)).is_ok(), is_right, "{request:?}");
            }
        }
    }

    #[test]
    fn the_longest_messages_fit_into_a_frame() {
        let layers = forebay_store::MAX_LAYERS;
        let filled = Filled { slot: 1, sums: vec![0; layers] };
        let shape = ChunkShape::new((1..=layers as u64).collect::<Vec<_>>()).unwrap();
        let one = NewChunk { id: ChunkId::from_bytes([1; 32]), parent: None };
        let reserve = Request::Reserve { shape, chunks: vec![one; TOGETHER_MAX] };
        for request in [Request::Commit(vec![filled; TOGETHER_MAX]), reserve] {
            assert!(request.encode(1).body.len() <= super::super::frame::BODY_BYTES_MAX);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(kind in 0u16..22, body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::decode(&Frame::new(kind, 0, body));
        }
    }
}
