"""`forebay.cuda` from Python, and the sleep mode of `forebay.vllm` on top of it, on the fake driver."""

import ctypes
import gc
import importlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_standin
from fake_cuda import Cuda

import forebay
import forebay.vllm
from forebay.cuda import Copier, PinnedBuffer, PinnedPool

MIB = 1 << 20
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def current(cuda: Cuda) -> Iterator[None]:
    """GPU 0 is current."""
    cuda.enter(0)
    yield
    cuda.leave()


@pytest.fixture(scope="module")
def copier(cuda: Cuda) -> Copier:
    return Copier()


def fill(buffer: PinnedBuffer, seed: int) -> bytes:
    """Bytes that tell where they belong, written to a buffer."""
    contents = np.random.default_rng(seed).bytes(len(buffer))
    memoryview(buffer)[:] = contents
    return contents


def test_a_buffer_is_writable_memory_at_its_address() -> None:
    buffer = PinnedPool(8 * MIB).take(MIB + 1)
    with memoryview(buffer) as view:
        assert (view.nbytes, view.readonly, len(buffer)) == (MIB + 1, False, MIB + 1)
        view[-4:] = b"done"
    assert bytes(memoryview(buffer)[-4:]) == b"done"
    assert buffer.address % 4096 == 0


def test_memory_goes_back_when_nothing_refers_to_it_and_is_lent_again_without_pinning() -> None:
    pool = PinnedPool(8 * MIB)
    view = memoryview(pool.take(MIB))
    gc.collect()
    assert pool.lent_bytes == MIB, "a view keeps its buffer"
    view.release()
    del view
    gc.collect()
    assert (pool.lent_bytes, pool.held_bytes, pool.registrations) == (0, 8 * MIB, 1)
    assert len(pool.take(8 * MIB)) == 8 * MIB
    assert pool.registrations == 1
    assert pool.pinning_seconds > 0


def test_a_closed_buffer_is_the_pools_again_but_not_while_it_is_looked_at() -> None:
    pool = PinnedPool(8 * MIB)
    with pool.take(MIB) as buffer:
        assert (buffer.bytes, pool.lent_bytes) == (MIB, MIB)
        with memoryview(buffer), pytest.raises(BufferError, match="1 views"):
            buffer.close()
    assert pool.lent_bytes == 0
    buffer.close()
    for use in (lambda: buffer.address, lambda: memoryview(buffer)):
        with pytest.raises(forebay.InvalidError, match="the buffer is closed"):
            use()


def test_warming_pins_ahead_and_nobody_waits_unless_he_wants_to() -> None:
    pool = PinnedPool(4 * MIB, shared=True)
    pool.warm(4 * MIB)  # On a thread of its own: whoever waits for as much waits for that thread.
    pool.warm(4 * MIB, wait=True)
    assert (pool.held_bytes, pool.registrations) == (4 * MIB, 1)


def test_a_full_pool_refuses_with_the_limit() -> None:
    pool = PinnedPool(4 * MIB)
    kept = pool.take(3 * MIB)
    with pytest.raises(forebay.NoRoomError, match="may hold 4194304 bytes and 3145728 of them are lent"):
        pool.take(2 * MIB)
    with pytest.raises(MemoryError):
        pool.warm(5 * MIB, wait=True)
    assert len(kept) == 3 * MIB


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(forebay.ForebayError, match="cuDeviceGet"):
        PinnedPool(MIB, device=99)


@pytest.mark.parametrize("bytes", [64 << 10, 12 * MIB + 4096, 100 * MIB])
def test_every_byte_arrives_from_a_thread_without_a_context(cuda: Cuda, copier: Copier, bytes: int) -> None:
    pool = PinnedPool(1 << 30)
    source, target, there = pool.take(bytes), pool.take(bytes), cuda.allocate(bytes)
    contents = fill(source, 1)

    def copy() -> None:
        copier.copy_batch_and_wait([(source.address, there, bytes)])
        copier.copy_batch_and_wait(np.array([[there, target.address, bytes]]))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert memoryview(target) == contents
    if bytes > MIB:
        assert cuda.stat("bytes.h2d.1") > 0 and cuda.stat("bytes.d2h.2") > 0


def test_a_batch_goes_both_ways_to_several_gpus_and_to_memory_that_others_do_not_reach(
    cuda: Cuda, copier: Copier
) -> None:
    pool, bytes = PinnedPool(64 * MIB), 4 * MIB
    cuda.enter(1)
    sources, there = [pool.take(bytes) for _ in range(3)], cuda.allocate(bytes)
    contents = [fill(source, seed) for seed, source in enumerate(sources)]
    closed, handle = cuda.map(2, bytes)
    cuda.leave()
    places = [there, closed]
    copier.copy_batch_and_wait([(s.address, to, bytes) for s, to in zip(sources, places, strict=False)])
    back = pool.take(bytes)
    copier.copy_batch_and_wait([(sources[2].address, there, bytes), (closed, back.address, bytes), (1, 2, 0)])
    assert memoryview(back) == contents[1]
    copier.copy_batch_and_wait([(there, back.address, bytes)])
    assert memoryview(back) == contents[2]
    cuda.enter(2)
    cuda.unmap(closed, bytes, handle)


def test_a_batch_in_a_stream_keeps_its_order_and_nobody_waits(cuda: Cuda, copier: Copier) -> None:
    pool, bytes = PinnedPool(64 * MIB), 8 * MIB
    first, second, back, word = pool.take(bytes), pool.take(bytes), pool.take(bytes), pool.take(8)
    contents = [fill(first, 1), fill(second, 2)]
    flag = ctypes.c_uint64.from_buffer(memoryview(word))
    flag.value = 0
    there, stream = cuda.allocate(bytes), cuda.stream()
    before = copier.stats()
    cuda.hold(stream, word.address)
    copier.copy_batch([(first.address, there, bytes)], stream=stream)
    copier.copy_batch([(second.address, there, bytes)], stream=stream)
    copier.copy_batch([(there, back.address, bytes)], stream=stream)
    assert memoryview(back) != contents[1]
    flag.value = 1
    cuda.finish(stream)
    assert memoryview(back) == contents[1]
    after = copier.stats()
    assert after["chains"] == before["chains"] + 3
    moved = sum(after[name] - before[name] for name in ("direct_bytes", "relayed_bytes"))
    assert moved == 3 * bytes and after["relayed_bytes"] > before["relayed_bytes"]
    paths = [(path["gpu"], path["direction"], path["over"]) for path in after["paths"]]
    assert len(paths) == 3 * 2 * 3 and paths[:3] == [(0, "h2d", 0), (0, "h2d", 1), (0, "h2d", 2)]
    assert all(path["gb_per_s"] > 0 or path["measured"] for path in after["paths"])


def test_what_was_left_to_the_driver_is_counted_by_reason(cuda: Cuda) -> None:
    copier, pool = Copier([0]), PinnedPool(64 * MIB)
    source, there, stream = pool.take(4 * MIB), cuda.allocate(4 * MIB), cuda.stream()
    contents = fill(source, 3)
    for bytes in (4096, 4 * MIB):
        copier.copy_batch([(source.address, there, bytes)], stream=stream)
    cuda.finish(stream)
    assert cuda.read(there, 4 * MIB) == contents
    stats = copier.stats()
    assert (stats["chains"], stats["declined"]) == (0, {"small": 1, "no relay": 1})
    assert set(stats["links"]) == {"gpu0.h2d", "gpu0.d2h"}


def test_the_interpreter_is_free_while_a_copy_is_waited_for(cuda: Cuda, copier: Copier) -> None:
    pool, bytes = PinnedPool(64 * MIB), 4 * MIB
    source, there = pool.take(bytes), cuda.allocate(bytes)
    cuda.control("freeze h2d.0")
    thread = threading.Thread(target=copier.copy_batch_and_wait, args=([(source.address, there, bytes)],))
    thread.start()
    assert thread.is_alive()  # And this thread runs.
    cuda.control("release h2d.0")
    thread.join()


def test_after_an_error_nothing_touches_the_memory(cuda: Cuda) -> None:
    copier, pool, bytes = Copier(), PinnedPool(64 * MIB), MIB // 2  # Not a chain.
    source, there = pool.take(bytes), cuda.allocate(2 * bytes)
    raised: list[Exception] = []

    def copy() -> None:
        try:
            copier.copy_batch_and_wait(
                [(source.address, there, bytes), (source.address, there + bytes, bytes)]
            )
        except forebay.TransferError as error:
            raised.append(error)

    cuda.control("freeze h2d.0; fail cuMemcpyAsync 2 700")
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "a copy is under way"
    cuda.control("release h2d.0")
    thread.join()
    assert "cuMemcpyAsync failed: CUDA_ERROR_ILLEGAL_ADDRESS" in str(raised)


def test_what_cannot_be_copied_is_said(cuda: Cuda, copier: Copier) -> None:
    source, there = PinnedPool(4 * MIB).take(MIB), cuda.allocate(MIB)
    plain = ctypes.create_string_buffer(4096)
    good = (source.address, there, 4096)
    for pairs, why in (
        (
            [good, (ctypes.addressof(plain), there, 4096)],
            "copy 1, 4096 bytes .* pinned host .* pageable",
        ),
        ([(source.address, source.address + 4096, 4096)], "not between host and device"),
        ([(source.address, there, 2 * MIB)], "pageable"),
        ([(source.address, (1 << 64) - 1, 2)], "beyond the last address"),
        ([good, (1, 2)], "a tuple of 3 integers"),
        (np.zeros((2, 5), dtype=np.int64), "3 columns"),
    ):
        with pytest.raises(forebay.InvalidError, match=why):
            copier.copy_batch_and_wait(pairs)
    with pytest.raises(forebay.InvalidError, match="7 does not exist; 3 GPUs are visible"):
        Copier([0, 7])
    copier.copy_batch_and_wait([])
    copier.copy_batch([])
    assert cuda.misuse() == 0


def test_relays_that_are_not_there_are_said_and_copies_go_without(cuda: Cuda, tmp_path: Path) -> None:
    copier, pool = Copier([0], relays=tmp_path / "none.sock"), PinnedPool(64 * MIB, shared=True)
    buffer, address = pool.take(32 * MIB), cuda.allocate(32 * MIB)
    contents = fill(buffer, 11)
    copier.copy_batch_and_wait([(buffer.address, address, len(buffer))])
    assert cuda.read(address, len(buffer)) == contents
    relays = copier.stats()["relays"][0]
    assert (relays["relays"], relays["shared_bytes"]) == (0, 0) and relays["reason"]


NO_DRIVER = """
import forebay
from forebay.cuda import Copier, PinnedPool
for make in (Copier, lambda: PinnedPool(1 << 30)):
    try:
        make()
    except forebay.ForebayError as error:
        print(error)
"""


def test_without_a_driver_it_is_said() -> None:
    environment = {**os.environ, "FOREBAY_LIBCUDA": "/nowhere/libcuda.so.1"}
    done = subprocess.run([sys.executable, "-c", NO_DRIVER], capture_output=True, text=True, env=environment)
    assert done.stdout.count("no CUDA driver: /nowhere/libcuda.so.1: ") == 2, done.stdout + done.stderr


LEAVING = """
import forebay.cuda, fake_cuda, os
cuda = fake_cuda.Cuda(os.environ["FOREBAY_LIBCUDA"])
copier, pool = forebay.cuda.Copier(), forebay.cuda.PinnedPool(1 << 30)
cuda.enter(0)
source, there, stream = pool.take(8 << 20), cuda.allocate(8 << 20), cuda.stream()
pool.warm(1 << 30)
copier.copy_batch([(source.address, there, 8 << 20)], stream=stream)
print("leaving", cuda.misuse())
"""


def test_a_program_ends_with_copies_and_pinning_under_way(cuda: Cuda) -> None:
    environment = {**os.environ, "FAKE_CUDA_RATES": "h2d=0.01", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "leaving 0\n"), done.stderr


class Gpu(vllm_standin.Gpu):
    """vLLM's allocator on the fake driver: virtual addresses that only their own GPU reaches."""

    cuda: Cuda
    handles: dict[int, int]

    def allocate(self, tag: str, contents: bytes, address: int | None = None) -> int:
        """Reserved once, mapped again and again."""
        address, handle = self.cuda.map(0, len(contents))
        data = vllm_standin.AllocationData((0, len(contents), address, 0), tag)
        self.pointer_to_data[address], self.handles[address] = data, handle
        self.cuda.write(address, contents)
        return address

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        """Fresh memory, not what was there."""
        _, self.handles[handle[2]] = self.cuda.map(0, handle[1], handle[2])

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        """The driver has it back."""
        self.cuda.unmap(handle[2], handle[1], self.handles.pop(handle[2]))


def test_an_engine_sleeps_and_wakes_on_real_copies(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = vllm_standin.machine()
    gpu = Gpu()
    gpu.cuda, gpu.handles, machine.gpu = cuda, {}, gpu
    modules: dict[str, Any] = machine.modules() | {"forebay.cuda": importlib.import_module("forebay.cuda")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    vllm_standin.forget_modules()
    sleep = importlib.import_module("forebay.vllm.sleep")
    monkeypatch.setattr(sleep, "FIRST_BATCH_BYTES", 16 * MIB)
    rng = random.Random(1)
    contents = {
        gpu.allocate("weights", held): held for held in map(rng.randbytes, [4 * MIB] * 12 + [2 * MIB])
    }
    gpu.allocate("kv_cache", bytes(8 * MIB))
    sleep.warm()
    backend = sleep.ForebayBackend()
    for _ in range(3):
        backend.suspend(1)
        assert gpu.handles == {}
        backend.resume()
        assert all(cuda.read(address, len(held)) == held for address, held in contents.items())
    pool, used = sleep._pool_and_copier()
    assert (pool.lent_bytes, pool.registrations) == (0, 1), "pinned once, ahead"
    assert used.stats()["relayed_bytes"] > 0
    vllm_standin.forget_modules()
