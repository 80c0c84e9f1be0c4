//! Requests for I/O that an engine or its GPU writes into shared memory: the ring, and the commands
//! and queues of NVMe drives. Nothing here does I/O; whoever uses it carries requests out.
//!
//! | type | holds | always true |
//! |---|---|---|
//! | [`Layout`] | how many slots a ring has | everything lies in its words, and nothing upon anything else |
//! | [`Producer`] | the slots under way | a slot is used again only when its request has come back |
//! | [`Consumer`] | the same, at the other end | a request is taken whole, and ends once, whatever the producer writes |

mod atomics;
mod consumer;
pub mod controller;
mod layout;
#[cfg(not(loom))]
pub mod memory;
mod message;
pub mod nvme;
mod producer;
pub mod sleep;

pub use consumer::{Consumer, Taken, Ticket, Violation, Work};
pub use layout::{CONTEXTS_MAX, Header, Layout, NoRing, SLOTS_MAX};
pub use message::{
    BadRequest, CLASSES, Completion, Context, ContextResult, ContextStatus, Op, Request, Status,
};
pub use producer::{Armed, BadCompletion, NotPosted, Producer, Reaped};
