"""Keeps pages of an engine's host memory with the node of the host, under keys of the engine.

It is for engines with a cache of their own in host memory, which name pages and say where they lie.
A page is stored as a chunk of one layer. (For pages in GPU memory there is `forebay.PagedCache`.)

Whatever does not work is a miss: a page that is not loaded, or not stored. Nothing here raises
because a node is gone. In a child of `fork()` every call raises `ForkedError`.
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from forebay._forebay import Node
from forebay._log import LimitedLog
from forebay.errors import ForebayError, ForkedError, InvalidError

limited = LimitedLog(logging.getLogger("forebay.pages"))

Extent = tuple[int, int]
"""Address and bytes of a part of a page, in memory that is registered with the node's client."""
IN_FLIGHT_MAX = 16
"""Pages in flight at a time: enough to keep a node busy, and few buffers for a dead one."""
LIMIT_US = 30_000_000
"""After this time a page that is loaded, or asked for, counts as missing."""
MISSES_IN_A_ROW = 8
"""After so many pages in a row that could not be loaded, the rest is not tried."""
SOCKET_BYTES_MAX = 107
"""The longest path of a socket in Linux."""


# Waits until a page was moved or found, and says whether it was.
Wait = Callable[[], bool]


def namespace(facts: Mapping[str, object]) -> bytes:
    """A key for the pages of one kind of engine. Pages are shared where all facts are equal."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"forebay pages").digest()


def check_digest(value: object) -> str:
    """The setting `weights_digest`. An engine's name for its model says nothing about weights."""
    try:
        right = isinstance(value, str) and len(bytes.fromhex(value)) == 32
    except ValueError:
        right = False
    if not right:
        raise InvalidError(f"weights_digest is {value!r}; allowed are 64 hexadecimal digits")
    return str(value).lower()


def check_socket(value: object) -> str:
    """The setting `node`: the path of its socket."""
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
    """The contents of the file that the setting `name` names, without a line end."""
    if path is None:
        return b""
    if not isinstance(path, str) or not path:
        raise InvalidError(f"{name} is {path!r}; allowed is the path of a file")
    try:
        return Path(path).read_bytes().removesuffix(b"\n")
    except OSError as error:
        raise InvalidError(f"{name} is {path!r}, which cannot be read ({error})") from error


class Pages:
    """The pages of one namespace. Any number of threads may use it."""

    def __init__(self, node: Node, namespace: bytes, secret: bytes | None = None) -> None:
        """Engines with the same `secret` still share pages after all of them called `forget`."""
        self._node = node
        self._namespace = namespace
        self._secret = secret or os.urandom(32)

    def forget(self) -> None:
        """Gives pages new names, so that none of before is found. Pages of other engines stay.

        A call in flight keeps the names that it began with.
        """
        self._namespace = hashlib.blake2b(self._namespace, key=self._secret, digest_size=32).digest()

    def prefix(self, keys: Iterable[bytes]) -> int:
        """How many pages, from the first on, are stored."""
        return self._found(self._ids(keys))

    def which(self, keys: Iterable[bytes]) -> list[bool]:
        """For each page whether it is stored.

        A node counts pages from the first on. Behind a missing one, each page is a question of its
        own: engines ask for several sequences at once.
        """
        ids = self._ids(keys)
        run = self._found(ids)
        behind = ids[run + 1 :]
        missing = [False] * (len(ids) - run - len(behind))

        def ask(number: int) -> Wait:
            finding = self._node.find([[behind[number]]])
            return lambda: any(finding.wait(LIMIT_US / 1e6) or ())

        return [True] * run + missing + _pipelined(len(behind), ask)

    def load(self, keys: Sequence[bytes], places: Sequence[Sequence[Extent]]) -> list[bool]:
        """Loads each page to its place. False: it is not stored, and its place may hold anything.

        When this returns, nothing touches the places any more.
        """
        ids = self._ids(keys)
        good: list[bool] = []
        misses = 0
        while len(good) < len(ids) and misses < MISSES_IN_A_ROW:
            loaded = self._load_leased(ids[len(good) :], places[len(good) :])
            misses = 0 if any(loaded) else misses + 1
            good += loaded
        return good + [False] * (len(ids) - len(good))

    def store(self, keys: Sequence[bytes], places: Sequence[Sequence[Extent]]) -> list[bool]:
        """Stores each page. False: the node did not take it.

        When this returns, nothing reads the places any more.
        """
        ids = self._ids(keys)
        stored = _pipelined(
            len(ids), lambda number: self._node.store(ids[number], None, _one_layer(places[number])).wait
        )
        if not all(stored):
            limited.warning("the node did not take %d of %d pages", stored.count(False), len(stored))
        return stored

    def _ids(self, keys: Iterable[bytes]) -> list[bytes]:
        """The chunk ids of pages. Nobody without the namespace can name them."""
        namespace = self._namespace  # One for all of them, even if another thread calls `forget`.
        return [hashlib.blake2b(key, key=namespace, digest_size=32).digest() for key in keys]

    def _found(self, ids: list[bytes]) -> int:
        try:
            return self._node.lookup(ids)
        except ForkedError:
            raise
        except ForebayError as error:
            limited.warning("pages count as missing, since the node cannot be asked: %s", error)
            return 0

    def _load_leased(self, ids: list[bytes], places: Sequence[Sequence[Extent]]) -> list[bool]:
        """Loads the pages up to the first one that is missing."""
        try:
            lease = self._node.lease(ids)
        except ForkedError:
            raise
        except ForebayError as error:
            limited.warning("pages are not loaded, since the node lends none: %s", error)
            return [False] * len(ids)
        try:

            def begin(number: int) -> Wait:
                layer = _one_layer(places[number])
                return self._node.load(lease, number, layer, deadline_us=LIMIT_US).wait

            good = _pipelined(len(lease), begin)
        finally:
            lease.release()
        if not all(good):
            limited.warning("%d of %d pages could not be loaded", good.count(False), len(good))
        return good if len(good) == len(ids) else [*good, False]


def _one_layer(extents: Sequence[Extent]) -> list[list[tuple[int, int, int]]]:
    return [[(address, length, 0) for address, length in extents]]


def _pipelined(count: int, begin: Callable[[int], Wait]) -> list[bool]:
    """Begins one after the other, a few ahead, and waits for all that began."""
    ends: list[bool] = []
    begun: deque[Wait | None] = deque()
    try:
        for number in range(count):
            if len(begun) == IN_FLIGHT_MAX:
                ends.append(_first_ended_well(begun))
            try:
                begun.append(begin(number))
            except ForkedError:
                raise
            except ForebayError:
                begun.append(None)
        while begun:
            ends.append(_first_ended_well(begun))
    finally:
        # An error or an interrupt gives the caller its memory back too.
        while begun:
            _first_ended_well(begun)
    return ends


def _first_ended_well(begun: deque[Wait | None]) -> bool:
    """Waits for the first one, and removes it when it has ended."""
    wait = begun[0]
    well = wait is not None and wait()
    begun.popleft()
    return well
