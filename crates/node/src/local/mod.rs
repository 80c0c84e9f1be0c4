//! The node and the processes of its host: a UNIX socket for messages, the arena for bytes.
//!
//! `listener` lets clients in, `connection` is the thread of one, `session` answers its requests,
//! `bring` is a request with several answers, and `answer_queue` sends answers from any thread.
//! `client` is what a client holds and watches, of which `leases` and `watch_list` are pure.
//! `clients` is all of them together.

mod answer_queue;
mod bring;
mod client;
pub mod clients;
mod connection;
mod leases;
pub mod listener;
pub mod session;
mod traces;
mod watch_list;
