//! Commands and queues of NVMe drives, as values and as the bytes of the specification. Pure: bytes
//! are written into memory that the caller gives, and the caller rings doorbells. What the words
//! mean is in the NVMe base and NVM command set specifications, revision 2.0.

pub mod capabilities;
pub mod command;
pub mod completion;
pub mod format;
pub mod identify;
pub mod memory;
pub mod prp;
pub mod queue;
pub mod sgl;
pub mod split;

pub use capabilities::Capabilities;
pub use command::{Command, CommandError, DataPointer};
pub use completion::{Completion, Status};
pub use format::Format;
pub use identify::{ControllerIdentity, IdentifyError, NamespaceIdentity, SglSupport};
pub use memory::{ListPage, Segment};
pub use prp::{Prp, PrpError, PrpRegion};
pub use queue::{Ended, Fault, Faults, Outcome, Polled, QueueError, QueuePair, Refused, Submitted};
pub use sgl::{Descriptor, SglError, SglRegion};
pub use split::{Limits, Piece, Split, SplitError};
