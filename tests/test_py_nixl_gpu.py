"""`forebay.nixl` with memory of GPUs, on the fake driver."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from fake_cuda import Cuda
from processes import until

from forebay.nixl import _bindings
from forebay.nixl._api import nixl_agent, nixl_agent_config

MIB = 1 << 20
NAMES = (f"gpu-agent-{number}" for number in itertools.count())


@dataclass
class Tensor:
    """What Forebay asks of torch's tensors."""

    cuda: Cuda
    address: int
    bytes: int
    gpu: int
    contiguous: bool = True

    @property
    def device(self) -> str:
        return f"cuda:{self.gpu}"

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.bytes // 2

    def element_size(self) -> int:
        return 2

    def get_device(self) -> int:
        return self.gpu

    def is_contiguous(self) -> bool:
        return self.contiguous

    def fill(self, seed: int) -> bytes:
        contents = np.random.default_rng(seed).bytes(self.bytes)
        self.cuda.enter(self.gpu)
        self.cuda.write(self.address, contents)
        return contents

    def read(self) -> bytes:
        self.cuda.enter(self.gpu)
        return self.cuda.read(self.address, self.bytes)


def tensor(cuda: Cuda, gpu: int, length: int = MIB) -> Tensor:
    cuda.enter(gpu)
    return Tensor(cuda, cuda.allocate(length), length, gpu)


def agent() -> nixl_agent:
    return nixl_agent(next(NAMES), nixl_agent_config())


@pytest.fixture
def ends(cuda: Cuda) -> Iterator[tuple[nixl_agent, nixl_agent]]:
    here, there = agent(), agent()
    yield here, there
    cuda.leave()


def run(by: nixl_agent, op: str, local: object, remote: object, peer: str) -> None:
    handle = by.initialize_xfer(op, by.get_xfer_descs(local), by.get_xfer_descs(remote), peer)
    by.transfer(handle)
    until(lambda: by.check_xfer_state(handle) == "DONE")
    by.release_xfer_handle(handle)


def test_tensors_of_gpus_are_registered_and_moved(cuda: Cuda, ends: tuple[nixl_agent, nixl_agent]) -> None:
    here, there = ends
    ours, theirs = tensor(cuda, 0), tensor(cuda, 1)
    registered = here.register_memory(ours)
    assert registered is not None and registered.getType() == _bindings.VRAM_SEG
    there.register_memory([theirs])
    here.add_remote_agent(there.get_agent_metadata())
    sent, kept = ours.fill(1), theirs.fill(2)
    run(here, "READ", ours, theirs, there.name)
    assert ours.read() == kept
    sent = ours.fill(3)
    run(here, "WRITE", ours, theirs, there.name)
    assert theirs.read() == sent
    here.deregister_memory(registered)
    with pytest.raises(_bindings.nixlInvalidParamError, match="no registered memory of a GPU"):
        here.initialize_xfer("READ", here.get_xfer_descs(ours), here.get_xfer_descs(theirs), there.name)


OWNER = """
import ctypes, os, sys
import forebay.nixl._api as nixl
from fake_cuda import Cuda

cuda = Cuda(os.environ["FOREBAY_LIBCUDA"])
cuda.enter(1)
length = int(sys.argv[1])
address = cuda.allocate(length)
agent = nixl.nixl_agent("gpu-owner", nixl.nixl_agent_config())
agent.register_memory([(address, length, 1, "kv")], "VRAM")
contents = bytes(range(256)) * (length // 256)
cuda.write(address, contents)
print(agent.get_agent_metadata().hex(), address, flush=True)
sys.stdin.readline()
print(cuda.read(address, length) == contents[::-1], cuda.stat("bytes.d2h.1"), flush=True)
"""


def test_gpus_of_two_processes_of_a_host_copy_by_themselves(cuda: Cuda) -> None:
    here, ours = agent(), tensor(cuda, 0)
    here.register_memory(ours)
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", OWNER, str(MIB)]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdin and owner.stdout
        metadata, address = owner.stdout.readline().split()
        name = here.add_remote_agent(bytes.fromhex(metadata)).decode()
        theirs = [(int(address), MIB, 1)]
        local, remote = here.get_xfer_descs(ours), here.get_xfer_descs(theirs, "VRAM")
        for op in ["READ", "WRITE"]:
            if op == "WRITE":
                contents = ours.read()
                assert contents == bytes(range(256)) * (MIB // 256)
                cuda.write(ours.address, contents[::-1])
            handle = here.initialize_xfer(op, local, remote, name)
            here.transfer(handle)
            until(lambda handle=handle: here.check_xfer_state(handle) == "DONE")
            here.release_xfer_handle(handle)
        stats = here.agent.forebay.stats()[name]
        assert stats["paths"] == {"ipc": 2 * MIB}
        assert stats["faults"] == {}
        owner.stdin.write("\n")
        owner.stdin.flush()
        # What it read itself is all that came out of its GPU.
        assert owner.stdout.readline().split() == ["True", str(MIB)]
    cuda.leave()


def test_rows_say_on_which_gpu_they_lie(cuda: Cuda, ends: tuple[nixl_agent, nixl_agent]) -> None:
    here, there = ends
    ours, theirs = tensor(cuda, 0), tensor(cuda, 2)
    pool = np.zeros(MIB, dtype=np.uint8)
    host = int(pool.ctypes.data)
    here.register_memory([(ours.address, MIB, 0, "kv")], "VRAM")
    here.register_memory([(host, MIB, 0, "")], "DRAM")
    there.register_memory(np.array([[theirs.address, MIB, 2]], dtype=np.uint64), "cuda")
    here.add_remote_agent(there.get_agent_metadata())
    sent = theirs.fill(4)
    local = here.prep_xfer_dlist("", np.array([[ours.address, 4096, 0, 4096, 256]]), "VRAM")
    remote = here.prep_xfer_dlist(there.name, np.array([[theirs.address, 4096, 2, 4096, 256]]), "VRAM")
    backwards = list(range(255, -1, -1))
    handle = here.make_prepped_xfer("READ", local, list(range(256)), remote, backwards)
    here.transfer(handle)
    until(lambda: here.check_xfer_state(handle) == "DONE")
    assert ours.read() == b"".join(sent[at * 4096 : at * 4096 + 4096] for at in backwards)
    for rows, kind, said in [
        ([(ours.address, 64, 1)], "VRAM", "descriptor 0: device is 1; .* was registered on 0"),
        ([(ours.address, 64, 0), (host, 64, 0)], "VRAM", "descriptor 1: .* is no registered memory of a GPU"),
        ([(ours.address, 64, 0)], "DRAM", "descriptor 0: .* is memory of GPU 0; allowed .* is host memory"),
    ]:
        with pytest.raises(_bindings.nixlInvalidParamError, match=said):
            here.prep_xfer_dlist("", rows, kind)


def test_what_is_no_memory_of_the_named_gpu_is_refused(cuda: Cuda) -> None:
    one = agent()
    ours = tensor(cuda, 0)
    host = int(np.zeros(64, dtype=np.uint8).ctypes.data)
    for row, said in [
        ((ours.address, 64, 3, ""), "device: 3 does not exist; 3 GPUs are visible"),
        ((ours.address, 64, 1, ""), "lies on GPU 0, not on 1"),
        ((ours.address, 1 << 40, 0, ""), "reach beyond their allocation"),
        ((host, 64, 0, ""), "is no memory of a GPU: the driver does not know it"),
        ((ours.address, 0, 0, ""), "bytes: 0 from"),
    ]:
        with pytest.raises(_bindings.nixlInvalidParamError, match=said):
            one.register_memory([row], "VRAM")
    # All or nothing: the first row is free again.
    with pytest.raises(_bindings.nixlInvalidParamError):
        one.register_memory([(ours.address, 64, 0, ""), (host, 64, 0, "")], "VRAM")
    one.deregister_memory(one.register_memory([(ours.address, 64, 0, "")], "VRAM"))
    assert one.register_memory(ours) is not None
    assert one.get_backend_mem_types("UCX") == ["DRAM_SEG", "VRAM_SEG"]


def test_tensors_that_are_not_contiguous_are_refused(cuda: Cuda) -> None:
    one, ours = agent(), tensor(cuda, 0)
    ours.contiguous = False
    with pytest.raises(ValueError, match="no descriptors to register"):
        one.register_memory(ours)


def test_without_a_driver_memory_of_gpus_is_refused_with_the_reason() -> None:
    program = """
from forebay.nixl._api import nixl_agent
try:
    nixl_agent("alone").register_memory([(4096, 64, 0, "")], "VRAM")
except Exception as error:
    print(type(error).__name__, error)
"""
    environment = {**os.environ, "FOREBAY_LIBCUDA": "/nowhere/libcuda.so.1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "no CUDA driver: /nowhere/libcuda.so.1: " in done.stdout, done.stdout + done.stderr
