//! What the two ends of a ring say to each other, and the words that it is made of. Words from the
//! other end may be anything: they are copied once, and what is not allowed is named.

use crate::layout::CONTEXTS_MAX;
use thiserror::Error;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Nothing: it ends at once.
    Nop,
    /// Have the contexts' layers lie in the arena.
    Read,
    /// The layers of a slot of the arena are filled, and these are their checksums.
    Commit,
    /// End the request of another slot, which the first context names, as soon as its bytes are
    /// quiet.
    Cancel,
}

impl Op {
    const ALL: [Op; 4] = [Op::Nop, Op::Read, Op::Commit, Op::Cancel];
}

/// Classes of a request's bytes: 0 is the most urgent. They are those of transfers.
pub const CLASSES: u8 = 4;

/// A request, without its contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Whatever its producer likes: the completion repeats it.
    pub user: u64,
    /// What it may reach: a lease to read, a reserved slot to commit.
    pub lease: u64,
    pub op: Op,
    pub class: u8,
    /// How many contexts it has.
    pub contexts: u16,
    /// How long it is of any use, in microseconds; 0 for as long as it takes.
    pub within_us: u32,
}

/// What of a lease or a slot is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Context {
    /// A chunk's place in the lease, never an offset of a file.
    pub extent: u32,
    pub layer: u16,
    /// The CRC-32C of a layer that is committed.
    pub checksum: u32,
}

/// What became of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContextResult {
    pub status: ContextStatus,
    /// Where the layer lies in the arena.
    pub offset_bytes: u64,
    /// The CRC-32C that it has to have.
    pub checksum: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Error)]
pub enum ContextStatus {
    #[default]
    #[error("done")]
    Done,
    /// The lease has no such chunk, or the chunk no such layer.
    #[error("no such chunk or layer")]
    Outside,
    /// The lease or the chunk is gone.
    #[error("gone")]
    Gone,
    /// It was not read.
    #[error("not read")]
    NotRead,
    /// Too much is under way.
    #[error("too much is under way")]
    Limit,
    /// It was cancelled before it was there.
    #[error("cancelled")]
    Cancelled,
    /// What the ring says of it answers another request. No consumer says so: the producer finds
    /// it.
    #[error("what the ring says of it answers another request")]
    Torn,
}

impl ContextStatus {
    const ALL: [ContextStatus; 6] = [
        ContextStatus::Done,
        ContextStatus::Outside,
        ContextStatus::Gone,
        ContextStatus::NotRead,
        ContextStatus::Limit,
        ContextStatus::Cancelled,
    ];
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// All of its contexts are done.
    Done,
    /// Some are not: the results say which.
    Partial,
    /// It is not what a request may be.
    Malformed,
    /// It is of another epoch.
    Stale,
    /// What it names is not the producer's.
    NoLease,
}

impl Status {
    const ALL: [Status; 5] =
        [Status::Done, Status::Partial, Status::Malformed, Status::Stale, Status::NoLease];
}

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    pub user: u64,
    pub slot: u16,
    pub status: Status,
    /// Contexts that are done.
    pub contexts_done: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// Why a request is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadRequest {
    #[error("op is {value}; allowed are 0 to 3")]
    Op { value: u8 },
    #[error("class is {value}; allowed are 0 to {}", CLASSES - 1)]
    Class { value: u8 },
    #[error("contexts is {value}; a slot has 1 to {limit}")]
    Contexts { value: u16, limit: u16 },
    #[error("{what} is {value:#x}, and has to be 0")]
    Reserved {
        /// The words of the request, or the flags of a context.
        what: &'static str,
        value: u64,
    },
}

impl Request {
    /// All words of it but the sequence.
    pub(crate) fn words(&self, epoch: u64) -> [u64; 7] {
        let Request { user, lease, op, class, contexts, within_us } = *self;
        let head = op as u64 | u64::from(class) << 8 | u64::from(contexts) << 16 | u64::from(within_us) << 32;
        [user, lease, epoch, head, 0, 0, 0]
    }

    /// The request, of a slot of so many contexts. The epoch is the caller's to compare.
    pub(crate) fn decode(words: [u64; 7], limit: u16) -> Result<Request, BadRequest> {
        let [user, lease, _, head, reserved @ ..] = words;
        if let Some(value) = reserved.into_iter().find(|value| *value != 0) {
            return Err(BadRequest::Reserved { what: "a reserved word", value });
        }
        let [op, class] = [head as u8, (head >> 8) as u8];
        let (contexts, within_us) = ((head >> 16) as u16, (head >> 32) as u32);
        let known = Op::ALL.get(usize::from(op)).copied();
        let op = known.ok_or(BadRequest::Op { value: op })?;
        if class >= CLASSES {
            return Err(BadRequest::Class { value: class });
        }
        let limit = limit.min(CONTEXTS_MAX);
        let most = if op == Op::Cancel { 1 } else { limit };
        if op != Op::Nop && !(1..=most).contains(&contexts) {
            return Err(BadRequest::Contexts { value: contexts, limit: most });
        }
        let contexts = if op == Op::Nop { 0 } else { contexts };
        Ok(Request { user, lease, op, class, contexts, within_us })
    }
}

/// An odd number whose bits look random.
const ECHO_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Context {
    /// What a result repeats of the request and the context that it belongs to. So the producer
    /// finds a result of another use of the slot, and one of a request that the consumer has not
    /// read as it was written.
    pub(crate) fn echo(&self, user: u64, lease: u64) -> u16 {
        let [place, _] = self.words();
        let mix = |sum: u64, word: u64| sum.wrapping_add(word).wrapping_mul(ECHO_FACTOR);
        (mix(mix(mix(0, user), lease), place) >> 48) as u16
    }

    pub(crate) fn words(&self) -> [u64; 2] {
        [u64::from(self.extent) | u64::from(self.layer) << 32, self.checksum.into()]
    }

    pub(crate) fn decode([place, sum]: [u64; 2]) -> Result<Context, BadRequest> {
        let (flags, high) = (place >> 48, sum >> 32);
        if flags != 0 || high != 0 {
            let value = if flags != 0 { flags } else { high };
            return Err(BadRequest::Reserved { what: "a context's flags", value });
        }
        Ok(Context { extent: place as u32, layer: (place >> 32) as u16, checksum: sum as u32 })
    }
}

impl ContextResult {
    /// A context that is not done.
    pub fn failed(status: ContextStatus) -> ContextResult {
        ContextResult { status, ..ContextResult::default() }
    }

    pub(crate) fn words(&self, echo: u16) -> [u64; 2] {
        let status = self.status as u64;
        [self.offset_bytes, u64::from(self.checksum) | status << 32 | u64::from(echo) << 48]
    }

    /// As the consumer wrote it, if it says this echo or none is expected. What is not known is not
    /// done.
    pub(crate) fn decode([offset_bytes, rest]: [u64; 2], echo: Option<u16>) -> ContextResult {
        if echo.is_some_and(|echo| echo != (rest >> 48) as u16) {
            return ContextResult::failed(ContextStatus::Torn);
        }
        let status = ContextStatus::ALL.get(usize::from((rest >> 32) as u16)).copied();
        let status = status.unwrap_or(ContextStatus::NotRead);
        ContextResult { status, offset_bytes, checksum: rest as u32 }
    }
}

impl Completion {
    pub(crate) fn words(&self) -> [u64; 3] {
        let Completion { user, slot, status, contexts_done, bytes } = *self;
        [user, status as u64 | u64::from(slot) << 16 | u64::from(contexts_done) << 32, bytes]
    }

    pub(crate) fn decode([user, head, bytes]: [u64; 3]) -> Option<Completion> {
        let status = *Status::ALL.get(usize::from(head as u16))?;
        let (slot, contexts_done) = ((head >> 16) as u16, (head >> 32) as u32);
        Some(Completion { user, slot, status, contexts_done, bytes })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(
            (user, lease, class) in (any::<u64>(), any::<u64>(), 0..CLASSES),
            (op, contexts, within_us) in (1usize..3, 1..=CONTEXTS_MAX, any::<u32>()),
            (extent, layer, checksum, offset_bytes) in (any::<u32>(), any::<u16>(), any::<u32>(), any::<u64>()),
            (place, slot, contexts_done) in (0usize..5, any::<u16>(), any::<u32>()),
        ) {
            let request = Request { user, lease, op: Op::ALL[op], class, contexts, within_us };
            prop_assert_eq!(Request::decode(request.words(7), CONTEXTS_MAX), Ok(request));
            let context = Context { extent, layer, checksum };
            prop_assert_eq!(Context::decode(context.words()), Ok(context));
            let result = ContextResult { status: ContextStatus::ALL[place], offset_bytes, checksum };
            prop_assert_eq!(ContextResult::decode(result.words(slot), Some(slot)), result);
            prop_assert_eq!(ContextResult::decode(result.words(slot), None), result);
            let other = ContextResult::decode(result.words(slot), Some(!slot));
            prop_assert_eq!(other, ContextResult::failed(ContextStatus::Torn));
            let status = Status::ALL[place];
            let completion = Completion { user, slot, status, contexts_done, bytes: offset_bytes };
            prop_assert_eq!(Completion::decode(completion.words()), Some(completion));
        }

        #[test]
        fn words_are_a_request_only_if_they_are_what_it_writes(
            (user, lease, epoch, high) in (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>()),
            (op, class, contexts, limit) in (0u8..6, 0u8..6, 0u16..300, 1..=CONTEXTS_MAX),
        ) {
            let head = u64::from(op) | u64::from(class) << 8 | u64::from(contexts) << 16;
            let words = [user, lease, epoch, head | u64::from(high) << 32, 0, 0, 0];
            let found = Request::decode(words, limit);
            let most = if op == Op::Cancel as u8 { 1 } else { limit };
            let is_good = op < 4 && class < 4 && (op == 0 || (1..=most).contains(&contexts));
            prop_assert_eq!(found.is_ok(), is_good, "{:?}", found);
            if let Ok(request) = found {
                prop_assert!(op == 0 || request.words(epoch) == words);
            }
        }
    }

    #[test]
    fn a_bad_request_is_named_with_what_is_allowed() {
        let good = Request { user: 1, lease: 2, op: Op::Read, class: 0, contexts: 4, within_us: 0 };
        let with = |change: &dyn Fn(&mut [u64; 7])| {
            let mut words = good.words(1);
            change(&mut words);
            Request::decode(words, 8).unwrap_err().to_string()
        };
        assert_eq!(with(&|words| words[3] |= 0xff), "op is 255; allowed are 0 to 3");
        assert_eq!(with(&|words| words[3] |= 4 << 8), "class is 4; allowed are 0 to 3");
        assert_eq!(with(&|words| words[3] ^= 4 << 16), "contexts is 0; a slot has 1 to 8");
        assert_eq!(with(&|words| words[3] ^= 13 << 16), "contexts is 9; a slot has 1 to 8");
        assert_eq!(with(&|words| words[5] = 16), "a reserved word is 0x10, and has to be 0");
        let flags = Context::decode([1 << 50, 0]).unwrap_err().to_string();
        assert_eq!(flags, "a context's flags is 0x4, and has to be 0");
    }
}
