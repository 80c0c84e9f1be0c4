//! The bytes on the disk: every structure of the log with its encoder and its parser, as
//! `docs/reference/format.md` describes them. This module knows bytes. No bytes make a parser
//! panic, loop or reserve memory beyond what the bytes themselves take.

mod checkpoint;
mod chunk_copy;
mod footer;
mod journal;
mod layout;
mod page;
mod record;
mod segment;
mod slot_shape;
mod summary;
mod superblock;

pub use checkpoint::*;
pub use chunk_copy::*;
pub use footer::*;
pub use journal::*;
pub use layout::*;
pub use page::*;
pub use record::*;
pub use segment::*;
pub use slot_shape::*;
pub use summary::*;
pub use superblock::*;
