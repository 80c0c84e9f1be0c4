"""The fake driver from Python: memory of its GPUs, streams, what it counted.

Knows `cuda.h`, and nothing of Forebay.
"""

import ctypes
from typing import Any

U64 = ctypes.c_uint64


class _Property(ctypes.Structure):
    """`CUmemAllocationProp`: pinned memory of one GPU, not to be exported."""

    _fields_ = [("ints", ctypes.c_int * 4), ("rest", U64 * 2)]


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("ints", ctypes.c_int * 3)]


class Cuda:
    """The driver in this process. Calls that fail raise with the symbol and the code."""

    def __init__(self, path: str) -> None:
        """Loads it, or finds it loaded."""
        self.library = ctypes.CDLL(path)
        self.library.fake_cuda_stat.restype = U64
        self.library.fake_cuda_misuse.restype = U64
        self.contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)

    def call(self, symbol: str, *arguments: Any) -> None:
        """One call of the driver."""
        code = getattr(self.library, symbol)(*arguments)
        if code != 0:
            raise RuntimeError(f"{symbol} gives {code}")

    def enter(self, gpu: int = 0) -> None:
        """Makes a GPU's primary context current on this thread."""
        if gpu not in self.contexts:
            self.contexts[gpu] = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.contexts[gpu]), gpu)
        self.call("cuCtxSetCurrent", self.contexts[gpu])

    def leave(self) -> None:
        """No context is current on this thread."""
        self.call("cuCtxSetCurrent", None)

    def allocate(self, bytes: int) -> int:
        """Memory of the current GPU."""
        address = U64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(bytes))
        return address.value

    def map(self, gpu: int, bytes: int, address: int | None = None) -> tuple[int, int]:
        """Memory that only its own GPU reaches. Returns its address and its handle."""
        at, handle, length = U64(address or 0), U64(), ctypes.c_size_t(bytes)
        if address is None:
            self.call("cuMemAddressReserve", ctypes.byref(at), length, ctypes.c_size_t(0), U64(0), U64(0))
        wanted = _Property((ctypes.c_int * 4)(1, 0, 1, gpu))
        self.call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(wanted), U64(0))
        self.call("cuMemMap", at, length, ctypes.c_size_t(0), handle, U64(0))
        access = _Access((ctypes.c_int * 3)(1, gpu, 3))
        self.call("cuMemSetAccess", at, length, ctypes.byref(access), ctypes.c_size_t(1))
        return at.value, handle.value

    def unmap(self, address: int, bytes: int, handle: int) -> None:
        """The memory is gone; its address stays reserved."""
        self.call("cuMemUnmap", U64(address), ctypes.c_size_t(bytes))
        self.call("cuMemRelease", U64(handle))

    def stream(self) -> int:
        """A stream of the current GPU that waits for no other."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream.value or 0

    def hold(self, stream: int, word: int) -> None:
        """Has a stream wait until there is a 1 at an address of pinned memory."""
        self.call("cuStreamWaitValue64_v2", ctypes.c_void_p(stream), U64(word), U64(1), 0)

    def finish(self, stream: int) -> None:
        """Waits for a stream."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def write(self, address: int, contents: bytes) -> None:
        """Copies to a GPU by the driver."""
        self.call("cuMemcpyHtoD_v2", U64(address), contents, ctypes.c_size_t(len(contents)))

    def read(self, address: int, bytes: int) -> bytes:
        """Copies from a GPU by the driver."""
        contents = ctypes.create_string_buffer(bytes)
        self.call("cuMemcpyDtoH_v2", contents, U64(address), ctypes.c_size_t(bytes))
        return contents.raw

    def control(self, commands: str) -> None:
        """Has something go wrong."""
        self.call("fake_cuda_control", commands.encode())

    def stat(self, name: str) -> int:
        """A counter."""
        return int(self.library.fake_cuda_stat(name.encode()))

    def misuse(self) -> int:
        """What was done that must not be done."""
        return int(self.library.fake_cuda_misuse())
