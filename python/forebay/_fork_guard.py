"""Refuses calls of objects in a child of `fork()`.

A child has copies of its parent's objects, but not their threads, and it shares their sockets. The
compiled objects check that themselves; this is for those written in Python.
"""

import os

from forebay.errors import ForkedError


class ForkGuard:
    """Belongs to the process that makes it."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_owner(self) -> bool:
        """Whether this is still that process. In any other one the object may only be dropped."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises in any other process. Call it before taking a lock, which nobody may free."""
        if not self.is_owner:
            raise ForkedError(
                f"made before fork: by process {self._pid}, and this is process {os.getpid()}; "
                "each process makes its own"
            )
