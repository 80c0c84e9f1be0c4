//! One module per command. A module turns arguments into a call of a library crate and prints what
//! came back.

mod access;
pub mod calibrate;
pub mod doctor;
pub mod engine;
pub mod epp;
pub mod explain;
mod findings;
pub mod kv;
pub mod node;
mod node_socket;
pub mod preflight;
mod program;
mod prompt_file;
mod python;
mod reading;
pub mod replay;
pub mod report;
pub mod route;
pub mod route_replay;
mod routing;
pub mod run;
pub mod signals;
pub mod simulate;
pub mod store;
pub mod top;
pub mod torture;
pub mod trace;
pub mod values;
pub mod vllm;
