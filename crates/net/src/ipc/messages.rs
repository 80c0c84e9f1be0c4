//! What two agents of a host say to each other about memory of GPUs. Pure bytes, behind the channel
//! of a CALL; `docs/reference/wire.md` has them too.
//!
//! ```text
//! open     u8 0; host [16]; pid u64; started u64, in clock ticks since boot; key u64; generation u64
//! begin    u8 1; number u64; u8 0 READ, 1 WRITE; the rest is a list of spans, as of a READ
//! end      u8 2; number u64
//! answer   u8 0 yes, the rest is what was exported
//!          u8 1 it is host memory
//!          u8 2 it cannot be exported; text
//!          u8 3 as FAILED; code u16, text
//! ```

use crate::bytes::{Field, Reader, parse_text, put_text};
use crate::host_process::HostProcess;
use crate::tcp::{Command, Fault, OpKind};

/// Bytes of what is exported at most.
const EXPORTED_BYTES_MAX: usize = 4096;

/// What the asking end says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Question {
    /// May its GPUs reach this region?
    Open { host: [u8; 16], process: HostProcess, key: u64, generation: u64 },
    /// Its GPU is about to touch these bytes.
    Begin { number: u64, op_kind: OpKind, command: Command },
    /// It does so no more.
    End { number: u64 },
}

/// What the owner says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// To `open` with what was exported, to `begin` and `end` with nothing.
    Yes(Vec<u8>),
    HostMemory,
    NotExported(String),
    Fault(Fault),
}

impl Question {
    pub fn put(&self, out: &mut Vec<u8>) {
        match self {
            Question::Open { host, process, key, generation } => {
                (0u8, *host).put(out);
                process.put(out);
                (*key, *generation).put(out);
            }
            Question::Begin { number, op_kind, command } => {
                (1u8, *number, u8::from(*op_kind == OpKind::Write)).put(out);
                command.put(out);
            }
            Question::End { number } => (2u8, *number).put(out),
        }
    }

    /// `None`: these bytes mean nothing.
    pub fn parse(bytes: &[u8]) -> Option<Question> {
        let mut reader = Reader(bytes);
        match reader.get::<u8>()? {
            0 => {
                let (host, process, key, generation) = reader.get()?;
                reader.whole(Question::Open { host, process, key, generation })
            }
            1 => {
                let (number, op_kind): (u64, u8) = reader.get()?;
                let op_kind = match op_kind {
                    0 => OpKind::Read,
                    1 => OpKind::Write,
                    _ => return None,
                };
                let command = Command::parse(reader.0).ok()?;
                Some(Question::Begin { number, op_kind, command })
            }
            2 => {
                let number = reader.get()?;
                reader.whole(Question::End { number })
            }
            _ => None,
        }
    }
}

impl Answer {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Answer::Yes(exported) => {
                out.push(0);
                out.extend(exported);
            }
            Answer::HostMemory => out.push(1),
            Answer::NotExported(why) => {
                out.push(2);
                put_text(why, &mut out);
            }
            Answer::Fault(fault) => {
                out.push(3);
                fault.put(&mut out);
            }
        }
        out
    }

    pub fn parse(bytes: &[u8]) -> Option<Answer> {
        let (code, rest) = bytes.split_first()?;
        match code {
            0 if rest.len() <= EXPORTED_BYTES_MAX => Some(Answer::Yes(rest.to_vec())),
            1 if rest.is_empty() => Some(Answer::HostMemory),
            2 => parse_text(&mut Reader(rest)).map(Answer::NotExported),
            3 => Fault::parse(rest).map(Answer::Fault),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::FaultCode;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_said_is_understood(
            host in any::<[u8; 16]>(), pid in any::<u64>(), number in any::<u64>(), rest in any::<Vec<u8>>()
        ) {
            let process = HostProcess { pid, started: !pid };
            for question in [Question::Open { host, process, key: 1, generation: pid }, Question::End { number }] {
                let mut bytes = Vec::new();
                question.put(&mut bytes);
                prop_assert_eq!(Question::parse(&bytes), Some(question));
                bytes.push(0);
                prop_assert_eq!(Question::parse(&bytes), None);
            }
            let fault = Answer::Fault(Fault::new(FaultCode::NoLease, "why"));
            for answer in [Answer::Yes(rest), Answer::HostMemory, Answer::NotExported("why".into()), fault] {
                prop_assert_eq!(Answer::parse(&answer.to_bytes()), Some(answer));
            }
        }

        #[test]
        fn any_bytes_are_understood_or_not(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = (Question::parse(&bytes), Answer::parse(&bytes));
        }
    }
}
