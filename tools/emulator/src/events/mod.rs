//! KV events in vLLM's wire format, so that routers and indexers made for vLLM understand this
//! engine.
//!
//! This module knows frames, sequence numbers and sockets.
//!
//! # The wire, as vLLM has it since events became maps (0.24)
//!
//! A PUB socket sends three frames for each batch: the topic, the sequence number as 8 bytes
//! big-endian, and a msgpack array `[timestamp, [events], data_parallel_rank]`. An event is a map
//! with `type` `BlockStored`, `BlockRemoved` or `AllBlocksCleared`. Sequence numbers start at 0 and
//! have no gaps. Block hashes are integers, the lower 64 bits.
//!
//! A ROUTER socket replays: a request of an empty frame and a sequence number is answered with
//! `[empty, number, payload]` for every buffered batch from that number on, and then with
//! `[empty, -1, empty]`. What is older than the buffer is gone, and there is no snapshot. The first
//! batch of an engine says that its cache is empty, so a subscriber that was there before a restart
//! forgets what it knew.

mod publisher;
mod wire;

pub use publisher::{BUFFER_BATCHES, EventSender, EventsConfig, EventsError, Publisher};
