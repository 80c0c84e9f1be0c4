//! A load of KV from the node into an engine's pages. It is four types, one after another:
//!
//! | type | holds | always true |
//! |---|---|---|
//! | [`LoadRequest`] | chunk ids, pages, time limit | checked against the cache's shape before the load begins |
//! | [`LoadPlan`] | which chunks are in the arena, which layers were copied | a chunk counts only if every layer of all its parts was copied (on CPUs: and verified), and so were those of all chunks before it |
//! | [`InFlight`] | the plan, leases, the node's answers, copies on their way | it ends once, and only when no copy of it touches a page any more |
//! | [`LoadEnd`] | tokens that may be used, and why it is not all of them | what it says never changes |
//!
//! `plan.rs`, `timeout.rs` and `stall.rs` are sans-IO: they take what happened and say what
//! follows. `in_flight.rs` carries between them and the client of the node, `copy.rs` copies one
//! layer and checks its bytes.

mod copy;
mod end;
mod in_flight;
mod plan;
mod stall;
mod timeout;

pub use end::{LoadEnd, Loaded, TierBytes};
pub use in_flight::InFlight;
pub use plan::{LoadPlan, NextBatch, Outcome, Part};
pub use stall::LoadStall;

use crate::page_tables::PageTables;
use crate::pages::Source;
use forebay_kv::ChunkId;
use forebay_store::TenantId;
use forebay_transfer::TraceContext;

#[derive(Debug)]
pub struct LoadRequest {
    /// The engine's number for it.
    pub job: u64,
    /// Chunk ids, in order, and how they fit, of each storer's rank.
    pub sources: Vec<(Vec<ChunkId>, Source)>,
    pub tables: PageTables,
    /// Tokens that the chunks have.
    pub tokens: u64,
    /// Whether the engine waits for it layer by layer.
    pub layerwise: bool,
    /// It ends with what is there so long after its begin, if the engine waits for it layer by
    /// layer. Any other load does when nothing of it has come for so long; or, while it has nothing
    /// on its way, nothing of those before it.
    pub limit_us: u64,
    /// The span that it is part of, if that is traced.
    pub within: Option<TraceContext>,
    /// Whose chunks they are, if they are not the client's own tenant's.
    pub tenant: Option<TenantId>,
}
