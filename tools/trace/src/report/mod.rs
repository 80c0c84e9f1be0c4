//! The report: what the records of a replay say, as figures, as text for a terminal, as one line
//! while it runs, and as one HTML page that needs nothing but itself.
//!
//! It reads a [`RecordLog`](crate::record::RecordLog) and nothing else, so that a report can be
//! made again from a log at any time.

mod decisions;
mod gpus;
mod html;
mod live;
mod notes;
mod plot;
mod summary;
mod terminal;

pub use crate::quantile::Quantiles;
pub use decisions::DecisionSummary;
pub use gpus::GpuSummary;
pub use html::html;
pub use live::{LiveLine, line};
pub use summary::{
    ArmSummary, Class, ClassSummary, LinkTotal, OUTSIDE_PEER_TOKENS, OUTSIDE_SSD_TOKENS, OUTSIDE_TOKENS,
    Summary, TokenSources, WrongTokens, summarize,
};
pub use terminal::terminal;
