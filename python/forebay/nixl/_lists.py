"""NIXL's descriptor lists over Forebay's `Descriptors`, and their form in bytes.

The bytes are a header (magic, version, kind of list, memory type, number of descriptors, CRC-32 of
all), the rows, and for lists with words the length of each word and the words. Reading them runs
nothing and trusts nothing.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from forebay import Descriptors

from ._enums import nixl_mem_t
from ._errors import failure, nixlMismatchError, nixlNotFoundError

_HEADER = struct.Struct("<4sBBHII")
_MAGIC = b"FBDL"
_VERSION = 1
_ROW_BYTES = 24
_WORD_BYTES_MAX = 65535


class _DList:
    """What the lists have in common: rows, and a memory type."""

    _KIND: ClassVar[int]

    def __init__(self, type: nixl_mem_t, descs: Any = None) -> None:
        self._type = nixl_mem_t(type)
        # NIXL takes an expected size in the place of descriptors: there is nothing to reserve here.
        self._rows = Descriptors() if descs is None or isinstance(descs, int) else self._read(descs)

    def _read(self, descs: Any) -> Descriptors:
        return Descriptors(descs)

    def _tail(self) -> bytes:
        return b""

    def _set_tail(self, tail: bytes) -> None:
        if tail:
            raise failure(nixlMismatchError, f"{len(tail)} bytes after the last descriptor")

    @property
    def rows(self) -> Descriptors:
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self._rows[index]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _DList) or type(self) is not type(other):
            return False
        return self._type == other._type and self._rows == other._rows and self._tail() == other._tail()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} descriptors of {self._type.name}>"

    def __reduce__(self) -> tuple[Callable[[bytes], "_DList"], tuple[bytes]]:
        return from_bytes, (self.to_bytes(),)

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self._rows)

    def isEmpty(self) -> bool:
        return len(self._rows) == 0

    def print(self) -> None:
        print(self)
        for at in range(len(self)):
            print(f"  {self[at]}")

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        self._rows.append(desc)

    def append(self, desc: tuple[Any, ...]) -> None:
        self.addDesc(desc)

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self._rows[index] = desc

    def remDesc(self, index: int) -> None:
        del self._rows[index]

    def clear(self) -> None:
        self._rows.clear()

    def to_bytes(self) -> bytes:
        """The list for another process; `from_bytes` reads it."""
        body = self._rows.to_bytes() + self._tail()
        return _header(self._KIND, self._type, len(self), body) + body

    @classmethod
    def _of(cls, type: nixl_mem_t, rows: bytes, tail: bytes) -> Self:
        made = cls(type)
        made._rows = Descriptors.from_bytes(rows)
        made._set_tail(tail)
        return made


class nixlXferDList(_DList):
    """What to transfer: (address, length, device)."""

    _KIND = 1

    def index(self, desc: tuple[int, int, int]) -> int:
        found = self._rows.find(desc)
        if found is None:
            raise failure(nixlNotFoundError, f"{desc} is not in the list of {len(self)}")
        return found


class _WordedDList(_DList):
    """Descriptors with a word each, in the fourth place of the tuple."""

    def __init__(self, type: nixl_mem_t, descs: Any = None) -> None:
        self._words: list[bytes] = []
        super().__init__(type, descs)

    def _read(self, descs: Any) -> Descriptors:
        if not isinstance(descs, list):
            rows = Descriptors(descs)
            self._words = [b""] * len(rows)
            return rows
        split = [_row_and_word(desc) for desc in descs]
        self._words = [word for _, word in split]
        return Descriptors([row for row, _ in split])

    def _tail(self) -> bytes:
        lengths = struct.pack(f"<{len(self._words)}H", *map(len, self._words))
        return lengths + b"".join(self._words)

    def _set_tail(self, tail: bytes) -> None:
        count = len(self._rows)
        if len(tail) < 2 * count:
            raise failure(
                nixlMismatchError, f"{len(tail)} bytes after the rows of {count} descriptors with words"
            )
        lengths = struct.unpack_from(f"<{count}H", tail)
        if len(tail) != 2 * count + sum(lengths):
            raise failure(nixlMismatchError, f"words of {sum(lengths)} bytes in {len(tail) - 2 * count}")
        at = 2 * count
        for length in lengths:
            self._words.append(tail[at : at + length])
            at += length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*self._rows[index], self._words[index])

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        row, word = _row_and_word(desc)
        self._rows.append(row)
        self._words.append(word)

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        row, word = _row_and_word(desc)
        self._rows[index] = row
        self._words[index] = word

    def remDesc(self, index: int) -> None:
        del self._rows[index]
        del self._words[index]

    def clear(self) -> None:
        self._rows.clear()
        self._words.clear()

    def index(self, desc: tuple[Any, ...]) -> int:
        row, word = _row_and_word(desc)
        for at in range(len(self)):
            if self._rows[at] == row and self._words[at] == word:
                return at
        raise failure(nixlNotFoundError, f"{desc} is not in the list of {len(self)}")


class nixlRegDList(_WordedDList):
    """What to register: (address, length, device, description)."""

    _KIND = 2

    def trim(self) -> nixlXferDList:
        """The same descriptors without their descriptions."""
        trimmed = nixlXferDList(self._type)
        trimmed._rows = self._rows.copy()
        return trimmed


class nixlRemoteDList(_WordedDList):
    """Memory of several peers: (address, length, device, peer). For memory views, which need a GPU."""

    _KIND = 3


_KINDS: dict[int, type[_DList]] = {c._KIND: c for c in (nixlXferDList, nixlRegDList, nixlRemoteDList)}


def _row_and_word(desc: Sequence[Any]) -> tuple[tuple[int, int, int], bytes]:
    if not isinstance(desc, tuple) or len(desc) != 4:
        raise ValueError(
            f"a descriptor of this list is a tuple of 4 (address, length, device, word), not {desc!r}"
        )
    address, length, device, word = desc
    encoded = word.encode() if isinstance(word, str) else bytes(word)
    if len(encoded) > _WORD_BYTES_MAX:
        raise ValueError(f"the word of a descriptor has {len(encoded)} bytes: at most {_WORD_BYTES_MAX}")
    return (address, length, device), encoded


def _header(kind: int, mem: int, count: int, body: bytes) -> bytes:
    """The header of a list, with the checksum over itself and the rest."""
    unchecked = _HEADER.pack(_MAGIC, _VERSION, kind, mem, count, 0)
    return _HEADER.pack(_MAGIC, _VERSION, kind, mem, count, zlib.crc32(unchecked + body))


def from_bytes(data: bytes) -> _DList:
    """Reads what `to_bytes` wrote; refuses everything else."""
    if len(data) < _HEADER.size:
        raise failure(nixlMismatchError, f"{len(data)} bytes: a descriptor list has at least {_HEADER.size}")
    magic, version, kind, mem, count, _checksum = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if (magic, version) != (_MAGIC, _VERSION) or kind not in _KINDS or mem not in list(nixl_mem_t):
        raise failure(nixlMismatchError, f"no descriptor list of version {_VERSION} starts with {data[:8]!r}")
    if data[: _HEADER.size] != _header(kind, mem, count, body):
        raise failure(nixlMismatchError, "the checksum of a descriptor list does not fit its bytes")
    if len(body) < count * _ROW_BYTES:
        raise failure(nixlMismatchError, f"{count} descriptors in {len(body)} bytes")
    rows, tail = body[: count * _ROW_BYTES], body[count * _ROW_BYTES :]
    return _KINDS[kind]._of(nixl_mem_t(mem), rows, tail)
