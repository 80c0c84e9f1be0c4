//! The node and the processes of its host: a UNIX socket for words, the arena for bytes.
//!
//! Pure parts: `frame`, `request` and `answer` are the bytes of the words; `session` and `watched` are what a client holds
//! and watches. Driver:
//! `socket`. Glue: `outbox` sends answers from any thread, `desk` answers one client, `listener` lets clients in, `traces` times what they ask. Knows who
//! holds what of the arena; must never know why.

pub mod bringing;
pub mod desk;
pub mod listener;
pub mod outbox;
pub mod session;
pub mod traces;
pub mod watched;
