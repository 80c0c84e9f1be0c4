"""A node and two engines of one model, and what is done with them: bytes go from one to the other.

Each run says what came of it. Tests say what has to come of it, and `bench/vllm_models.py` counts.
"""

import gc
import inspect
import mmap
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import free_port, kill, start_node, until
from vllm.v1.core.single_type_kv_cache_manager import SinkFullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, iter_layer_specs

from forebay.vllm.connector import compat
from layouts import configs, models
from layouts.engine import Engine
from layouts.pages import noise

LARGEST, MEMORY, LITTLE, DISK, SEGMENT = "64MiB", "512MiB", "256MiB", "1GiB", "72MiB"

STORED, WRITTEN = 'forebay_chunks_stored_total{tier="memory"', "forebay_write_back_chunks_total"


class Node:
    """A node with a disk. It may be restarted with other memory."""

    def __init__(self, folder: Path) -> None:
        self.socket, self.log, self.config = folder / "node.sock", folder / "log", folder / "node.toml"
        self.metrics_at = f"127.0.0.1:{free_port()}"
        self.process: Any = None

    def start(self, memory: str = MEMORY) -> None:
        text = f"socket = '{self.socket}'\nwrite_back = 'all'\n[metrics]\nlisten = '{self.metrics_at}'\n"
        text += f"[memory]\nsize = '{memory}'\nlargest_chunk = '{LARGEST}'\n"
        self.config.write_text(
            text + f"[[ssd]]\npath = '{self.log}'\nsize = '{DISK}'\nsegment_size = '72MiB'\n"
        )
        self.process = start_node(self.config)

    def kill(self) -> None:
        kill(self.process)
        self.process = None


@dataclass
class Came:
    """What came of a request that loads."""

    prompt: int  # its tokens
    loaded: int  # tokens that were not computed
    compared: int  # bytes that the model has read
    wrong: int
    where: list[str]
    on_disk: int  # of the tokens to load, those that were on the node's disk


class House:
    """A node, an engine that stores and one that loads."""

    def __init__(self, model: configs.Model, tp: int, folder: Path) -> None:
        self.model, self.tp = model, tp
        self.node = Node(folder)
        self.engines: list[Engine] = []
        self.prompts = 0
        self.to_write = 0.0  # chunks that the node has written when those of the last prompt are
        try:
            self.node.start()
            for _ in range(2):
                self.engines.append(Engine(model, self.node.socket, tp))
            # So that the other one's blocks are others.
            self.there.add("somebody", 0, 40)
            self.there.run()
        except BaseException:
            self.close()
            raise

    @property
    def here(self) -> Engine:
        return self.engines[0]

    @property
    def there(self) -> Engine:
        return self.engines[1]

    @property
    def tokens(self) -> int:
        """Of a prompt: no whole chunks."""
        chunk = self.here.chunk
        return self.model.tokens or 3 * chunk + chunk // 3 + 7

    @property
    def chunks(self) -> int:
        """Whole ones of a prompt."""
        return self.tokens // self.here.chunk

    def store(self, **more: Any) -> int:
        """A new prompt is computed here. Its number."""
        self.prompts += 1
        self.to_write = self.metric(STORED) - self.metric(WRITTEN)
        self.here.add(f"prompt {self.prompts}", self.prompts, self.tokens, **more)
        self.here.run()
        self.to_write = self.metric(STORED) - self.to_write
        return self.prompts

    def bytes_stored(self) -> tuple[int, int]:
        """By all ranks so far: KV and states."""
        caches = [worker.connector._worker.cache for worker in self.here.workers]
        both = [(getattr(cache, "kv", cache), getattr(cache, "states", None)) for cache in caches]
        kv = sum(cache.stats()["bytes_stored"] for cache, _ in both)
        return kv, sum(states.stats()["bytes_stored"] for _, states in both if states is not None)

    def load(self, prompt: int, params: dict[str, Any] | None = None) -> Came:
        """The prompt is asked for there."""
        before, wrong, name = self.there.compared, self.there.wrong, f"prompt {prompt}"
        on_disk = self.tokens_on_disk()
        self.there.add(name, prompt, self.tokens, params=params)
        self.there.run()
        where = [line for worker in self.there.workers for line in worker.count.where]
        return Came(
            self.tokens,
            self.there.loaded[name],
            self.there.compared - before,
            self.there.wrong - wrong,
            where[:8],
            self.tokens_on_disk() - on_disk,
        )

    def tokens_on_disk(self) -> int:
        """Of all that was to be loaded there so far."""
        return int(self.there.half.counts.totals.get("tokens_disk", 0))

    def states_at_chunks(self, prompt: int) -> int:
        """How many steps of a prompt have ended here where a chunk ends: there is a state then."""
        return sum(end % self.here.chunk == 0 for end in self.here.ends[f"prompt {prompt}"])

    def free_blocks(self) -> tuple[int, int]:
        """Bytes of blocks that no request there has had, and how many of them were written."""
        counts = [worker.pages.untouched() for worker in self.there.workers]
        return sum(count.compared for count in counts), sum(count.wrong for count in counts)

    def kept_bytes(self) -> tuple[int, int]:
        """What of a whole chunk all ranks must keep: of its tokens, and of the states at its end.

        Of ranks with the same KV, one stores it.
        """
        engine, parts = self.here, self.here.half.facts.shape.tp
        kv, states = configs.kept_bytes(engine.kv_configs[0], engine.chunk)
        return kv * parts, states * parts

    def flush(self) -> None:
        """Waits until all is on disk, to stay."""
        until(lambda: self.metric(WRITTEN) >= self.to_write)
        until(lambda: self.metric("forebay_disk_pending_records") == 0)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.node.metrics_at}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def restart(self, memory: str = LITTLE) -> None:
        """The node starts again, with little memory and nothing in it."""
        if self.node.process is not None:
            self.node.kill()
        self.node.start(memory)
        halves = [worker.connector._worker for engine in self.engines for worker in engine.workers]
        until(lambda: all(half.is_connected() for half in halves))
        until(lambda: all(engine.half.node.is_connected for engine in self.engines))

    def spoil(self, prompt: int, chunk: int) -> None:
        """The node ends, and one byte of this chunk's KV on its disk changes."""
        self.node.kill()
        config, size = self.here.kv_configs[0], self.here.chunk
        group = next(one for one in config.kv_cache_groups if keeps_all(one))
        spec, name = next(iter(iter_layer_specs(group.kv_cache_spec))), group.layer_names[0]
        page = noise(int(spec.real_page_size_bytes), prompt, name, 0, chunk * size // spec.block_size)
        with self.node.log.open("r+b") as file, mmap.mmap(file.fileno(), 0) as written:
            place = written.find(page[:512].tobytes())
            assert place >= 0, "the chunk is on the disk"
            written[place + 32] ^= 1

    # What is done with a prompt. Each says what came of it.

    def stored(self) -> Came:
        """It is stored, and loaded by the other engine."""
        return self.load(self.store())

    def handed_over(self) -> Came:
        """It is prefilled here, to its last token, and decoded there."""
        prompt = self.store(params={"do_remote_decode": True})
        return self.load(prompt, self.here.answers[f"prompt {prompt}"])

    def from_disk(self) -> Came:
        """The node has restarted since, and has it on its disk alone."""
        prompt = self.store()
        self.flush()
        self.restart()
        return self.load(prompt)

    def spoiled(self) -> Came:
        """The same, and a byte of its second chunk is another one."""
        prompt = self.store()
        self.flush()
        self.spoil(prompt, chunk=1)
        self.restart()
        return self.load(prompt)

    def node_dies(self) -> Came:
        """The node dies when it was asked and before it brings anything."""
        prompt = self.store()
        self.there.when_loading = self.node.kill
        came = self.load(prompt)
        assert self.there.when_loading is None, "a load was planned"
        self.restart()
        return came

    def __enter__(self) -> "House":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines.clear()
        if self.node.process is not None:
            self.node.kill()
        self.node.log.unlink(missing_ok=True)
        gc.collect()


def keeps_all(group: Any) -> bool:
    """Whether a group's layers keep KV of all tokens."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    windows = ("sliding_window", "attention_chunk_size")
    return all(
        isinstance(spec, AttentionSpec)
        and not isinstance(spec, CircularBufferSpec)
        and not any(getattr(spec, name, None) for name in windows)
        for spec in specs
    )


@contextmanager
def house(name: str, tp: int, folder: Path) -> Iterator[House]:
    """Of the model of that name, whose pages are as a GPU's kernels have them."""
    kernel, world = compat.cpu_kernel, compat.world
    compat.cpu_kernel = lambda *_: None
    mend_sinks()
    (model,) = (model for model in models.MODELS if model.name == name)
    try:
        with House(model, tp, folder) as made:
            yield made
    finally:
        compat.cpu_kernel, compat.world = kernel, world


def mend_sinks() -> None:
    """vLLM 0.33 gives its manager of sinks a field that it does not take, and does not start."""
    made = SinkFullAttentionManager.__init__
    known = inspect.signature(made).parameters
    if made.__module__ == __name__ or "needs_kv_cache_zeroing" in known:
        return

    def mended(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **{name: value for name, value in named.items() if name in known})

    SinkFullAttentionManager.__init__ = mended
