"""Sleep mode of vLLM: `forebay.vllm`, on stand-ins for vLLM, torch and `forebay.cuda`."""

import importlib
import importlib.util
import random
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_standin
from vllm_standin import Machine

import forebay.vllm

TIMEOUT_S = 20.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = vllm_standin.machine()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("FOREBAY_SLEEP_KEEP_KV", raising=False)
    monkeypatch.delenv("FOREBAY_RELAYS", raising=False)
    vllm_standin.forget_modules()
    yield made
    vllm_standin.forget_modules()


@pytest.fixture
def sleep(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("forebay.vllm._sleep_buffers.PIECE_BYTES", vllm_standin.SLAB_BYTES // 4)
    return importlib.import_module("forebay.vllm.sleep")


def fill(machine: Machine, *, allocations: int = 40, seed: int = 1) -> dict[str, dict[int, bytes]]:
    """An engine's memory. Returns the contents by tag and address."""
    rng = random.Random(seed)
    contents: dict[str, dict[int, bytes]] = {"weights": {}, "kv_cache": {}, "runtime": {}}
    for _ in range(allocations):
        tag = rng.choice(("weights", "weights", "kv_cache", "runtime"))
        held = rng.randbytes(rng.randrange(1, 5000))
        contents[tag][machine.gpu.allocate(tag, held)] = held
    return contents


def holds(machine: Machine, wanted: dict[int, bytes]) -> bool:
    there = machine.gpu.contents()
    return all(there.get(address) == held for address, held in wanted.items())


def test_every_byte_is_back_after_each_wake(machine: Machine, sleep: Any) -> None:
    contents = fill(machine)
    kept = contents["weights"] | contents["runtime"]
    backend = sleep.ForebayBackend()
    for _ in range(3):
        backend.suspend(1)
        assert machine.gpu.mapped == {} and backend.state() == "SUSPENDED"
        backend.resume()
        assert holds(machine, kept) and backend.state() == "RUNNING"
        assert set(machine.gpu.mapped) == set(kept) | set(contents["kv_cache"])


def test_all_allocations_go_out_in_one_batch(machine: Machine, sleep: Any) -> None:
    contents = fill(machine)
    sleep.ForebayBackend().suspend(1)
    kept = sum(map(len, (contents["weights"] | contents["runtime"]).values()))
    assert [sum(length for _, _, length in batch) for batch in machine.copier.batches] == [kept]


def test_kv_is_dropped_unless_it_is_to_be_kept(
    machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = fill(machine)["kv_cache"]
    backend = sleep.ForebayBackend()
    monkeypatch.setenv("FOREBAY_SLEEP_KEEP_KV", "1")
    backend.suspend(1)
    backend.resume()
    assert holds(machine, kv)
    monkeypatch.setenv("FOREBAY_SLEEP_KEEP_KV", "0")
    backend.suspend(1)
    backend.resume()
    assert not any(holds(machine, {address: held}) for address, held in kv.items())


def test_level_2_drops_weights_and_kv_and_keeps_all_other_state(
    machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = fill(machine)
    monkeypatch.setenv("FOREBAY_SLEEP_KEEP_KV", "1")
    backend = sleep.ForebayBackend()
    backend.suspend(2)
    state = sum(map(len, contents["runtime"].values()))
    assert sum(length for batch in machine.copier.batches for _, _, length in batch) == state
    backend.resume()
    assert holds(machine, contents["runtime"])
    assert not any(holds(machine, {address: held}) for address, held in contents["weights"].items())


def test_weights_can_wake_before_kv(machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = fill(machine)
    monkeypatch.setenv("FOREBAY_SLEEP_KEEP_KV", "1")
    backend = sleep.ForebayBackend()
    backend.suspend(1)
    backend.resume(["weights"])
    awake = contents["weights"] | contents["runtime"]  # Whatever is not weights or KV comes with any wake.
    assert set(machine.gpu.mapped) == set(awake) and holds(machine, awake)
    assert backend.state() == "SUSPENDED" and machine.pool.lent
    backend.resume(["kv_cache"])
    assert holds(machine, awake | contents["kv_cache"])
    assert backend.state() == "RUNNING" and machine.pool.lent == []


@pytest.mark.parametrize("seed", range(8))
def test_a_first_sleep_pins_nothing_when_it_was_warmed(machine: Machine, sleep: Any, seed: int) -> None:
    contents = fill(machine, seed=seed)
    machine.gpu.allocate("weights", bytes(3 * vllm_standin.SLAB_BYTES))
    sleep.warm()
    kept = sum(map(len, (contents["weights"] | contents["runtime"]).values()))
    assert machine.pool.warmed == [kept + 3 * vllm_standin.SLAB_BYTES]
    slabs = len(machine.pool.slabs)
    sleep.ForebayBackend().suspend(1)
    assert len(machine.pool.slabs) == slabs


def test_with_relays_of_the_node_a_worker_has_its_own_gpu_only_and_memory_that_the_node_can_map(
    machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.device = 3
    monkeypatch.setenv("FOREBAY_RELAYS", "/run/forebay/relays.sock")
    sleep.warm()
    assert machine.asked == {"pool": (True, 3), "copier": [3]}


def test_without_relays_a_worker_has_every_gpu_that_it_sees(machine: Machine, sleep: Any) -> None:
    machine.device = 3
    sleep.warm()
    assert machine.asked == {"pool": (False, 3), "copier": None}


def test_pinned_memory_is_kept_between_sleeps(machine: Machine, sleep: Any) -> None:
    fill(machine)
    backend = sleep.ForebayBackend()
    slabs = set()
    for _ in range(4):
        backend.suspend(1)
        slabs.add(len(machine.pool.slabs))
        backend.resume()
        assert machine.pool.lent == []
    assert len(slabs) == 1


def test_a_failed_copy_out_leaves_the_engine_awake(machine: Machine, sleep: Any) -> None:
    fill(machine)
    before = machine.gpu.contents()
    backend = sleep.ForebayBackend()
    machine.copier.good_copies_left = 3
    with pytest.raises(sleep.SleepError, match="cannot fall asleep.*LAUNCH_FAILED.*all memory is as it was"):
        backend.suspend(1)
    assert machine.gpu.contents() == before and backend.state() == "RUNNING"
    assert machine.pool.lent == [] and not any(d.is_asleep for d in machine.gpu.pointer_to_data.values())


def test_a_full_pool_leaves_the_engine_awake(machine: Machine, sleep: Any) -> None:
    fill(machine)
    before = machine.gpu.contents()
    machine.pool.limit_bytes = 2 * vllm_standin.SLAB_BYTES
    with pytest.raises(sleep.SleepError, match="full.*limit 32768"):
        sleep.ForebayBackend().suspend(1)
    assert machine.gpu.contents() == before and machine.pool.lent == []


@pytest.mark.parametrize("batch_bytes", [1, 10_000, 1 << 30])
def test_after_a_failed_copy_in_nothing_is_lost(
    machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    contents = fill(machine)
    monkeypatch.setattr(sleep, "FIRST_BATCH_BYTES", batch_bytes)
    backend = sleep.ForebayBackend()
    backend.suspend(1)
    interval = sys.getswitchinterval()
    machine.copier.good_copies_left = 3
    with pytest.raises(sleep.SleepError, match="cannot wake up.*LAUNCH_FAILED.*contents are kept"):
        backend.resume()
    assert machine.gpu.mapped == {} and backend.state() == "SUSPENDED"
    assert sys.getswitchinterval() == interval
    machine.copier.good_copies_left = None
    backend.resume()
    assert holds(machine, contents["weights"] | contents["runtime"])


@pytest.mark.parametrize("missing_bytes", [1, 40_000])
def test_a_gpu_that_others_have_filled_can_be_tried_again(
    machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch, missing_bytes: int
) -> None:
    contents = fill(machine)
    monkeypatch.setattr(sleep, "FIRST_BATCH_BYTES", 5000)
    needed = sum(map(len, machine.gpu.contents().values()))
    backend = sleep.ForebayBackend()
    backend.suspend(1)
    machine.gpu.free_bytes = needed - missing_bytes
    with pytest.raises(sleep.SleepError, match="out of memory"):
        backend.resume()
    assert machine.gpu.mapped == {} and machine.gpu.free_bytes == needed - missing_bytes
    machine.gpu.free_bytes = needed
    backend.resume()
    assert holds(machine, contents["weights"] | contents["runtime"])


@pytest.mark.parametrize("first_batch_bytes", [1, 1 << 30])
def test_copies_run_while_the_rest_is_mapped(
    machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch, first_batch_bytes: int
) -> None:
    monkeypatch.setattr(sleep, "FIRST_BATCH_BYTES", first_batch_bytes)
    machine.gpu.allocate("kv_cache", b"k" * 100)
    weights = machine.gpu.allocate("weights", b"w" * 100)
    backend = sleep.ForebayBackend()
    backend.suspend(1)
    copying, kv_mapped = threading.Event(), threading.Event()
    met: list[bool] = []

    def on_map(data: vllm_standin.AllocationData) -> None:
        if data.tag == "kv_cache":
            met.append(copying.wait(TIMEOUT_S))
            kv_mapped.set()

    def on_batch() -> None:
        copying.set()
        met.append(kv_mapped.wait(TIMEOUT_S))

    machine.gpu.on_map, machine.copier.on_batch = on_map, on_batch
    backend.resume()
    assert met == [True, True] and holds(machine, {weights: b"w" * 100})


def test_memory_that_was_freed_asleep_never_gets_its_contents_back(machine: Machine, sleep: Any) -> None:
    address = machine.gpu.allocate("weights", b"old" * 100)
    backend = sleep.ForebayBackend()
    backend.suspend(1)
    del machine.gpu.pointer_to_data[address]
    machine.gpu.allocate("weights", b"new" * 100, address)
    backend.resume()
    assert holds(machine, {address: b"new" * 100}) and machine.pool.lent == []


def test_who_sleeps_already_sleeps_on(machine: Machine, sleep: Any) -> None:
    contents = fill(machine)
    backend = sleep.ForebayBackend()
    backend.suspend(1)
    late = machine.gpu.allocate("weights", b"late" * 10)
    backend.suspend(1)
    assert machine.gpu.mapped == {} and len(machine.copier.batches[-1]) == 1
    backend.resume()
    assert holds(machine, contents["weights"] | {late: b"late" * 10})
    assert machine.pool.lent == []


def test_what_is_not_allowed_is_said(machine: Machine, sleep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = sleep.ForebayBackend()
    with pytest.raises(ValueError, match="level is 3; allowed are 1 and 2"):
        backend.suspend(3)
    monkeypatch.setenv("FOREBAY_SLEEP_KEEP_KV", "yes")
    with pytest.raises(ValueError, match="FOREBAY_SLEEP_KEEP_KV is 'yes'; allowed are 0 and 1"):
        backend.suspend(1)


def test_the_plug_in_may_be_loaded_again(machine: Machine) -> None:
    forebay.vllm.register()
    forebay.vllm.register()
    assert machine.factory.registry == {"forebay": ("forebay.vllm.sleep", "ForebayBackend")}
    assert machine.parts == {
        "forebay": ("forebay.vllm.tiering", "ForebayTierManager"),
        "ForebayConnector": ("forebay.vllm.connector", "ForebayConnector"),
    }


def config(*, keep_dtype: str = "auto", enabled: bool = True) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(sleep_mode_backend="cumem", enable_sleep_mode=enabled),
        cache_config=types.SimpleNamespace(cache_dtype=keep_dtype),
    )


def test_the_worker_chooses_the_backend_and_pins_ahead(machine: Machine) -> None:
    worker = importlib.import_module("forebay.vllm.worker").Worker(config(), gpu=machine.gpu)
    assert worker.backend_at_start == "forebay" and "forebay" in machine.factory.registry
    worker.load_model(load_dummy_weights=True)
    worker.initialize_from_config(None)
    assert machine.pool.warmed == [3000]


def test_the_worker_pins_ahead_for_kv_that_is_to_be_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_SLEEP_KEEP_KV", "1")
    worker = importlib.import_module("forebay.vllm.worker").Worker(config(), gpu=machine.gpu)
    worker.load_model()
    worker.initialize_from_config(None)
    assert machine.pool.warmed == [3000, 8000]


def test_an_engine_without_sleep_mode_pins_nothing(machine: Machine) -> None:
    worker = importlib.import_module("forebay.vllm.worker").Worker(config(enabled=False), gpu=machine.gpu)
    worker.load_model()
    worker.initialize_from_config(None)
    assert machine.pool.warmed == []


def test_kv_that_would_come_back_as_zeroes_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_SLEEP_KEEP_KV", "1")
    worker = importlib.import_module("forebay.vllm.worker").Worker(
        config(keep_dtype="fp8_e4m3"), gpu=machine.gpu
    )
    worker.model_runner.init_fp8_kv_scales = lambda: None
    with pytest.raises(ValueError, match="the KV cache's type is fp8_e4m3.*allowed are"):
        worker.initialize_from_config(None)


# What the real vLLM must have for all of the above to mean something.
REAL = """
import dataclasses
import forebay.vllm
forebay.vllm.register()
from vllm.config import ModelConfig
from vllm.device_allocator import AllocationData
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
backend = SleepModeBackendFactory.get_backend_class("forebay")
assert issubclass(backend, CuMemBackend) and not backend.__abstractmethods__
assert backend.preserves_communicators()
assert {"handle", "tag", "is_asleep"} <= {field.name for field in dataclasses.fields(AllocationData)}
assert "sleep_mode_backend" in {field.name for field in dataclasses.fields(ModelConfig)}
from forebay.vllm.worker import Worker
from vllm.v1.worker.gpu_worker import Worker as Stock
assert all(hasattr(Stock, name) for name in vars(Worker) if name in ("load_model", "initialize_from_config"))
"""


# A folder of tests has the same name: that one has no origin.
VLLM = importlib.util.find_spec("vllm")


@pytest.mark.skipif(VLLM is None or VLLM.origin is None, reason="SKIPPED: no vLLM is installed")
def test_the_real_vllm_has_what_the_backend_needs() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
