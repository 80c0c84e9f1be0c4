"""Memory for tests and examples written for NIXL: blocks of the C library, by address."""

import ctypes

_c = ctypes.CDLL(None)
_c.malloc.restype = ctypes.c_void_p
_c.malloc.argtypes = [ctypes.c_size_t]
_c.free.argtypes = [ctypes.c_void_p]

_FILL = 0xBA


def malloc_passthru(bytes_: int) -> int:
    """The address of new memory, to be given back with `free_passthru`."""
    address = _c.malloc(bytes_)
    if not address:
        raise MemoryError(f"no {bytes_} bytes")
    return int(address)


def free_passthru(address: int) -> None:
    """Gives back what `malloc_passthru` gave."""
    _c.free(address)


def ba_buf(address: int, bytes_: int) -> None:
    """Fills memory with one byte, 0xBA."""
    ctypes.memset(address, _FILL, bytes_)


def verify_transfer(one: int, other: int, bytes_: int) -> None:
    """Raises unless both places hold the same bytes."""
    a, b = ctypes.string_at(one, bytes_), ctypes.string_at(other, bytes_)
    if a != b:
        at = next(i for i in range(bytes_) if a[i] != b[i])
        raise AssertionError(f"byte {at} of {bytes_} is {a[at]:#x} at one place and {b[at]:#x} at the other")
