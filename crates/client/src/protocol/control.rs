//! What a client says of single chunks, by name, and what the node answers of each: that one is to
//! stay, to come into memory, to leave it, or to be forgotten. Pure.

use super::bytes::{BadBytes, Reader, Writer};
use super::explain::Place;
use forebay_kv::ChunkId;

/// Chunks that a Control names at most.
pub const LISTED_MAX: usize = 16_384;

/// What is to become of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Nothing: say where each is.
    List,
    /// Not to be evicted from where it is, for so long.
    Pin {
        ttl_ms: u64,
    },
    Unpin,
    /// To come into memory from the disk or from peers, behind what requests wait for.
    Prefetch,
    /// To leave memory, if it is on disk.
    Demote,
    /// To be gone from this node and from its peers, and its bytes overwritten.
    Forget,
}

/// Chunks of the client's tenant, and what is to become of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Control {
    pub verb: Verb,
    pub ids: Vec<ChunkId>,
}

/// Whether what was wanted of a chunk is done, or will be without further ado.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Accepted,
    /// A part of it.
    Clipped,
    Rejected,
}

/// Why it is not, or not all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It is.
    None,
    /// The time was cut to the longest that there is.
    TtlCut,
    /// The tenant's pins take as much as they may.
    OverBudget,
    NotStored,
    NotPinned,
    /// A chunk that continues it is pinned, or stays in memory.
    Continued,
    InUse,
    Pinned,
    NoDisk,
    /// It is being written to the disk: ask again.
    NotOnDisk,
    /// As many chunks come into memory as may at a time.
    Busy,
    Draining,
    /// A peer did not answer and may still have it: ask again.
    PeersUnreached,
}

/// What the node says of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    pub verdict: Verdict,
    pub reason: Reason,
    /// Where it is when the answer is given.
    pub place: Place,
    /// For how long it is still pinned; 0 if it is not.
    pub pinned_ms: u64,
}

const VERDICTS: [Verdict; 3] = [Verdict::Accepted, Verdict::Clipped, Verdict::Rejected];

const REASONS: [(Reason, &str); 13] = [
    (Reason::None, "none"),
    (Reason::TtlCut, "ttl_cut"),
    (Reason::OverBudget, "over_budget"),
    (Reason::NotStored, "not_stored"),
    (Reason::NotPinned, "not_pinned"),
    (Reason::Continued, "continued"),
    (Reason::InUse, "in_use"),
    (Reason::Pinned, "pinned"),
    (Reason::NoDisk, "no_disk"),
    (Reason::NotOnDisk, "not_on_disk"),
    (Reason::Busy, "busy"),
    (Reason::Draining, "draining"),
    (Reason::PeersUnreached, "peers_unreached"),
];

const PLACES: [(Place, &str); 4] =
    [(Place::Memory, "memory"), (Place::Disk, "disk"), (Place::Peer, "peer"), (Place::Nowhere, "nowhere")];

impl Verb {
    pub const NAMES: [&str; 6] = ["list", "pin", "unpin", "prefetch", "demote", "forget"];

    pub fn name(self) -> &'static str {
        Verb::NAMES[usize::from(self.code())]
    }

    fn code(self) -> u8 {
        match self {
            Verb::List => 0,
            Verb::Pin { .. } => 1,
            Verb::Unpin => 2,
            Verb::Prefetch => 3,
            Verb::Demote => 4,
            Verb::Forget => 5,
        }
    }

    fn decode(body: &mut Reader) -> Result<Verb, BadBytes> {
        let (code, ttl_ms) = (body.u8("a verb")?, body.u64("a time to live")?);
        Ok(match code {
            0 => Verb::List,
            1 => Verb::Pin { ttl_ms },
            2 => Verb::Unpin,
            3 => Verb::Prefetch,
            4 => Verb::Demote,
            5 => Verb::Forget,
            value => return Err(BadBytes::Value { what: "a verb", value: value.into(), allowed: "0 to 5" }),
        })
    }
}

impl Control {
    pub fn check(&self) -> Result<(), BadBytes> {
        match self.ids.len() {
            0..=LISTED_MAX => Ok(()),
            len => Err(BadBytes::Value {
                what: "the number of chunk ids of a request",
                value: len as u64,
                allowed: "0 to 16384",
            }),
        }
    }

    pub(super) fn encode(&self, start: Writer) -> Writer {
        let ttl_ms = match self.verb {
            Verb::Pin { ttl_ms } => ttl_ms,
            _ => 0,
        };
        start.u8(self.verb.code()).u64(ttl_ms).ids(&self.ids)
    }

    pub(super) fn decode(body: &mut Reader) -> Result<Control, BadBytes> {
        Ok(Control { verb: Verb::decode(body)?, ids: body.ids()? })
    }
}

impl Verdict {
    pub const NAMES: [&str; 3] = ["accepted", "clipped", "rejected"];

    pub fn name(self) -> &'static str {
        Verdict::NAMES[self as usize]
    }
}

impl Reason {
    pub fn name(self) -> &'static str {
        REASONS[self as usize].1
    }
}

impl Report {
    pub fn new(verdict: Verdict, reason: Reason) -> Report {
        Report { verdict, reason, place: Place::Nowhere, pinned_ms: 0 }
    }

    pub fn place_name(&self) -> &'static str {
        PLACES.iter().find(|(place, _)| *place == self.place).map_or("nowhere", |(_, name)| name)
    }

    pub(super) fn encode(&self, start: Writer) -> Writer {
        let place = PLACES.iter().position(|(place, _)| *place == self.place).unwrap_or_default() as u8;
        start.u8(self.verdict as u8).u8(self.reason as u8).u8(place).u64(self.pinned_ms)
    }

    pub(super) fn decode(body: &mut Reader) -> Result<Report, BadBytes> {
        let bad = |what, value: u8, allowed| BadBytes::Value { what, value: value.into(), allowed };
        let code = body.u8("a verdict")?;
        let verdict = *VERDICTS.get(usize::from(code)).ok_or(bad("a verdict", code, "0 to 2"))?;
        let code = body.u8("a reason")?;
        let (reason, _) = *REASONS.get(usize::from(code)).ok_or(bad("a reason", code, "0 to 12"))?;
        let code = body.u8("a place")?;
        let (place, _) = *PLACES.get(usize::from(code)).ok_or(bad("a place", code, "0 to 3"))?;
        Ok(Report { verdict, reason, place, pinned_ms: body.u64("a time to live")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_stand_in_the_order_of_their_kinds() {
        assert!(VERDICTS.iter().enumerate().all(|(code, verdict)| *verdict as usize == code));
        assert!(REASONS.iter().enumerate().all(|(code, (reason, _))| *reason as usize == code));
        assert_eq!((Verb::Forget.name(), Verdict::Rejected.name()), ("forget", "rejected"));
        assert_eq!(Reason::PeersUnreached.name(), "peers_unreached");
    }
}
