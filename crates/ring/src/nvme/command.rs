//! The submission queue entry: the commands that Forebay uses, as values, and their 64 bytes. It
//! knows which fields a command has and what they allow, and nothing of queues or of memory.

use super::prp::Prp;
use super::sgl::Descriptor;
use thiserror::Error;

/// Bytes of a submission queue entry.
pub const ENTRY_BYTES: usize = 64;
/// The most blocks of a read or write: the field is 16 bits wide and 0 means 1.
pub const MAX_BLOCKS: u32 = 1 << 16;
/// The most entries of a queue, and the most queues: these fields are of the same kind.
pub const MAX_QUEUE_ENTRIES: u32 = 1 << 16;

const PSDT_SGL: u32 = 1 << 14;
const FORCE_UNIT_ACCESS: u32 = 1 << 30;
const PHYSICALLY_CONTIGUOUS: u32 = 1;
const INTERRUPTS_ENABLED: u32 = 1 << 1;
const FEATURE_NUMBER_OF_QUEUES: u32 = 7;
const CNS_NAMESPACE: u32 = 0;
const CNS_CONTROLLER: u32 = 1;

/// Where a command's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPointer {
    Prp(Prp),
    /// The one descriptor in the command: a data block, or the segment that lists them.
    Sgl(Descriptor),
}

/// A command, without its identifier, which the queue gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Read {
        namespace: u32,
        first_block: u64,
        blocks: u32,
        data: DataPointer,
    },
    Write {
        namespace: u32,
        first_block: u64,
        blocks: u32,
        data: DataPointer,
        is_durable: bool,
    },
    Flush {
        namespace: u32,
    },
    IdentifyController {
        data: Prp,
    },
    IdentifyNamespace {
        namespace: u32,
        data: Prp,
    },
    /// Without an interrupt vector, the host polls.
    CreateCompletionQueue {
        queue: u16,
        entries: u32,
        address: u64,
        interrupt: Option<u16>,
    },
    CreateSubmissionQueue {
        queue: u16,
        entries: u32,
        address: u64,
        completion_queue: u16,
    },
    DeleteSubmissionQueue {
        queue: u16,
    },
    DeleteCompletionQueue {
        queue: u16,
    },
    SetNumberOfQueues {
        submission: u32,
        completion: u32,
    },
}

/// Why a command has no encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CommandError {
    #[error("blocks is {0}; 1 to 65,536 are allowed")]
    Blocks(u32),
    #[error("first_block {first_block} and {blocks} blocks go beyond the last 64-bit block address")]
    LastBlock { first_block: u64, blocks: u32 },
    #[error("namespace is {0}; 1 to 4,294,967,294 are allowed")]
    Namespace(u32),
    #[error("entries is {0}; 2 to 65,536 are allowed")]
    QueueEntries(u32),
    #[error("queue is 0, which is the admin queue; 1 to 65,535 are allowed")]
    AdminQueue,
    #[error("address is {0:#x}; a queue begins at a multiple of 4,096")]
    QueueAddress(u64),
    #[error("number of queues is {0}; 1 to 65,535 are allowed")]
    NumberOfQueues(u32),
}

impl Command {
    /// The entry with this command identifier.
    pub fn encode(&self, cid: u16) -> Result<[u8; ENTRY_BYTES], CommandError> {
        let words = self.words()?;
        let mut entry = [0; ENTRY_BYTES];
        for (to, word) in entry.chunks_exact_mut(4).zip(words.0) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        entry[2..4].copy_from_slice(&cid.to_le_bytes());
        Ok(entry)
    }

    fn words(&self) -> Result<Words, CommandError> {
        match *self {
            Command::Read { namespace, first_block, blocks, data } => {
                Words::new(0x02).blocks(namespace, first_block, blocks, data)
            }
            Command::Write { namespace, first_block, blocks, data, is_durable } => {
                let mut words = Words::new(0x01).blocks(namespace, first_block, blocks, data)?;
                words.0[12] |= if is_durable { FORCE_UNIT_ACCESS } else { 0 };
                Ok(words)
            }
            Command::Flush { namespace } => Words::new(0x00).namespace(namespace),
            Command::IdentifyController { data } => Ok(Words::new(0x06).prp(data).with(10, CNS_CONTROLLER)),
            Command::IdentifyNamespace { namespace, data } => {
                Ok(Words::new(0x06).namespace(namespace)?.prp(data).with(10, CNS_NAMESPACE))
            }
            Command::CreateCompletionQueue { queue, entries, address, interrupt } => {
                let words = Words::new(0x05).queue(queue)?.ring(queue, entries, address)?;
                let vector = interrupt.map_or(0, |vector| u32::from(vector) << 16 | INTERRUPTS_ENABLED);
                Ok(words.with(11, vector | PHYSICALLY_CONTIGUOUS))
            }
            Command::CreateSubmissionQueue { queue, entries, address, completion_queue } => {
                let words = Words::new(0x01).queue(queue)?.queue(completion_queue)?;
                let words = words.ring(queue, entries, address)?;
                Ok(words.with(11, u32::from(completion_queue) << 16 | PHYSICALLY_CONTIGUOUS))
            }
            Command::DeleteSubmissionQueue { queue } => Words::new(0x00).queue(queue),
            Command::DeleteCompletionQueue { queue } => Words::new(0x04).queue(queue),
            Command::SetNumberOfQueues { submission, completion } => {
                let numbers = count(completion)? << 16 | count(submission)?;
                Ok(Words::new(0x09).with(10, FEATURE_NUMBER_OF_QUEUES).with(11, numbers))
            }
        }
    }
}

/// A number of queues as its field has it, one less.
fn count(queues: u32) -> Result<u32, CommandError> {
    match queues {
        1..=0xffff => Ok(queues - 1),
        _ => Err(CommandError::NumberOfQueues(queues)),
    }
}

/// The sixteen words of an entry.
#[derive(Clone, Copy)]
struct Words([u32; ENTRY_BYTES / 4]);

impl Words {
    fn new(opcode: u32) -> Words {
        let mut words = [0; ENTRY_BYTES / 4];
        words[0] = opcode;
        Words(words)
    }

    fn with(mut self, word: usize, value: u32) -> Words {
        self.0[word] = value;
        self
    }

    fn with_pair(self, word: usize, value: u64) -> Words {
        self.with(word, value as u32).with(word + 1, (value >> 32) as u32)
    }

    fn namespace(self, namespace: u32) -> Result<Words, CommandError> {
        // All ones would name every namespace of the drive.
        match namespace {
            0 | u32::MAX => Err(CommandError::Namespace(namespace)),
            _ => Ok(self.with(1, namespace)),
        }
    }

    fn prp(self, data: Prp) -> Words {
        self.with_pair(6, data.prp1).with_pair(8, data.prp2)
    }

    fn blocks(
        self,
        namespace: u32,
        first_block: u64,
        blocks: u32,
        data: DataPointer,
    ) -> Result<Words, CommandError> {
        if !(1..=MAX_BLOCKS).contains(&blocks) {
            return Err(CommandError::Blocks(blocks));
        }
        if first_block.checked_add(u64::from(blocks) - 1).is_none() {
            return Err(CommandError::LastBlock { first_block, blocks });
        }
        let words = self.namespace(namespace)?.with_pair(10, first_block).with(12, blocks - 1);
        Ok(match data {
            DataPointer::Prp(prp) => words.prp(prp),
            DataPointer::Sgl(descriptor) => {
                let (low, high) = descriptor.halves();
                words.with(0, words.0[0] | PSDT_SGL).with_pair(6, low).with_pair(8, high)
            }
        })
    }

    /// Checks that this is a queue for I/O.
    fn queue(self, queue: u16) -> Result<Words, CommandError> {
        match queue {
            0 => Err(CommandError::AdminQueue),
            _ => Ok(self.with(10, u32::from(queue))),
        }
    }

    fn ring(self, queue: u16, entries: u32, address: u64) -> Result<Words, CommandError> {
        if !(2..=MAX_QUEUE_ENTRIES).contains(&entries) {
            return Err(CommandError::QueueEntries(entries));
        }
        if !address.is_multiple_of(4096) {
            return Err(CommandError::QueueAddress(address));
        }
        Ok(self.with_pair(6, address).with(10, (entries - 1) << 16 | u32::from(queue)))
    }
}
