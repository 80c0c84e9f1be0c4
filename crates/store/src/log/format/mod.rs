//! The bytes on the disk: every structure of the log with its encoder and its parser, as
//! `docs/reference/format.md` describes them. This module knows bytes. No bytes make a parser
//! panic, loop or reserve memory beyond what the bytes themselves take.

pub(crate) mod checkpoint;
pub(crate) mod chunk_copy;
pub(crate) mod footer;
pub(crate) mod journal;
pub(crate) mod layout;
pub(crate) mod page;
pub(crate) mod record;
pub(crate) mod segment;
pub(crate) mod slot_shape;
pub(crate) mod summary;
pub(crate) mod superblock;
