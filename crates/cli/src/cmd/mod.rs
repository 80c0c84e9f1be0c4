//! One module per command. A module turns arguments into a call of a library crate and prints what
//! came back.

mod access;
pub mod calibrate;
pub mod engine;
pub mod node;
pub mod preflight;
mod program;
mod reading;
pub mod replay;
pub mod route;
pub mod route_replay;
pub mod run;
pub mod signals;
pub mod simulate;
pub mod store;
pub mod torture;
pub mod trace;
pub mod values;
