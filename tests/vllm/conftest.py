"""What all tests with vLLM share: a node, a model, and vLLM itself in a process of its own.

Knows where the Python with vLLM is: `FOREBAY_VLLM_PYTHON`, or the one that runs the tests. Without vLLM in
it all tests of this folder are skipped. With `FOREBAY_VLLM_ON=gpu` it is a vLLM for GPUs, with `graphs` the
same with what it does there if it is not told otherwise: models are compiled, and steps are CUDA graphs.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, Parent
from nodes import Node
from processes import free_port, kill, line_of, start_node, until

HERE = Path(__file__).parent
PYTHON = os.environ.get("FOREBAY_VLLM_PYTHON", sys.executable)
# For all that an engine may be asked to do, and for its start.
ENGINE_S = 900.0
ON_GPU = os.environ.get("FOREBAY_VLLM_ON", "cpu") in ("gpu", "graphs")
GRAPHS = os.environ.get("FOREBAY_VLLM_ON") == "graphs"
ROOM_TOKENS = 2560
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # All is greedy, and a GPU need not have it.
    "TORCHDYNAMO_DISABLE": "0" if GRAPHS else "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    # Workers of several ranks need not have a NUMA node each.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def installed_vllm() -> tuple[int, ...]:
    """The version of vLLM in that Python, such as (0, 33); empty without vLLM or without forebay."""
    script = "import importlib.metadata as m, forebay; print(*m.version('vllm').split('.')[:2])"
    said = subprocess.run([PYTHON, "-c", script], check=False, capture_output=True, text=True)
    return tuple(map(int, said.stdout.split()))


VLLM = installed_vllm()
# From 0.32 on, vLLM takes multiples of 32 only on a CPU.
CHUNK, BLOCK = 64, 32 if VLLM >= (0, 32) else 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs vLLM where there is none."""
    mine = [item for item in items if HERE in item.path.parents]
    if mine and not VLLM:
        why = f"SKIPPED: {PYTHON} has no vLLM or no forebay: `make test-vllm`, or set FOREBAY_VLLM_PYTHON"
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=why))


class Daemon:
    """A node in a process of its own."""

    def __init__(
        self,
        folder: Path,
        memory: str = "64MiB",
        disk: str = "256MiB",
        more: str = "",
        write_back: str = "all",
        more_of_disk: str = "",
    ) -> None:
        """Not started yet. `more` are lines of its configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "node.sock"
        self.log = folder / "log"
        self.config = folder / "node.toml"
        self.metrics_at = f"127.0.0.1:{free_port()}"
        text = f"socket = '{self.socket}'\nwrite_back = '{write_back}'\n"
        text += f"[metrics]\nlisten = '{self.metrics_at}'\n{more}\n"
        text += f"[memory]\nsize = '{memory}'\nlargest_chunk = '4MiB'\n"
        text += f"[[ssd]]\npath = '{self.log}'\nsize = '{disk}'\n{more_of_disk}\n"
        self.config.write_text(text)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> "Daemon":
        self.process = start_node(self.config)
        return self

    def metric(self, name: str) -> float:
        """The sum over all lines whose name and labels begin like this."""
        with urllib.request.urlopen(f"http://{self.metrics_at}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def written(self, chunks: float) -> None:
        """Waits until so many chunks are on disk to stay."""
        until(lambda: self.metric('forebay_chunks{tier="disk"') >= chunks)
        until(lambda: self.metric("forebay_disk_pending_records") == 0)

    def kill(self) -> None:
        """At once."""
        kill(self.process)
        self.process = None

    def __enter__(self) -> "Daemon":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


parent = Parent(PYTHON, os.environ | ENVIRONMENT)


def start_driver(log: Path) -> "subprocess.Popen[str] | Forked":
    """`driver.py` in a process of its own. On CPUs it is forked, so all but the first start at once."""
    if not ON_GPU:  # CUDA does not survive a fork.
        return parent.fork(log)
    command, pipe, errors = [PYTHON, str(HERE / "driver.py")], subprocess.PIPE, log.open("ab")
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)


class Engine:
    """vLLM in a process of its own. `engine.generate(...)` and so on are `driver.py`'s."""

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        self.log = log
        self.process = start_driver(log)
        try:
            self.tell(arguments)
        except BaseException:
            self.kill()
            raise

    def tell(self, order: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = line_of(self.process, ENGINE_S)
        assert line, f"vLLM has died: {self.log.read_text(errors='replace')[-3000:]}"
        said = json.loads(line)
        assert "error" not in said, f"{said['error']}: {self.log.read_text(errors='replace')[-3000:]}"
        return said["answer"]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda **order: self.tell({"do": name, **order})

    @contextmanager
    def spoiled(self, layerwise: bool | None = None, **how: Any) -> Iterator[None]:
        """Loads fail meanwhile, as `spoil` says. `layerwise`: they may, or may not, be layer by layer."""
        self.layerwise(possible=layerwise)
        self.spoil(**how)
        try:
            yield
        finally:
            self.heal()
            self.layerwise(possible=None)

    def end(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends it as an engine should end, unless the test has failed."""
        try:
            if kind is None:
                self.end()
        finally:
            self.kill()


# vLLM schedules a step before it knows the last one's tokens: on GPUs, and on CPUs if it is made
# to.
AHEAD: dict[str, Any] = {} if ON_GPU else {"ahead": True}

# Kernels that say the same to a token whatever is computed beside it: on GPUs, vLLM's usual ones do
# not.
EXACT: dict[str, Any] = {"exact": True} if ON_GPU else {}


def need_gpus(count: int) -> None:
    """Skips what wants more GPUs than there are, where GPUs are used at all."""
    if ON_GPU:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        if len(listed.splitlines()) < count:
            pytest.skip(f"SKIPPED: {count} GPUs are needed")


def transfer(node: Path, **more: Any) -> dict[str, Any]:
    """The connector's configuration."""
    return {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": str(node), "chunk_tokens": CHUNK, "handover_wait_s": 1, **more},
    }


def example(folder: Path) -> dict[str, Any]:
    """vLLM's example connector, which keeps what it stores in files of this folder."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Connectors under vLLM's MultiConnector, which asks them in this order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def arguments(model: Path, connector: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Of `LLM`: few blocks, so that requests are preempted; small steps, so that prompts come in pieces."""
    given: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": not GRAPHS,
        "block_size": BLOCK,
        "num_gpu_blocks_override": ROOM_TOKENS // BLOCK,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "distributed_executor_backend": "uni",
    }
    if ON_GPU:  # Several engines share one, and none looks how much of it is free.
        given |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}
    if connector is not None:
        given["kv_transfer_config"] = connector
    return given | more


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that follow from the seed."""
    state, found = seed * 7919 + 1, []
    for _ in range(tokens):
        state = (state * 1103515245 + 12345) % (1 << 31)
        found.append(3 + (state >> 8) % 1000)
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(folder)], check=True)
    return folder


# What is asked for: tokens of the prompt, and how many are to follow.
ASKED: dict[str, tuple[list[int], int]] = {
    "short": (prompt(1, 600), 16),
    "even": (prompt(2, 512), 16),  # whole chunks
    "long": (prompt(3, 1400), 16),  # several steps
    "left": (prompt(4, 320) + prompt(5, 200), 16),  # one beginning, three ends
    "right": (prompt(4, 320) + prompt(6, 280), 16),
    "middle": (prompt(4, 320) + prompt(7, 100), 16),
    "talk": (prompt(8, 300), 100),
    "handed": (prompt(10, 450), 16),
    "never": (prompt(11, 300), 16),
    # Seed 23 has two tokens that are 6e-6 apart with one of the models: which is said, rounding
    # decides.
    **{f"crowd {seed}": (prompt(seed, 400), 200) for seed in (20, 21, 22, 24, 25)},
}


def whole(name: str) -> int:
    """Tokens of the whole chunks of a prompt."""
    return len(ASKED[name][0]) // CHUNK * CHUNK


def ask(engine: Engine, name: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """One of the prompts, of which vLLM itself has kept nothing. Returns when it is stored."""
    assert engine.forget()
    tokens, count = ASKED[name]
    (said,) = engine.generate(prompts=[tokens], tokens=count, params=params)
    engine.settle()
    return said


def start_together(folder: Path, **given: dict[str, Any]) -> list[Engine]:
    """Engines with these arguments, by the names of their logs. Starting one takes most of the time."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda name: Engine(given[name], folder / name), given))


def answers(engine: Engine, asked: dict[str, tuple[list[int], int]]) -> dict[str, list[int]]:
    """What it says to each prompt, one after the other."""
    return {
        name: engine.generate(prompts=[tokens], tokens=count)[0]["tokens"]
        for name, (tokens, count) in asked.items()
    }


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with memory alone."""
    made = Node(tmp_path)
    yield made
    made.kill()


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What vLLM says to each of `ASKED` without a connector."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with Engine(arguments(model, enable_prefix_caching=False), log) as engine:
        return answers(engine, ASKED)
