//! Who has to find that a chunk is not what was written. It knows nothing of how that is done.

/// Who compares layers with their checksums. That the footer is the chunk's own is always looked
/// at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Check {
    /// The read, before it ends.
    #[default]
    AtRead,
    /// Everybody who uses them, which is so for layers that are [fetched](crate::Store::fetch).
    /// Only layers that are read right into their place are left to these.
    AtUse,
}
