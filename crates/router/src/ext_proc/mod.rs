//! An endpoint picker for Envoy: Envoy carries the requests, and asks over gRPC where each goes
//! (`ext_proc`). The engines, what is known of them and the policies are the router's.
//!
//! * `api`: the messages, as far as they matter; `heads` and `messages`: read and made.
//! * `stream`: one HTTP request as a state machine over these messages. It does no I/O.
//! * `picker`: where a request goes; `booking`: what its answer means for the router's books.
//! * `exchange`: drives the three of them; `service` and `health` are what gRPC clients see, and
//!   `server` the threads and sockets.

mod api;
mod booking;
mod exchange;
mod heads;
mod health;
mod messages;
mod picker;
mod server;
mod service;
mod stream;

pub use server::{Epp, EppConfig, EppHandle};

#[cfg(test)]
mod tests;
