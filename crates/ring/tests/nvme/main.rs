//! NVMe encoders and queues against the software controller, which decodes by code of its own.

#![allow(clippy::unwrap_used)]

mod encoders;
mod foreign_bytes;
mod host;
mod lists;
mod queue;
mod refusals;
mod regions;
mod splitting;
mod under_faults;
