"""Memory that is registered and is not there, or goes later: an error, never the end of the process."""

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

import forebay

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped(pages: int, file: int = -1) -> int:
    flags = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = LIBC.mmap(None, pages * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


def refusals(base: int, length: int, *, writable: bool = True) -> list[str]:
    """What an agent says to this memory, and a node's client is not asked: it needs a node."""
    agent = forebay.Agent("here", listen=None)
    with pytest.raises(forebay.InvalidError) as refused:
        agent.register_memory((base, length), writable=writable)
    agent.close()
    return str(refused.value).split(": ", 1)


def test_memory_that_is_not_there_is_refused_with_the_range() -> None:
    base = mapped(8)
    LIBC.munmap(base + 3 * PAGE, PAGE)
    hole = f"{base + 3 * PAGE:#x}..{base + 4 * PAGE:#x}"
    assert refusals(base, 8 * PAGE)[1].endswith(f"{hole} is not mapped")
    LIBC.mprotect(base + PAGE, PAGE, mmap.PROT_READ)
    assert refusals(base, 3 * PAGE)[1].endswith(f"{base + PAGE:#x}..{base + 2 * PAGE:#x} cannot be written")
    LIBC.mprotect(base + PAGE, PAGE, 0)
    closed = f"{base + PAGE:#x}..{base + 2 * PAGE:#x} cannot be read"
    assert refusals(base, 3 * PAGE, writable=False)[1].endswith(closed)
    agent = forebay.Agent("here", listen=None)
    agent.register_memory((base, PAGE))
    LIBC.mprotect(base + PAGE, PAGE, mmap.PROT_READ)
    agent.register_memory((base + PAGE, PAGE), writable=False)
    agent.close()


def test_the_part_of_a_file_that_is_cut_off_is_refused() -> None:
    file = os.memfd_create("cut")
    os.ftruncate(file, 4 * PAGE)
    base = mapped(4, file)
    os.ftruncate(file, 2 * PAGE)
    assert refusals(base, 4 * PAGE)[1].endswith("lies behind the end of its file")
    os.close(file)


@pytest.mark.parametrize(("base", "length"), [(0, 4096), (4096, 0), (4096, 1 << 63), ((1 << 64) - 8, 16)])
def test_ranges_that_no_process_has_are_refused(base: int, length: int) -> None:
    assert "allowed: addresses above 0, 1 to 2^63 - 1 bytes" in refusals(base, length)[1]


def test_pages_of_a_cache_that_are_not_there_are_refused() -> None:
    base = mapped(4)
    LIBC.munmap(base + 3 * PAGE, PAGE)
    with pytest.raises(forebay.InvalidError, match="is not mapped"):
        forebay.PagedCache(
            "/nowhere", [(base, 4, PAGE, PAGE, 0)], page_tokens=[16], chunk_tokens=64, heads=[1]
        )


GONE = """
import ctypes, mmap, os, sys
sys.path.insert(0, sys.argv[2])
import forebay
from test_py_memory import LIBC, PAGE, mapped

pages = 64
file = os.memfd_create("cut")
os.ftruncate(file, pages * PAGE)
base = mapped(pages, file if sys.argv[1] == "cut" else -1)
ctypes.memset(base, 7, pages * PAGE)
owner, user = forebay.Agent("owner"), forebay.Agent("user")
offered = owner.register_memory((base, pages * PAGE))
mine = bytearray(pages * PAGE)
registered = user.register_memory(mine)
user.add_peer(owner.metadata())
there = user.prepare([(base, pages * PAGE, 0)], peer="owner")
here = user.prepare([(registered.address, pages * PAGE, 0)])
read, write = user.transfer("read", here, there), user.transfer("write", here, there)
read.post()
assert read.wait(60) and mine == bytes([7]) * len(mine)
# A transfer of the owner's own memory, which it reads and writes itself.
owner.add_peer(user.metadata())
local = owner.prepare([(base, pages * PAGE, 0)])
remote = owner.prepare([(registered.address, pages * PAGE, 0)], peer="user")
own = [owner.transfer(operation, local, remote) for operation in ("read", "write")]
if sys.argv[1] == "unmapped":
    LIBC.munmap(base + PAGE, PAGE)
elif sys.argv[1] == "closed":
    LIBC.mprotect(base, pages * PAGE, 0)
else:
    os.ftruncate(file, PAGE)
for transfer in (read, write, *own):
    transfer.post()
    try:
        transfer.wait(60)
        print("it ended well")
    except forebay.ForebayError as error:
        print(type(error).__name__)
# Both live, and other memory is reached as before.
other = owner.register_memory(bytearray(b"other"))
user.add_peer(owner.metadata())
theirs = user.prepare([(other.address, 5, 0)], peer="owner")
five = user.transfer("read", user.prepare([(registered.address, 5, 0)]), theirs)
five.post()
assert five.wait(60)
print(bytes(mine[:5]))
"""


@pytest.mark.parametrize("how", ["unmapped", "closed", "cut"])
def test_memory_that_goes_later_fails_transfers_and_ends_no_process(how: str) -> None:
    command = [sys.executable, "-c", GONE, how, os.path.dirname(__file__)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["TransferError"] * 4 + ["b'other'"], ended.stderr


def test_memory_of_a_buffer_is_accepted_as_before() -> None:
    agent = forebay.Agent("here", listen=None)
    assert agent.register_memory(bytearray(10)).bytes == 10
    assert agent.register_memory(np.zeros(1 << 20)).bytes == 8 << 20
    assert agent.register_memory(b"constant", writable=False).bytes == 8
    agent.close()
