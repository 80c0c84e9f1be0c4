//! What a process and the node of its host say to each other over a UNIX socket: frames, requests,
//! answers, and the socket. `docs/` has no page on it: both ends come from the same build, and
//! another version is refused by number.

pub mod answer;
pub mod bytes;
pub mod control;
pub mod explain;
pub mod frame;
pub mod request;
pub mod socket;
