"""NIXL's Python agent: strings for states and operations, handles that release themselves.

It is a thin layer over the raw agent in `_agent`.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from forebay._fork_guard import ForkGuard

from . import _bindings, _enums, _lists
from ._bindings import nixlRegDList, nixlRemoteDList, nixlXferDList, nixlXferTelemetry
from ._inputs import MEMORY, columns_of, to_list
from .logging import get_logger

logger = get_logger(__name__)

DEFAULT_COMM_PORT = _bindings.DEFAULT_COMM_PORT

nixl_backend_handle = int


class nixl_thread_sync_t(Enum):
    """Who locks. Every agent of Forebay may be used by any number of threads."""

    NIXL_THREAD_SYNC_NONE = _enums.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = _enums.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = _enums.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = _enums.nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT


class _Handle:
    """Something of an agent, released once: by `release`, or with its last reference."""

    __slots__ = ("_agent", "_handle", "_fork_guard", "_released")

    def __init__(self, agent: _bindings.nixlAgent, value: int) -> None:
        self._agent = agent
        self._handle = value
        self._fork_guard = ForkGuard()
        self._released = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._handle}{', released' if self._released else ''}>"

    def _free(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Releases it; a second call does nothing."""
        if not self._released:
            self._released = True
            self._free()

    def __del__(self) -> None:
        # A child of `fork()` only forgets it: the parent goes on with it.
        if self._fork_guard.is_owner:
            self.release()


class nixl_prepped_dlist_handle(_Handle):
    """A prepared list."""

    __slots__ = ()

    def _free(self) -> None:
        self._agent.releasedDlistH(self._handle)


class nixl_xfer_handle(_Handle):
    """A transfer. Releasing it cancels it; nothing touches the memory afterwards."""

    __slots__ = ()

    def _free(self) -> None:
        self._agent.releaseXferReq(self._handle)


class nixl_agent_config:
    """How an agent is made. Progress needs nobody's help: `enable_prog_thread` has no effect."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Iterable[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, not {type(sync_mode).__name__!r}")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """One end of transfers: registers memory, knows peers, reads and writes theirs."""

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        if nixl_conf and instantiate_all:
            logger.warning("instantiate_all has no effect beside a configuration")
        config = nixl_conf or nixl_agent_config()
        self.agent = _bindings.nixlAgent(agent_name, _raw_config(config))
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        self.nixl_mems = dict(MEMORY)
        self.nixl_ops = {"WRITE": _enums.nixl_xfer_op_t.NIXL_WRITE, "READ": _enums.nixl_xfer_op_t.NIXL_READ}
        for backend in self.plugin_list if instantiate_all and not nixl_conf else config.backends:
            if backend in self.plugin_list:
                self.create_backend(backend)
            else:
                logger.warning("there is no back end %s: left out", backend)

    def fileno(self) -> int:
        """Becomes readable when a transfer ends or a notification comes. An addition to NIXL."""
        return self.agent.forebay.fileno()

    def clear_events(self) -> None:
        """Makes `fileno` quiet until the next event. Call it before looking at states."""
        self.agent.forebay.clear_events()

    # Back ends.

    def _handles(self, backends: Iterable[str]) -> list[int]:
        return [self.backends[name] for name in backends]

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        return self._plugin(backend)[1]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """The options of a back end, with their defaults."""
        return self._plugin(backend)[0]

    def _plugin(self, backend: str) -> tuple[dict[str, str], list[str]]:
        if backend not in self.plugin_list:
            logger.warning("there is no back end %s", backend)
            return {}, []
        return self.agent.getPluginParams(backend)

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return self._backend(backend)[1]

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self._backend(backend)[0]

    def _backend(self, backend: str) -> tuple[dict[str, str], list[str]]:
        if backend not in self.backends:
            logger.warning("this agent has no back end %s", backend)
            return {}, []
        return self.agent.getBackendParams(self.backends[backend])

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        self.backends[backend] = self.agent.createBackend(backend, initParams or {})

    # Memory.

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Iterable[str] = ()
    ) -> nixlRegDList | None:
        """Registers memory; the answer is what `deregister_memory` takes."""
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise ValueError("these are no descriptors to register; the log says why")
        self.agent.registerMem(descs, self._handles(backends))
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Iterable[str] = ()) -> None:
        """Takes memory back. Returns when nothing touches it any more."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        if backend not in self.backends:
            raise ValueError(f"no back end {backend!r}; there are {list(self.backends)}")
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise ValueError("these are no descriptors to ask about; the log says why")
        return self.agent.queryMem(descs, self.backends[backend])

    # Transfers.

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Iterable[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """Checks a list once for many transfers.

        `agent_name` says whose memory it is: "NIXL_INIT_AGENT" or "" is this agent as the one that
        asks, any other name is the other side. A row of an N x 5 array is (address, length, device,
        stride, count).
        """
        name = _bindings.NIXL_INIT_AGENT if agent_name in ("", b"", "NIXL_INIT_AGENT") else agent_name
        handles = self._handles(backends)
        if columns_of(xfer_list) == 5:
            if mem_type is None:
                raise ValueError("a memory type is needed with a strided array")
            handle = self.agent.prepXferDlist(name, self.nixl_mems[mem_type], xfer_list, handles)
        else:
            handle = self.agent.prepXferDlist(name, self.get_xfer_descs(xfer_list, mem_type), handles)
        return nixl_prepped_dlist_handle(self.agent, handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backends: Iterable[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer of some descriptors of two prepared lists, by lists or arrays of indices."""
        op = self.nixl_ops[operation]
        handle = self.agent.makeXferReq(
            op,
            local_xfer_side._handle,
            local_indices,
            remote_xfer_side._handle,
            remote_indices,
            notif_msg,
            self._handles(backends),
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, handle)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Iterable[str] = (),
    ) -> nixl_xfer_handle:
        op = self.nixl_ops[operation]
        handle = self.agent.createXferReq(
            op, local_descs, remote_descs, remote_agent, notif_msg, self._handles(backends)
        )
        return nixl_xfer_handle(self.agent, handle)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """Starts a transfer: "PROC", or "DONE" if it has ended already."""
        return _state(self.agent.postXferReq(handle._handle, notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """ "PROC" or "DONE"; a failure is raised, with its reason."""
        return _state(self.agent.getXferStatus(handle._handle))

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        return self.agent.getXferTelemetry(handle._handle)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        duration, margin, _ = self.agent.estimateXferCost(req_handle._handle)
        return duration, margin, "ANALYTICAL_BACKEND"

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        found = self.agent.queryXferBackend(handle._handle)
        return next(name for name, backend in self.backends.items() if backend == found)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    def prep_mem_view(
        self, dlist: nixlXferDList | nixlRemoteDList, *, backends: Iterable[str] | None = None
    ) -> int:
        return self.agent.prepMemView(dlist, self._handles(backends or ()))

    def release_mem_view(self, mvh: int) -> None:
        self.agent.releaseMemView(mvh)

    # Notifications.

    def get_new_notifs(self, backends: Iterable[str] = ()) -> dict[str, list[bytes]]:
        """The messages that have come since the last call, by sender."""
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: Iterable[str] = ()) -> dict[str, list[bytes]]:
        """All messages that nobody has taken out of `notifs` yet, by sender."""
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: bytes,
        backends: Iterable[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Whether a message with this tag has come from a peer; takes the first one out."""
        messages = self.update_notifs(backends).get(remote_agent_name, [])
        for at, message in enumerate(messages):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del messages[at]
                return True
        return False

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None
    ) -> None:
        """Sends a message to a peer. Returns when the peer has it.

        Raises, after 5 s at the latest, if the peer has too many messages that nobody took, is dead
        or does not answer. The message may have arrived if only the answer was lost.
        """
        self.agent.genNotif(remote_agent_name, notif_msg, self._handles([backend] if backend else []))

    # Peers.

    def make_connection(self, remote_agent: str | bytes, backends: Iterable[str] = ()) -> None:
        """Connects now what would connect with the first transfer."""
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def get_agent_metadata(self) -> bytes:
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Iterable[str] = ()
    ) -> bytes:
        """The same as `get_agent_metadata`: Forebay's metadata is small and whole."""
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Takes in a peer's metadata; returns its name, in bytes as NIXL does."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forgets a peer. What is under way with it ends with an error."""
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Tells a listening peer of this agent."""
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Iterable[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Asks a listening peer for its metadata."""
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has a listening peer forget this agent."""
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        """Whether a peer is known, and memory of it."""
        descs = descs or nixlXferDList(_enums.nixl_mem_t.DRAM_SEG)
        return self.agent.checkRemoteMD(agent, descs) == _enums.nixl_status_t.NIXL_SUCCESS

    # Descriptors.

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        """A list to transfer, of 3-tuples or an N x 3 array with a memory type, or of tensors."""
        return to_list(nixlXferDList, descs, mem_type, 3)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        """A list to register, of 4-tuples or an N x 3 array with a memory type, or of tensors."""
        return to_list(nixlRegDList, descs, mem_type, 4)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList | None:
        """A list of (address, length, device, agent name)."""
        if isinstance(descs, nixlRemoteDList):
            return descs
        if mem_type is None or not isinstance(descs, Sequence) or any(len(desc) != 4 for desc in descs):
            logger.error("a memory type and tuples of 4 are needed for a nixlRemoteDList")
            return None
        return nixlRemoteDList(self.nixl_mems[mem_type], list(descs))

    def get_serialized_descs(self, descs: nixlXferDList | nixlRegDList) -> bytes:
        """A list for another process, in a checked form of bytes: no pickle."""
        return descs.to_bytes()

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """The list that `get_serialized_descs` wrote; anything else is refused."""
        return _lists.from_bytes(serialized_descs)


def _raw_config(config: nixl_agent_config) -> _bindings.nixlAgentConfig:
    default = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    if config.enable_listen:
        default = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    raw = _bindings.nixlAgentConfig()
    raw.useProgThread = config.enable_pthread
    raw.useListenThread = config.enable_listen
    raw.listenPort = config.port
    raw.syncMode = (config.sync_mode or default).value
    raw.captureTelemetry = config.capture_telemetry
    return raw


def _state(status: _enums.nixl_status_t) -> str:
    return "DONE" if status == _enums.nixl_status_t.NIXL_SUCCESS else "PROC"
