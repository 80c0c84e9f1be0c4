//! What the suite and a worker say to each other. A worker is a process that runs one store;
//! commands reach it on standard input and answers leave it on standard output. This file knows the
//! frames.
//!
//! A frame is a header and a payload:
//!
//! ```text
//! u32 LE   bytes of the header
//! JSON     the header: an object; "id" pairs an answer with its command, "bytes" is the payload's length
//! bytes    the payload: the value of a `put`, a `hit` or, one after another, of `many`
//! ```
//!
//! Commands may overlap: up to [`COMMANDS_MAX`] are under way at a time, and answers come in any
//! order.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::path::PathBuf;

/// Commands that the suite has under way at a time, at most. A worker must work on that many.
pub const COMMANDS_MAX: usize = 64;
const HEADER_BYTES_MAX: u32 = 1 << 20;
const PAYLOAD_BYTES_MAX: u64 = 1 << 30;

/// The header of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    pub id: u64,
    pub bytes: u64,
    #[serde(flatten)]
    pub what: Do,
}

/// What a store is told to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Do {
    /// Open the store, or make it if the directory is empty. Sent once, before all but `inject`.
    Open(Setup),
    /// Store the payload as `key`. Answered when a `get` would find it.
    Put { key: u64 },
    /// Return a value.
    Get { key: u64 },
    /// Return several values with one call of the store, as engines ask for them.
    GetMany { keys: Vec<u64> },
    /// Forget a value. Afterwards it may be put again with other bytes.
    Delete { key: u64 },
    /// Make durable what was answered before.
    Flush,
    /// Misbehave from now on, below the store: its system calls, not its code.
    Inject(Fault),
    /// Tell how many faults the store has found and counted.
    Stat,
    /// Close the store in an orderly way. The process ends after the answer.
    Close,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Where its files are. Exists; only this store's files are in it.
    pub dir: PathBuf,
    /// Bytes of disk that it may take, everything included.
    pub capacity_bytes: u64,
    /// Bytes of memory for values on their way.
    pub staging_bytes: u64,
    pub value_bytes: u64,
    /// Stands for all that makes values of one engine useless to another: model, layout, ranks.
    pub namespace: String,
}

/// What goes wrong below a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case")]
pub enum Fault {
    /// Nothing any more.
    None,
    /// System calls that move bytes end oddly.
    Io {
        kind: IoFault,
        /// Whether reads do.
        reads: bool,
        /// Whether writes and syncs do.
        writes: bool,
        percent: u8,
    },
    /// The power fails while write number `after_writes` is made, counted from this command on:
    /// what was not synced is kept, lost or torn as `seed` says, and the process is gone.
    PowerLoss {
        /// Writes that are made before the last one.
        after_writes: u64,
        seed: u64,
    },
    /// A byte of a value that is read changes in memory: after the store has read and checked it,
    /// before its user has it.
    Flip {
        /// Of the values that are read.
        percent: u8,
    },
    /// Entries of a ring between the store and its user are seen half written: some words are still
    /// those of the entry before, for good or for a moment.
    Torn {
        /// Whether the store sees requests so.
        requests: bool,
        /// Whether the user sees completions and results so.
        answers: bool,
        percent: u8,
    },
}

/// How a system call ends that moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoFault {
    /// It moves fewer bytes than asked for, and says so.
    Short,
    /// It moves none and says 0.
    Zero,
    Eio,
    /// `ENOSPC`; only writes end so.
    Enospc,
    Eintr,
    /// It moves all bytes, but a page of them from or to another place than asked for.
    Misdirected,
}

/// The header of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub id: u64,
    pub bytes: u64,
    #[serde(flatten)]
    pub what: Is,
}

/// What came of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Is {
    /// Done: of `open`, `put`, `delete`, `flush`, `inject`, `close`.
    Done,
    /// The payload is the value.
    Hit,
    /// The store has no such value.
    Miss,
    /// Of `get_many`: the length of each value, or nothing for a miss. The payload is the values.
    Many {
        /// In the order of the keys.
        lengths: Vec<Option<u64>>,
    },
    /// The store declines, with its reason, and is as before. A store's documented way to say no.
    Refused { reason: String },
    /// The store failed in a way that its interface does not speak of: an exception, a panic.
    Error { reason: String },
    /// This store, or this worker, cannot do that.
    Unsupported { reason: String },
    /// Of `stat`.
    Stat {
        /// Corrupt values and failed I/O that the store has noticed, if it counts them.
        faults: Option<u64>,
        /// Faults that the worker has played since its start, if it counts them.
        #[serde(default)]
        played: Option<u64>,
    },
}

pub fn write_frame(to: &mut impl Write, header: &impl Serialize, payload: &[u8]) -> io::Result<()> {
    let header = serde_json::to_vec(header)?;
    let header_bytes = u32::try_from(header.len()).map_err(io::Error::other)?;
    to.write_all(&header_bytes.to_le_bytes())?;
    to.write_all(&header)?;
    to.write_all(payload)?;
    to.flush()
}

/// Reads one frame, of whose header `payload_bytes` tells the payload's length. `None` at the end
/// of the stream.
pub fn read_frame<H: DeserializeOwned>(
    from: &mut impl Read,
    payload_bytes: impl FnOnce(&H) -> u64,
) -> io::Result<Option<(H, Vec<u8>)>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u32::from_le_bytes(length);
    if length > HEADER_BYTES_MAX {
        return Err(malformed(format!("a header of {length} bytes: {HEADER_BYTES_MAX} are allowed")));
    }
    let mut header = vec![0; length as usize];
    from.read_exact(&mut header)?;
    let header: H = serde_json::from_slice(&header)?;
    let bytes = payload_bytes(&header);
    if bytes > PAYLOAD_BYTES_MAX {
        return Err(malformed(format!("a payload of {bytes} bytes: {PAYLOAD_BYTES_MAX} are allowed")));
    }
    let mut payload = vec![0; bytes as usize];
    from.read_exact(&mut payload)?;
    Ok(Some((header, payload)))
}

fn malformed(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_as_it_went() {
        let fault = Fault::Io { kind: IoFault::Short, reads: true, writes: false, percent: 50 };
        let command = Command { id: 7, bytes: 3, what: Do::Inject(fault) };
        let mut stream = Vec::new();
        write_frame(&mut stream, &command, b"abc").unwrap();
        let (read, payload) = read_frame(&mut &stream[..], |read: &Command| read.bytes).unwrap().unwrap();
        assert_eq!((read, &payload[..]), (command, &b"abc"[..]));
    }

    #[test]
    fn the_words_of_the_protocol_are_those_of_its_documentation() {
        let words = |what| serde_json::to_string(&Command { id: 1, bytes: 0, what }).unwrap();
        assert_eq!(words(Do::GetMany { keys: vec![4] }), r#"{"id":1,"bytes":0,"do":"get_many","keys":[4]}"#);
        let fault = Fault::PowerLoss { after_writes: 9, seed: 2 };
        assert_eq!(
            words(Do::Inject(fault)),
            r#"{"id":1,"bytes":0,"do":"inject","fault":"power_loss","after_writes":9,"seed":2}"#
        );
    }

    #[test]
    fn a_header_or_payload_beyond_its_limit_is_refused_before_it_is_read() {
        let long = (HEADER_BYTES_MAX + 1).to_le_bytes();
        assert!(read_frame(&mut &long[..], |read: &Command| read.bytes).is_err());
        let mut stream = Vec::new();
        write_frame(&mut stream, &Command { id: 1, bytes: u64::MAX, what: Do::Flush }, b"").unwrap();
        assert!(read_frame(&mut &stream[..], |read: &Command| read.bytes).is_err());
    }
}
