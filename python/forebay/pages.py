"""Pages of an engine's host memory, kept with the node of the host under keys that the engine chose.

Knows how a page becomes a chunk of one layer, and how many are on their way at a time. It is what engines
with a cache of their own in host memory need: they name pages and say where they lie. Must never know an
engine, nor what a page holds. Engines whose pages lie in GPU memory, layer by layer, have
`forebay.PagedCache` instead.

Whatever does not work is a miss: a page that is not loaded, or not kept. Nothing here raises because a node
is gone; in a child of `fork()` every call raises `ForkedError`, since all would be misses for ever.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from forebay._forebay import Node
from forebay.errors import ForebayError, ForkedError, InvalidError

Piece = tuple[int, int]
"""Address and bytes of a part of a page, in memory that the node's client knows."""
AT_A_TIME = 16
"""Pages on their way, or asked for, at a time: enough to keep a node busy, few buffers for a dead one."""
LIMIT_US = 30_000_000
"""When a page that is being loaded, or asked for, counts as missing."""
MISSES_IN_A_ROW = 8
"""After so many pages that could not be loaded, those behind them are not either: each costs a question."""

SOCKET_BYTES_MAX = 107
"""Linux takes no longer path of a socket: a client would look for its node for ever."""


class _Moving(Protocol):
    def wait(self) -> bool: ...


def namespace(facts: Mapping[str, object]) -> bytes:
    """A key for the pages of one kind of engine: they are shared where all facts are equal."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"forebay pages").digest()


def check_digest(value: object) -> str:
    """A digest of weights as settings have it. An engine's name for its model says nothing about them."""
    try:
        right = isinstance(value, str) and len(bytes.fromhex(value)) == 32
    except ValueError:
        right = False
    if not right:
        raise InvalidError(f"weights_digest is {value!r}; allowed are 64 hexadecimal digits")
    return str(value).lower()


def check_socket(value: object) -> str:
    """The path of a node's socket, as the setting `node` has it."""
    if not isinstance(value, str) or not 1 <= len(os.fsencode(value)) <= SOCKET_BYTES_MAX:
        raise InvalidError(
            f"node is {value!r}; allowed is the path of a socket, of 1 to {SOCKET_BYTES_MAX} bytes"
        )
    return value


def check_flag(name: str, value: object) -> bool:
    """A setting that is true or false."""
    if not isinstance(value, bool):
        raise InvalidError(f"{name} is {value!r}; allowed are true and false")
    return value


def read_secret(name: str, path: object) -> bytes:
    """What the file holds that the setting `name` says, without a line end, as nodes read theirs."""
    if path is None:
        return b""
    if not isinstance(path, str) or not path:
        raise InvalidError(f"{name} is {path!r}; allowed is the path of a file")
    try:
        return Path(path).read_bytes().removesuffix(b"\n")
    except OSError as error:
        raise InvalidError(f"{name} is {path!r}, which cannot be read ({error})") from error


class Pages:
    """The pages of one namespace. For any number of threads."""

    def __init__(self, node: Node, namespace: bytes, secret: bytes | None = None) -> None:
        """`secret` is one that only those have who share pages also when all of them have forgotten."""
        self._node = node
        self._namespace = namespace
        self._secret = secret or os.urandom(32)

    def forget(self) -> None:
        """Pages have names anew: none of before is found, and no other engine has these names.

        A call under way ends with the names it began with. What others have stays.
        """
        self._namespace = hashlib.blake2b(self._namespace, key=self._secret, digest_size=32).digest()

    def prefix(self, keys: Iterable[bytes]) -> int:
        """How many pages, from the first on, can be had."""
        return self._found(self._ids(keys))

    def which(self, keys: Iterable[bytes]) -> list[bool]:
        """For each page whether it can be had.

        A node says how many are there from the first on. Behind one that is missing each is a question of
        its own, since others may be there: engines ask for several sequences at once, in an order of theirs.
        """
        ids = self._ids(keys)
        run = self._found(ids)
        behind = ids[run + 1 :]
        missing = [False] * (len(ids) - run - len(behind))
        asked = _in_turn(len(behind), lambda number: _Question(self._node, behind[number]))
        return [True] * run + missing + asked

    def load(self, keys: Sequence[bytes], places: Sequence[Sequence[Piece]]) -> list[bool]:
        """Loads each page to its place. False: it is not there, and its place may hold anything.

        Nothing touches the places any more when this returns.
        """
        ids = self._ids(keys)
        good: list[bool] = []
        misses = 0
        while len(good) < len(ids) and misses < MISSES_IN_A_ROW:
            loaded = self._load_leased(ids[len(good) :], places[len(good) :])
            misses = 0 if any(loaded) else misses + 1
            good += loaded
        return good + [False] * (len(ids) - len(good))

    def store(self, keys: Sequence[bytes], places: Sequence[Sequence[Piece]]) -> list[bool]:
        """Stores each page. False: the node did not take it.

        Nothing reads the places any more when this returns.
        """
        ids = self._ids(keys)

        def begin(number: int) -> _Moving:
            return self._node.store(ids[number], None, _one_layer(places[number]))

        return _in_turn(len(ids), begin)

    def _ids(self, keys: Iterable[bytes]) -> list[bytes]:
        """The chunks' ids: nobody who lacks the namespace can name them."""
        namespace = self._namespace  # One for all of them: another thread may have it forgotten.
        return [hashlib.blake2b(key, key=namespace, digest_size=32).digest() for key in keys]

    def _found(self, ids: list[bytes]) -> int:
        try:
            return self._node.lookup(ids)
        except ForkedError:
            raise
        except ForebayError:
            return 0

    def _load_leased(self, ids: list[bytes], places: Sequence[Sequence[Piece]]) -> list[bool]:
        """Loads the pages that are there from the first on; the next one, if there is any, is not there."""
        try:
            lease = self._node.lease(ids)
        except ForkedError:
            raise
        except ForebayError:
            return [False] * len(ids)
        try:

            def begin(number: int) -> _Moving:
                return self._node.load(lease, number, _one_layer(places[number]), deadline_us=LIMIT_US)

            good = _in_turn(len(lease), begin)
        finally:
            lease.release()
        return good if len(good) == len(ids) else [*good, False]


class _Question:
    """Whether a page is there, asked without waiting."""

    def __init__(self, node: Node, chunk: bytes) -> None:
        self._finding = node.find([[chunk]])

    def wait(self) -> bool:
        return any(self._finding.wait(LIMIT_US / 1e6) or ())


def _one_layer(pieces: Sequence[Piece]) -> list[list[tuple[int, int, int]]]:
    return [[(address, length, 0) for address, length in pieces]]


def _in_turn(count: int, begin: Callable[[int], _Moving]) -> list[bool]:
    """Begins one after the other, a few ahead, and waits for all that began."""
    ends: list[bool] = []
    moving: deque[_Moving | None] = deque()
    try:
        for number in range(count):
            if len(moving) == AT_A_TIME:
                ends.append(_first_ended_well(moving))
            try:
                moving.append(begin(number))
            except ForkedError:
                raise
            except ForebayError:
                moving.append(None)
        while moving:
            ends.append(_first_ended_well(moving))
    finally:
        # An error or an interrupt gives the caller its memory back too.
        while moving:
            _first_ended_well(moving)
    return ends


def _first_ended_well(moving: deque[_Moving | None]) -> bool:
    """Waits for the first one, which leaves when it has ended."""
    well = moving[0] is not None and moving[0].wait()
    moving.popleft()
    return well
