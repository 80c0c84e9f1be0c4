//! Where requests go: the router in front of several engines.
//!
//! This crate knows OpenAI's HTTP API as bytes that pass through, the load and the presumed caches of the engines
//! behind it, and the policies that choose among them. It must never know how an engine computes, how KV is stored or
//! moved, or what a token is: prompts are bytes, and what was cached is what the engines' answers say.
//!
//! Three layers. [`policy`], [`prefix`], [`tokens`], [`request`], [`sse`] and [`usage`] are pure.

mod generations;
pub mod json;
pub mod policy;
pub mod prefix;
pub mod request;
pub mod sse;
pub mod tokens;
pub mod usage;
