"""`forebay.cuda` from Python, on the fake driver."""

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.cuda import PinnedPool

MIB = 1 << 20
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def driver() -> Iterator[None]:
    """The fake driver is what the process loads; it is built unless it is up to date."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    subprocess.run(["cargo", "build", "--quiet", "--package", "fake-cuda"], cwd=ROOT, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREBAY_LIBCUDA", str(target / "debug" / "libfake_cuda.so"))
        yield


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


def test_warming_pins_ahead() -> None:
    pool = PinnedPool(4 * MIB, shared=True)
    pool.warm(4 * MIB)
    assert (pool.held_bytes, pool.registrations) == (4 * MIB, 1)


def test_a_full_pool_refuses_with_the_limit() -> None:
    pool = PinnedPool(4 * MIB)
    kept = pool.take(3 * MIB)
    with pytest.raises(forebay.NoRoomError, match="may hold 4194304 bytes and 3145728 of them are lent"):
        pool.take(2 * MIB)
    with pytest.raises(MemoryError):
        pool.warm(5 * MIB)
    assert len(kept) == 3 * MIB


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(forebay.ForebayError, match="cuDeviceGet"):
        PinnedPool(MIB, device=99)
