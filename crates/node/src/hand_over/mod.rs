//! The hand-over of a node's memory to its successor, another process of the same user. This
//! module knows what both say to each other; `crate::node` does what follows from it.
//!
//! ```text
//! the new node                    the old node
//! TAKE_OVER, version, layout  ->  refuses, or lets nothing new in, waits for what is written, ends
//!                                 its threads and closes the logs
//!                             <-  PART three times: the arena, the table of chunks, the socket
//! checks, opens the logs
//! READY                       ->
//!                             <-  YOURS
//! TAKEN                       ->  ends
//! serves
//! ```
//!
//! Until YOURS the old node may take everything back, and does when the new one gives up, ends or
//! is late. The new one touches no byte of the arena before it has said TAKEN, and says that only
//! after YOURS. So at most one of the two serves; `states` proves it.

mod giver;
mod message;
mod states;
mod table;
mod taker;

pub use giver::Successor;
pub use message::{Layout, NotGiven, TAKE_OVER, check_offer};
pub use states::{Giving, GivingStep, Heard, Taking, TakingStep};
pub use table::Left;
pub use taker::{Predecessor, TakeOverError};
