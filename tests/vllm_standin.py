"""Stand-ins for what sleep mode touches in vLLM, torch and `forebay.cuda`: host memory is the GPU's.

They check more than the real ones do: memory that is not mapped cannot be copied, a buffer that was given
back cannot be touched, and everything that is asked of them is counted. Knows nothing of Forebay's own code.
"""

import ctypes
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GPU_BASE = 1 << 46
GPU_BYTES = 1 << 30
SLAB_BYTES = 16 << 10


class CudaError(RuntimeError):
    """What vLLM's allocator and the copier raise."""


@dataclass
class AllocationData:
    """As vLLM's."""

    handle: tuple[int, int, int, int]
    tag: str
    cpu_backup_tensor: None = None
    is_asleep: bool = False


@dataclass
class Gpu:
    """Memory that is there only while it is mapped, and vLLM's book of it."""

    free_bytes: int = GPU_BYTES
    mapped: dict[int, bytearray] = field(default_factory=dict)
    pointer_to_data: dict[int, AllocationData] = field(default_factory=dict)
    on_map: Callable[[AllocationData], None] = lambda data: None
    next_address: int = GPU_BASE

    def allocate(self, tag: str, contents: bytes, address: int | None = None) -> int:
        """What torch's allocator does within a pool with this tag."""
        if address is None:
            address, self.next_address = self.next_address, self.next_address + len(contents) + 4096
        data = AllocationData((0, len(contents), address, 0), tag)
        self.pointer_to_data[address] = data
        self.create_and_map(data.handle)
        self.mapped[address][:] = contents
        return address

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        """Fresh memory holds something, but not what was there before."""
        _, length, address, _ = handle
        if address in self.mapped:
            raise CudaError("mapped twice")
        if length > self.free_bytes:
            raise CudaError("CUDA Error: out of memory")
        self.free_bytes -= length
        self.mapped[address] = bytearray(b"\xee" * length)
        self.on_map(self.pointer_to_data[address])

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        """The contents are gone."""
        self.free_bytes += len(self.mapped.pop(handle[2]))

    def contents(self) -> dict[int, bytes]:
        """All that is mapped."""
        return {address: bytes(memory) for address, memory in self.mapped.items()}


@dataclass(eq=False)
class Buffer:
    """A range of one slab of the pool."""

    pool: "Pool"
    memory: memoryview
    address: int
    bytes: int

    def close(self) -> None:
        """Gives it back, once."""
        self.pool.lent.remove(self)
        self.memory[:] = b"\xdd" * self.bytes


class Pool:
    """`forebay.cuda.PinnedPool`: lends ranges of slabs, each of which was pinned on its own."""

    def __init__(self, limit_bytes: int) -> None:
        """No memory yet."""
        self.limit_bytes = limit_bytes
        self.warmed: list[int] = []
        self.slabs: list[ctypes.Array[ctypes.c_char]] = []
        self.lent: list[Buffer] = []

    def warm(self, bytes: int) -> None:
        """At once instead of in the background."""
        self.warmed.append(bytes)
        while sum(map(len, self.slabs)) < bytes:
            self._pin(SLAB_BYTES)

    def take(self, bytes: int) -> Buffer:
        """The first range that is long enough, or one of a new slab."""
        found = next((at for slab in self.slabs if (at := self._gap(slab, bytes)) is not None), None)
        slab, offset = found or (self._pin(max(bytes, SLAB_BYTES)), 0)
        range_of_it = memoryview(slab).cast("B")[offset : offset + bytes]
        self.lent.append(Buffer(self, range_of_it, ctypes.addressof(slab) + offset, bytes))
        return self.lent[-1]

    def _gap(
        self, slab: ctypes.Array[ctypes.c_char], bytes: int
    ) -> tuple[ctypes.Array[ctypes.c_char], int] | None:
        base = ctypes.addressof(slab)
        taken = sorted((b.address - base, b.bytes) for b in self.lent if base <= b.address < base + len(slab))
        offset = 0
        for start, length in [*taken, (len(slab), 0)]:
            if start - offset >= bytes:
                return slab, offset
            offset = start + length
        return None

    def _pin(self, bytes: int) -> ctypes.Array[ctypes.c_char]:
        if sum(map(len, self.slabs)) + bytes > self.limit_bytes:
            raise CudaError(f"pinned memory is full: {bytes} bytes wanted, limit {self.limit_bytes}")
        self.slabs.append(ctypes.create_string_buffer(bytes))
        return self.slabs[-1]


class Copier:
    """`forebay.cuda.Copier`."""

    def __init__(self, gpu: Gpu, pool: Pool) -> None:
        """Every path of one GPU, which is one."""
        self.gpu, self.pool = gpu, pool
        self.batches: list[list[tuple[int, int, int]]] = []
        self.good_copies_left: int | None = None
        self.on_batch: Callable[[], None] = lambda: None

    def copy_batch_and_wait(self, pairs: list[tuple[int, int, int]]) -> None:
        """Copies, or raises in the middle of it when it was told to."""
        self.batches.append(pairs)
        self.on_batch()
        for source, target, length in pairs:
            if self.good_copies_left == 0:
                raise CudaError("CUDA_ERROR_LAUNCH_FAILED")
            if self.good_copies_left is not None:
                self.good_copies_left -= 1
            into, start = self._memory(target, length)
            out_of, first = self._memory(source, length)
            into[start : start + length] = out_of[first : first + length]

    def _memory(self, address: int, length: int) -> tuple[Any, int]:
        for base, memory in list(self.gpu.mapped.items()):  # Another thread maps meanwhile.
            if base <= address and address + length <= base + len(memory):
                return memory, address - base
        for buffer in self.pool.lent:
            if buffer.address <= address and address + length <= buffer.address + buffer.bytes:
                return buffer.memory, address - buffer.address
        raise CudaError(f"CUDA_ERROR_ILLEGAL_ADDRESS: {address:#x} + {length}")


class CuMemBackend:
    """As vLLM's: only what others inherit from it."""

    def __init__(self) -> None:
        """Awake."""
        self._state = "RUNNING"

    def state(self) -> str:
        """RUNNING, SUSPENDED or RESUMING."""
        return self._state


class Factory:
    """As vLLM's `SleepModeBackendFactory`."""

    def __init__(self) -> None:
        """Empty."""
        self.registry: dict[str, tuple[str, str]] = {}

    def register_backend(self, name: str, module_path: str, class_name: str) -> None:
        """A name can be taken once."""
        if name in self.registry:
            raise ValueError(f"Sleep-mode backend '{name}' is already registered.")
        self.registry[name] = (module_path, class_name)


class GpuWorker:
    """As vLLM's worker, as far as weights and KV come into being."""

    def __init__(self, vllm_config: Any, *, gpu: Gpu, local_rank: int = 0) -> None:
        """Notes what it was given."""
        self.vllm_config, self.gpu = vllm_config, gpu
        self.cache_config, self.model_runner = vllm_config.cache_config, types.SimpleNamespace()
        self.backend_at_start = vllm_config.model_config.sleep_mode_backend

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Weights of 3000 bytes."""
        self.gpu.allocate("weights", b"w" * 3000)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """KV of 5000 bytes."""
        self.gpu.allocate("kv_cache", b"k" * 5000)


@dataclass
class Machine:
    """One process with one GPU."""

    gpu: Gpu
    pool: Pool
    copier: Copier
    factory: Factory
    device: int = 0
    # What pool and copier were asked to be: (shared, device), and devices.
    asked: dict[str, Any] = field(default_factory=dict)
    # Connector and tier that were registered: name to (module, class).
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)

    def modules(self) -> dict[str, types.ModuleType]:
        """What `import` finds."""
        gpu = self.gpu
        cuda = types.SimpleNamespace(
            mem_get_info=lambda: (gpu.free_bytes, GPU_BYTES),
            synchronize=lambda: None,
            empty_cache=lambda: None,
            current_device=lambda: self.device,
        )
        contents: dict[str, dict[str, Any]] = {
            "torch": {"cuda": cuda},
            "vllm": {},
            "vllm.device_allocator": {"get_mem_allocator_instance": lambda: gpu},
            "vllm.device_allocator.cumem": {
                "create_and_map": gpu.create_and_map,
                "unmap_and_release": gpu.unmap_and_release,
            },
            "vllm.device_allocator.sleep_mode_backend": {
                "CuMemBackend": CuMemBackend,
                "SleepModeBackendFactory": self.factory,
            },
            "vllm.distributed": {},
            "vllm.distributed.kv_transfer": {},
            "vllm.distributed.kv_transfer.kv_connector": {},
            "vllm.distributed.kv_transfer.kv_connector.factory": {
                "KVConnectorFactory": types.SimpleNamespace(register_connector=self.register_part),
            },
            "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cuda=lambda: True)},
            "vllm.v1": {},
            "vllm.v1.kv_offload": {},
            "vllm.v1.kv_offload.tiering": {},
            "vllm.v1.kv_offload.tiering.factory": {
                "SecondaryTierFactory": types.SimpleNamespace(register_tier=self.register_part),
            },
            "vllm.v1.worker": {"gpu_worker": types.SimpleNamespace(Worker=GpuWorker)},
            "forebay.cuda": {"PinnedPool": self._pool, "Copier": self._copier},
        }
        made = {}
        for name, members in contents.items():
            made[name] = types.ModuleType(name)
            made[name].__dict__.update(members)
        return made

    def register_part(self, name: str, module: str, cls: str) -> None:
        """What vLLM's factories of connectors and tiers do: a name that is there is refused."""
        if name in self.parts:
            raise ValueError(f"{name} is registered")
        self.parts[name] = (module, cls)

    def _pool(self, limit_bytes: int, *, shared: bool = False, device: int = 0) -> Pool:
        self.pool.limit_bytes = min(self.pool.limit_bytes, limit_bytes)
        self.asked["pool"] = (shared, device)
        return self.pool

    def _copier(self, devices: list[int] | None = None) -> Copier:
        self.asked["copier"] = devices
        return self.copier


def machine() -> Machine:
    """An idle one."""
    gpu, pool = Gpu(), Pool(GPU_BYTES)
    return Machine(gpu, pool, Copier(gpu, pool), Factory())


def forget_modules() -> None:
    """What was imported on top of stand-ins must be imported anew."""
    for name in ("sleep", "worker"):
        sys.modules.pop(f"forebay.vllm.{name}", None)
        sys.modules["forebay.vllm"].__dict__.pop(name, None)
