//! The node and the processes of its host: a UNIX socket for messages, the arena for bytes.
//!
//! `listener` lets clients in, `connection` is the thread of one, `session` answers its requests,
//! `bring` is a request with several answers, and `answer_queue` sends answers from any thread.
//! `ring` takes requests from memory that the client shares, and `ring_request` is one of them.
//! `client` is what a client holds and watches, of which `leases` and `watch_list` are pure.
//! `clients` is all of them together. `described` is what they say of themselves, and `explain`
//! what the node knows of why a prompt was no hit. `control` keeps, moves and forgets single
//! chunks.

mod answer_queue;
mod bring;
mod client;
pub mod clients;
mod connection;
mod control;
pub mod control_counts;
mod described;
mod explain;
mod leases;
pub mod listener;
mod ring;
pub mod ring_counts;
mod ring_request;
pub mod session;
mod traces;
mod watch_list;
