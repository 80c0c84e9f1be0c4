"""The errors of the package: one class for each thing that a program may do about it."""


class ForebayError(Exception):
    """Any error of Forebay. The message says what was asked, what was found and what is allowed."""


class InvalidError(ForebayError, ValueError):
    """An argument is not acceptable: correct the program."""


class NotFoundError(ForebayError, LookupError):
    """No such peer or registered memory: exchange metadata again, or register the memory first."""


class PeerLostError(ForebayError, ConnectionError):
    """The peer cannot be reached, has died, has restarted or does not move."""


class DeadlineError(ForebayError, TimeoutError):
    """The deadline passed first. Nothing touches the memory any more."""


class NoRoomError(ForebayError, MemoryError):
    """No memory is left within the limit: ask for less, give some back, or raise the limit."""


class CancelledError(ForebayError):
    """The transfer was cancelled. Nothing touches the memory any more."""


class ForkedError(ForebayError, RuntimeError):
    """The object was made before `fork()`, by another process: make one here."""


class TransferError(ForebayError):
    """The transfer ended without all its bytes, for a reason that is none of the others."""
