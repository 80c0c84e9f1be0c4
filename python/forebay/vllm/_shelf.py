"""Where the contents of device memory lie while the memory itself is gone: one pinned buffer, many extents.

Knows addresses and lengths, and what it asks of `forebay.cuda`. Must never know vLLM or torch, nor decide
what is kept: a shelf holds what it was filled with until each extent was dropped, and then gives its buffer
back.
"""

from collections.abc import Mapping
from typing import Protocol


class PinnedBuffer(Protocol):
    """Pinned host memory that is lent."""

    @property
    def address(self) -> int: ...  # noqa: D102
    @property
    def bytes(self) -> int: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class PinnedPool(Protocol):
    """Pinned host memory that is kept: what was pinned once is lent again."""

    def warm(self, bytes: int) -> None: ...  # noqa: D102
    def take(self, bytes: int) -> PinnedBuffer: ...  # noqa: D102


class Copier(Protocol):
    """Every path between host memory and a GPU. Returns or raises when nothing touches the memory."""

    def copy_batch_and_wait(self, pairs: list[tuple[int, int, int]]) -> None: ...  # noqa: D102


class Shelf:
    """Contents of device memory, by the address to which they will go back."""

    def __init__(self, buffer: PinnedBuffer, extents: Mapping[int, int]) -> None:
        """Gives each extent (address: bytes) its place in the buffer."""
        self._buffer = buffer
        self._places: dict[int, tuple[int, int, int]] = {}
        place = buffer.address
        for address, length in extents.items():
            self._places[address] = (place, address, length)
            place += length

    @classmethod
    def fill(cls, pool: PinnedPool, copier: Copier, extents: Mapping[int, int]) -> "Shelf":
        """Copies all extents (address: bytes) out in one batch. If that fails the buffer is given back."""
        buffer = pool.take(sum(extents.values()))
        try:
            shelf = cls(buffer, extents)
            copier.copy_batch_and_wait([(address, place, n) for place, address, n in shelf._places.values()])
        except BaseException:
            buffer.close()
            raise
        return shelf

    def back(self, address: int) -> tuple[int, int, int]:
        """The copy that brings this extent back: from, to, bytes."""
        return self._places[address]

    def drop(self, address: int) -> None:
        """Forgets an extent. With the last one the buffer goes back to its pool."""
        del self._places[address]
        if not self._places:
            self._buffer.close()
