"""Sends metadata from agent to agent over a socket: NIXL's listener and its three messages.

A connection carries one message and its answer. The listener greets with a nonce. The client sends
kind, length, body and an HMAC-SHA256 over nonce and message, keyed by the agents' token, so that
only agents with the same token are heard. The answer is signed in the same way.
"""

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from forebay._fork_guard import ForkGuard

from .logging import get_logger

logger = get_logger(__name__)

SEND_METADATA = 1
FETCH_METADATA = 2
INVALIDATE_METADATA = 3
_ANSWER = 4

LIMIT_S = 5.0
BODY_BYTES_MAX = 4 << 20
CONNECTIONS_MAX = 64
"""Connections of a listener that are answered at a time; others wait."""

_GREETING = struct.Struct("<4sB16s")
_HEADER = struct.Struct("<BI")
_MAGIC = b"FBMX"
_VERSION = 1
_MAC_BYTES = 32
_PAUSE_S = 0.1


class Malformed(Exception):
    """What came is no message of this protocol, or its sender has another token."""


class _Channel:
    """A connection with one time limit for all that is said on it."""

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self._connection = connection
        self._token = token
        self._end = time.monotonic() + LIMIT_S
        self.nonce = b""

    def _limited(self) -> socket.socket:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"longer than {LIMIT_S} s")
        self._connection.settimeout(left)
        return self._connection

    def send(self, data: bytes) -> None:
        self._limited().sendall(data)

    def receive(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._limited().recv(min(count - len(parts), 1 << 16))
            if not part:
                raise Malformed(f"the connection ended after {len(parts)} of {count} bytes")
            parts += part
        return bytes(parts)

    def _mac(self, message: bytes) -> bytes:
        return hmac.digest(self._token, self.nonce + message, hashlib.sha256)

    def send_message(self, kind: int, body: bytes) -> None:
        message = _HEADER.pack(kind, len(body)) + body
        self.send(message + self._mac(message))

    def receive_message(self) -> tuple[int, bytes]:
        header = self.receive(_HEADER.size)
        kind, length = _HEADER.unpack(header)
        if length > BODY_BYTES_MAX:
            raise Malformed(f"a message of {length} bytes: at most {BODY_BYTES_MAX}")
        body = self.receive(length)
        if not hmac.compare_digest(self.receive(_MAC_BYTES), self._mac(header + body)):
            raise Malformed("the message is not signed with this agent's token")
        return kind, body


def ask(address: tuple[str, int], token: bytes, kind: int, body: bytes) -> bytes:
    """Says one thing to a listener and returns its answer; raises OSError or Malformed."""
    with socket.create_connection(address, timeout=LIMIT_S) as connection:
        channel = _Channel(connection, token)
        magic, version, channel.nonce = _GREETING.unpack(channel.receive(_GREETING.size))
        if (magic, version) != (_MAGIC, _VERSION):
            raise Malformed(f"{address[0]}:{address[1]} is no listener of version {_VERSION}")
        channel.send_message(kind, body)
        answered, answer = channel.receive_message()
        if answered != _ANSWER:
            raise Malformed(f"an answer of kind {answered}")
        return answer


class Listener:
    """Answers on a port until it is closed, each connection on a thread of its own."""

    def __init__(self, address: tuple[str, int], token: bytes, answer: Callable[[int, bytes], bytes]) -> None:
        self._fork_guard = ForkGuard()
        self._closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family)
        self._token = token
        self._answer = answer
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        threading.Thread(target=self._run, name="forebay-exchange", daemon=True).start()

    @property
    def port(self) -> int:
        """The port, also where the system has chosen it."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Ends the thread. A child of `fork()` only closes a descriptor of its parent's socket."""
        self._closed = True
        if not self._fork_guard.is_owner:
            self._socket.close()
            return
        try:
            # Closing alone would leave the thread in `accept`.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                # No descriptor left, say: the next one may find one.
                logger.warning("no connection could be accepted: %s", error)
                time.sleep(_PAUSE_S)
                continue
            self._slots.acquire()
            try:
                handler = threading.Thread(target=self._handle, args=(connection, peer), daemon=True)
                handler.start()
            except RuntimeError as error:
                logger.warning("metadata from %s: %s", peer, error)
                connection.close()
                self._slots.release()

    def _handle(self, connection: socket.socket, peer: object) -> None:
        with connection:
            try:
                self._serve(connection)
            except (OSError, Malformed) as error:
                logger.warning("metadata from %s: %s", peer, error)
            finally:
                self._slots.release()

    def _serve(self, connection: socket.socket) -> None:
        channel = _Channel(connection, self._token)
        channel.nonce = os.urandom(16)
        channel.send(_GREETING.pack(_MAGIC, _VERSION, channel.nonce))
        kind, body = channel.receive_message()
        channel.send_message(_ANSWER, self._answer(kind, body))
