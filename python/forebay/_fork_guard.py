"""Which process made an object that has sockets, threads or locks of Python's own.

A child of `fork()` has a copy of every object, but none of the threads behind it, and it shares the
parent's sockets. Objects that are compiled look for themselves; this is for what is made of them in Python.
Knows processes only; must never know what an object is good for.
"""

import os

from forebay.errors import ForkedError


class ForkGuard:
    """The process that made an object: the one that makes this."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_owner(self) -> bool:
        """Whether it is the process that asks. In any other one the object is only to be forgotten."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises in any other process.

        To be called before any lock is taken: nobody may be there to free it.
        """
        if not self.is_owner:
            raise ForkedError(
                f"made before fork: by process {self._pid}, and this is process {os.getpid()}; "
                "each process makes its own"
            )
