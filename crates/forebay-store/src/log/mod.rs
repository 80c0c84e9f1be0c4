//! The log.
mod format;
mod medium;
pub use format::checkpoint::*;
pub use format::footer::*;
pub use format::journal::*;
pub use format::layout::*;
pub use format::page::*;
pub use format::record::*;
pub use format::segment::*;
pub use format::slot_shape::*;
pub use format::sum::*;
pub use format::summary::*;
pub use format::superblock::*;
pub use medium::Medium;
