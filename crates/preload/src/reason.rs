//! What became of a copy: taken by the copying library, or why it was passed on. Numbers up to
//! [`LIBRARY_LAST`] are the copying library's, the others are ours. Knows names only.

/// One of [`REASONS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reason(usize);

const LIBRARY_LAST: usize = 13;

/// What each is called in the report at exit, by number.
pub(crate) const REASONS: [&str; 19] = [
    "taken",
    "passed on, small",
    "passed on, capturing",
    "passed on, host memory not pinned",
    "passed on, managed memory",
    "passed on, no relay for this device",
    "passed on, relays busy",
    "passed on, same kind of memory on both sides",
    "passed on, another context",
    "passed on, internal fault",
    "passed on, switched off",
    "passed on, copying library still starting",
    "passed on, relays move wrong bytes",
    "passed on, for the driver to judge",
    "passed on, no context",
    "passed on, no copying library",
    "passed on, copying library stays out",
    "passed on, forked from a process that copies",
    "passed on, reason not known",
];

impl Reason {
    pub(crate) const TAKEN: Reason = Reason(0);
    pub(crate) const SMALL: Reason = Reason(1);
    pub(crate) const CAPTURING: Reason = Reason(2);
    pub(crate) const FAULT: Reason = Reason(9);
    /// Ours while the library is opened, and its own afterwards.
    pub(crate) const STARTING: Reason = Reason(11);
    pub(crate) const DRIVER_JUDGES: Reason = Reason(13);
    pub(crate) const NO_CONTEXT: Reason = Reason(14);
    pub(crate) const NO_LIBRARY: Reason = Reason(15);
    pub(crate) const STAYS_OUT: Reason = Reason(16);
    pub(crate) const FORKED: Reason = Reason(17);
    const NOT_KNOWN: Reason = Reason(18);

    /// The reason that the copying library gave, which is not 0.
    pub(crate) fn of_library(code: i32) -> Reason {
        match usize::try_from(code) {
            Ok(code @ 1..=LIBRARY_LAST) => Reason(code),
            _ => Reason::NOT_KNOWN,
        }
    }

    pub(crate) fn index(self) -> usize {
        self.0
    }
}
