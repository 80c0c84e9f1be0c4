"""NIXL's raw agent over `forebay.Agent`: integer handles, statuses, one exception for each failure.

What the methods do is said in `_api`. There is one back end, FOREBAY. It answers to UCX too, since
programs ask for that one. It moves DRAM and VRAM.
"""

import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from forebay import Agent, ForebayError, Prepared, Registration, Transfer
from forebay._fork_guard import ForkGuard

from . import _exchange, _settings
from ._enums import nixl_cost_t, nixl_mem_t, nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t
from ._errors import (
    failure,
    nixlBackendError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRepostActiveError,
    nixlUnknownError,
    translated,
)
from ._lists import nixlRegDList, nixlRemoteDList, nixlXferDList
from .logging import get_logger

logger = get_logger(__name__)

DEFAULT_COMM_PORT = 8888
TO_SELF_MAX = 65_536
"""Messages of an agent to itself that wait to be taken."""
# The name under which an agent prepares lists of its own memory. No agent can be called so.
NIXL_INIT_AGENT = ""

_BACKENDS = ("FOREBAY", "UCX")
_MOVED: dict[nixl_mem_t, Literal["DRAM", "VRAM"]] = {
    nixl_mem_t.DRAM_SEG: "DRAM",
    nixl_mem_t.VRAM_SEG: "VRAM",
}
_TELEMETRY = "NIXL_TELEMETRY_ENABLE"
_YES = ("y", "yes", "on", "true", "1", "enable")

_T = TypeVar("_T")


class nixlAgentConfig:
    """How an agent is made. Some settings have no meaning here, and no effect."""

    def __init__(
        self,
        useProgThread: bool = False,
        useListenThread: bool = False,
        listenPort: int = 0,
        syncMode: nixl_thread_sync_t = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT,
        *_: int,
    ) -> None:
        self.useProgThread = useProgThread
        self.useListenThread = useListenThread
        self.listenPort = listenPort
        self.syncMode = syncMode
        self.captureTelemetry = False
        self.pthrDelay = 0
        self.lthrDelay = 0
        self.etcdWatchTimeout = 0


class nixlXferTelemetry(NamedTuple):
    """What a transfer was. Times are in microseconds, from 1970 on; durations are rounded up."""

    startTime: int
    postDuration: int
    xferDuration: int
    totalBytes: int
    descCount: int


class nixlAgent:
    """One end of transfers. Any number of threads may use it."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        if not name:
            raise ValueError("an agent needs a name of at least one character")
        self._fork_guard = ForkGuard()
        self._name = name
        self._config = config
        self._settings = _settings.read()
        self._telemetry = _telemetry_is_on(config)
        self._agent: Agent | None = None
        self._backends: dict[int, str] = {}
        self._handles = itertools.count(1)
        self._registered: dict[tuple[int, int], list[Registration]] = {}
        self._peers: set[str] = set()
        self._lists: dict[int, Prepared] = {}
        self._transfers: dict[int, Transfer] = {}
        self._to_self: list[bytes] = []
        self._lock = threading.Lock()
        # Held while memory is deregistered, which waits for what is under way.
        self._memory_lock = threading.Lock()
        self._listener = self._listen() if config.useListenThread else None

    # Back ends.

    def getAvailPlugins(self) -> list[str]:
        return list(_BACKENDS)

    def getPluginParams(self, name: str) -> tuple[dict[str, str], list[str]]:
        if name not in _BACKENDS:
            raise failure(nixlNotFoundError, f"no back end {name!r}; there are {', '.join(_BACKENDS)}")
        options = {"listen": self._settings.listen, "flows_max": "4", "progress_limit_ms": "2000"}
        return options, [memory.name for memory in _MOVED]

    @translated
    def createBackend(self, name: str, options: dict[str, str]) -> int:
        """Starts the agent. Options that only UCX knows have no effect."""
        self._fork_guard.check()
        defaults, _ = self.getPluginParams(name)
        unknown = options.keys() - defaults.keys()
        if unknown and name == "FOREBAY":
            raise failure(nixlInvalidParamError, f"no option {sorted(unknown)}; there are {sorted(defaults)}")
        with self._lock:
            if name in self._backends.values():
                raise failure(nixlInvalidParamError, f"this agent has a back end {name} already")
            if self._agent is None:
                self._agent = self._start({**defaults, **options})
                logger.info("agent %s listens on %s", self._name, self._agent.address)
            handle = next(self._handles)
            self._backends[handle] = name
        return handle

    def _start(self, options: dict[str, str]) -> Agent:
        try:
            flows_max = int(options["flows_max"])
            progress_limit_us = int(options["progress_limit_ms"]) * 1000
        except ValueError as error:
            raise failure(nixlInvalidParamError, error) from error
        return Agent(
            self._name,
            listen=options["listen"] or None,
            advertise=self._settings.advertise,
            token=self._settings.token,
            tls=self._settings.tls,
            plain_beyond_loopback=self._settings.plain_beyond_loopback,
            flows_max=flows_max,
            progress_limit_us=progress_limit_us,
        )

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        if backend not in self._backends:
            raise failure(nixlNotFoundError, f"no back end has the handle {backend}")
        return self.getPluginParams(self._backends[backend])

    @property
    def forebay(self) -> Agent:
        """The agent below: completion by `fileno()`, statistics and more are there."""
        self._fork_guard.check()
        if self._agent is None:
            raise failure(nixlNotFoundError, "this agent has no back end: create one first")
        return self._agent

    # Memory.

    @translated
    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        """Registers all memory of the list, or none. The same memory may be registered again."""
        on_gpu = _moved(descs.getType()) == "VRAM"
        done: list[tuple[int, int]] = []
        try:
            for address, length, device, _word in descs:
                self._register((address, length), device if on_gpu else None)
                done.append((address, length))
        except ForebayError:
            for memory in reversed(done):
                self._deregister(memory)
            raise
        return nixl_status_t.NIXL_SUCCESS

    def _register(self, memory: tuple[int, int], device: int | None) -> None:
        self._fork_guard.check()
        with self._memory_lock:
            held = self._registered.get(memory)
            if held:
                held.append(held[0])
            else:
                self._registered[memory] = [self.forebay.register_memory(memory, device=device)]

    def _deregister(self, memory: tuple[int, int]) -> None:
        self._fork_guard.check()
        with self._memory_lock:
            held = self._registered.get(memory)
            if not held:
                raise failure(nixlNotFoundError, f"{memory[1]} bytes at {memory[0]:#x} are not registered")
            if len(held) == 1:
                # It stays known where something may still touch it, to be tried again.
                self.forebay.deregister_memory(held[0])
                del self._registered[memory]
            else:
                held.pop()

    @translated
    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        for address, length, _device, _word in descs:
            self._deregister((address, length))
        return nixl_status_t.NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        raise failure(
            nixlNotSupportedError, f"{self._backends.get(backend)} keeps no files or objects to ask about"
        )

    # Peers.

    @translated
    def getLocalMD(self) -> bytes:
        if self._agent is None:
            raise failure(
                nixlInvalidParamError, "this agent has no back end, so there is nothing to reach it by"
            )
        return self._agent.metadata()

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        return self.getLocalMD()

    @translated
    def loadRemoteMD(self, metadata: bytes) -> bytes:
        try:
            name = self.forebay.add_peer(metadata)
        except ValueError as error:
            raise failure(nixlMismatchError, error) from error
        self._peers.add(name)
        return name.encode()

    @translated
    def invalidateRemoteMD(self, name: str | bytes) -> nixl_status_t:
        name = _text(name)
        if name not in self._peers:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        self._peers.discard(name)
        self.forebay.remove_peer(name)
        return nixl_status_t.NIXL_SUCCESS

    def checkRemoteMD(self, name: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        name = _text(name)
        if name not in self._peers:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        try:
            if not descs.isEmpty():
                self.forebay.prepare(descs.rows, peer=name)
        except ForebayError:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        return nixl_status_t.NIXL_SUCCESS

    @translated
    def makeConnection(self, name: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        self.forebay.connect(_text(name))
        return nixl_status_t.NIXL_SUCCESS

    # Metadata by socket, as NIXL's listener has it.

    def _listen(self) -> _exchange.Listener:
        this = weakref.ref(self)

        def answer(kind: int, body: bytes) -> bytes:
            agent = this()
            return agent._answer(kind, body) if agent else b""

        address = (self._settings.host, self._config.listenPort)
        try:
            listener = _exchange.Listener(address, self._settings.token, answer)
        except OSError as error:
            raise failure(nixlBackendError, f"{address[0]}:{address[1]}: {error}") from error
        weakref.finalize(self, listener.close)
        return listener

    def _answer(self, kind: int, body: bytes) -> bytes:
        try:
            if kind == _exchange.SEND_METADATA:
                self.loadRemoteMD(body)
            elif kind == _exchange.INVALIDATE_METADATA:
                self.invalidateRemoteMD(body.decode())
            elif kind == _exchange.FETCH_METADATA:
                return self.getLocalMD()
        except (ForebayError, ValueError) as error:
            logger.warning("a message of kind %d was not taken: %s", kind, error)
        return b""

    def _ask(self, address: str, port: int, kind: int, body: bytes) -> bytes:
        if not address:
            raise failure(
                nixlInvalidParamError, "there is no metadata server here: name a peer's address and port"
            )
        try:
            return _exchange.ask((address, port or DEFAULT_COMM_PORT), self._settings.token, kind, body)
        except (OSError, _exchange.Malformed) as error:
            # As in NIXL, the caller learns of it from `checkRemoteMD`, and may ask again.
            logger.error("metadata from %s:%d: %s", address, port or DEFAULT_COMM_PORT, error)
            return b""

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._ask(ip_addr, port, _exchange.SEND_METADATA, self.getLocalMD())

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        self.sendLocalMD(ip_addr, port)

    def fetchRemoteMD(self, remote_agent: str, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        metadata = self._ask(ip_addr, port, _exchange.FETCH_METADATA, b"")
        if metadata:
            name = self.loadRemoteMD(metadata).decode()
            if name != remote_agent:
                logger.warning("%s:%d is %r, not %r", ip_addr, port, name, remote_agent)

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._ask(ip_addr, port, _exchange.INVALIDATE_METADATA, self._name.encode())

    # Transfers.

    @translated
    def prepXferDlist(self, *args: Any) -> int:
        """Checks a list once. Takes `[agent,] list` or `agent, memory type, N x 5 array`."""
        name, memory, descs = _prepared_from(args)
        kind = _moved(memory)
        if len(descs) == 0:
            raise failure(nixlNotFoundError, "a list without descriptors")
        prepared = self._prepare(name, descs, kind)
        handle = next(self._handles)
        self._lists[handle] = prepared
        return handle

    def _prepare(self, name: str | bytes, descs: Any, memory: Literal["DRAM", "VRAM"]) -> Prepared:
        rows = descs.rows if isinstance(descs, nixlXferDList) else descs
        peer = _text(name) or None
        if peer == self._name:
            # Its own memory is the other side: it connects to itself as to any peer.
            self.forebay.add_peer(self.forebay.metadata())
        return self.forebay.prepare(rows, peer=peer, memory=memory)

    def releasedDlistH(self, handle: int) -> nixl_status_t:
        _take(self._lists, handle)
        return nixl_status_t.NIXL_SUCCESS

    @translated
    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: int,
        local_indices: Any,
        remote_side: int,
        remote_indices: Any,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
        skip_desc_merg: bool = False,
    ) -> int:
        local, remote = _find(self._lists, local_side), _find(self._lists, remote_side)
        return self._make(operation, local, local_indices, remote, remote_indices, notif_msg)

    @translated
    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: str | bytes = b"",
        backend: Sequence[int] = (),
    ) -> int:
        here, there = _moved(local_descs.getType()), _moved(remote_descs.getType())
        local = self._prepare(NIXL_INIT_AGENT, local_descs, here)
        remote = self._prepare(remote_agent, remote_descs, there)
        return self._make(operation, local, None, remote, None, notif_msg)

    def _make(
        self,
        operation: nixl_xfer_op_t,
        local: Prepared,
        local_indices: Any,
        remote: Prepared,
        remote_indices: Any,
        notif_msg: str | bytes,
    ) -> int:
        transfer = self.forebay.transfer(
            "read" if operation == nixl_xfer_op_t.NIXL_READ else "write",
            local,
            remote,
            local_indices=local_indices,
            remote_indices=remote_indices,
            notification=_encoded(notif_msg) or None,
        )
        handle = next(self._handles)
        self._transfers[handle] = transfer
        return handle

    @translated
    def postXferReq(self, handle: int, notif_msg: str | bytes = b"") -> nixl_status_t:
        """Starts a transfer, also again after its end. `notif_msg` replaces that of the request."""
        transfer = _find(self._transfers, handle)
        if transfer.state == "moving":
            raise failure(nixlRepostActiveError, "the transfer is under way")
        if notif_msg:
            transfer.post(_encoded(notif_msg))
        else:
            transfer.post()
        return self._status(transfer)

    @translated
    def getXferStatus(self, handle: int) -> nixl_status_t:
        return self._status(_find(self._transfers, handle))

    @staticmethod
    def _status(transfer: Transfer) -> nixl_status_t:
        state = transfer.state
        if state == "moving":
            return nixl_status_t.NIXL_IN_PROG
        if state == "ready":
            raise failure(nixlNotPostedError, "the transfer has not been posted")
        if state == "failed":
            raise transfer.error or failure(nixlUnknownError, "a failure without a reason")
        return nixl_status_t.NIXL_SUCCESS

    @translated
    def releaseXferReq(self, handle: int) -> nixl_status_t:
        _take(self._transfers, handle).cancel()
        return nixl_status_t.NIXL_SUCCESS

    def queryXferBackend(self, handle: int) -> int:
        _find(self._transfers, handle)
        return next(iter(self._backends))

    @translated
    def getXferTelemetry(self, handle: int) -> nixlXferTelemetry:
        transfer = _find(self._transfers, handle)
        if not self._telemetry:
            raise failure(nixlNoTelemetryError, f"telemetry is off: capture_telemetry, or {_TELEMETRY}=y")
        times = transfer.times
        if times is None:
            raise failure(nixlNoTelemetryError, "the transfer has not ended")
        start_ns, post_ns, all_ns = times
        return nixlXferTelemetry(
            startTime=start_ns // 1000,
            postDuration=_whole_us(post_ns),
            xferDuration=_whole_us(all_ns),
            totalBytes=transfer.total_bytes,
            descCount=transfer.blocks,
        )

    def estimateXferCost(self, handle: int) -> tuple[int, int, nixl_cost_t]:
        _find(self._transfers, handle)
        return 0, 0, nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND

    def prepMemView(self, dlist: nixlXferDList | nixlRemoteDList, backends: Sequence[int] = ()) -> int:
        raise failure(nixlNotSupportedError, "memory views are a GPU's own way to peers; this agent has none")

    def releaseMemView(self, view: int) -> None:
        raise failure(nixlNotFoundError, f"no memory view has the handle {view}")

    # Notifications.

    @translated
    def genNotif(
        self, remote_agent: str | bytes, msg: str | bytes, backends: Sequence[int] = ()
    ) -> nixl_status_t:
        self._fork_guard.check()
        remote_agent = _text(remote_agent)
        if remote_agent == self._name:
            with self._lock:
                if len(self._to_self) >= TO_SELF_MAX:
                    raise failure(
                        nixlNotAllowedError,
                        f"{TO_SELF_MAX} messages of this agent to itself wait to be taken: take them first",
                    )
                self._to_self.append(_encoded(msg))
        else:
            self.forebay.notify(remote_agent, _encoded(msg))
        return nixl_status_t.NIXL_SUCCESS

    @translated
    def getNotifs(
        self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()
    ) -> dict[str, list[bytes]]:
        for sender, message in self.forebay.take_notifications():
            notif_map.setdefault(sender, []).append(message)
        with self._lock:
            mine, self._to_self = self._to_self, []
        if mine:
            notif_map.setdefault(self._name, []).extend(mine)
        return notif_map


def _telemetry_is_on(config: nixlAgentConfig) -> bool:
    said = os.environ.get(_TELEMETRY)
    return config.captureTelemetry if said is None else said.lower() in _YES


def _moved(memory: nixl_mem_t) -> Literal["DRAM", "VRAM"]:
    kind = _MOVED.get(memory)
    if kind is None:
        allowed = " and ".join(memory.name for memory in _MOVED)
        raise failure(nixlNotSupportedError, f"{nixl_mem_t(memory).name}: this agent moves {allowed} only")
    return kind


def _prepared_from(args: tuple[Any, ...]) -> tuple[str | bytes, nixl_mem_t, Any]:
    """The three ways to call `prepXferDlist`: whose memory, which kind, and what."""
    match args:
        case (nixlXferDList() as descs, *_):
            return NIXL_INIT_AGENT, descs.getType(), descs
        case (str() | bytes() as name, nixlXferDList() as descs, *_):
            return name, descs.getType(), descs
        case (str() | bytes() as name, nixl_mem_t() as memory, array, *_):
            return name, memory, array
    raise failure(
        nixlInvalidParamError, f"a list of transfers is expected, not {[type(a).__name__ for a in args]}"
    )


def _find(table: dict[int, _T], handle: int) -> _T:
    found = table.get(handle)
    if found is None:
        raise failure(nixlInvalidParamError, f"nothing has the handle {handle}")
    return found


def _take(table: dict[int, _T], handle: int) -> _T:
    found = _find(table, handle)
    del table[handle]
    return found


def _text(name: str | bytes) -> str:
    """A name as text: `loadRemoteMD` gives names in bytes, and programs hand them on."""
    return name.decode() if isinstance(name, bytes) else name


def _encoded(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else bytes(message)


def _whole_us(ns: int) -> int:
    return -(-ns // 1000)
