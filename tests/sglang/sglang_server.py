"""SGLang's server on the CPU, in processes of its own, and what it says over HTTP.

Knows SGLang's command line, its own API and its page of metrics, and how a storage backend is attached to
HiCache while the server runs. Must never know what is tested or measured.
"""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import free_port, until

READY_S = 600.0
"""For a start, of which imports take most, on a machine that does other work too."""
ANSWER_S = 240.0
PAGE_TOKENS = 64
KEY = "whoever-attaches-a-backend-says-this"
"""SGLang has backends attached only by those who know the key that it was started with."""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
ON_CPU = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule"),
]
HICACHE = [
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
]
"""HiCache with memory of the host, and no storage yet."""


@dataclass(frozen=True)
class Said:
    """An answer, and where SGLang had the prompt's KV."""

    tokens: list[int]
    device: int
    host: int
    storage: int
    first_token_s: float
    storage_wait_s: float
    """How long SGLang had the request wait for the storage."""

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.device + self.host + self.storage


def ours(socket: Path, weights: str, **more: Any) -> dict[str, Any]:
    """The extra configuration that has SGLang use the node."""
    own = {"backend_name": "forebay", "module_path": "forebay.sglang.hicache"}
    own |= {"class_name": "ForebayStorage", "interface_v1": 1}
    return own | {"node": str(socket), "weights_digest": weights} | more


def storage(backend: str, extra: dict[str, Any]) -> list[str]:
    """Options for a storage that is there from the start."""
    extra_text = json.dumps(extra)
    return [
        "--hicache-storage-backend",
        backend,
        "--hicache-storage-backend-extra-config",
        extra_text,
    ]


class Server:
    """A server. It is started when it is made, and `wait` returns when it is ready."""

    def __init__(
        self, python: str, model: Path, log: Path, options: Sequence[str] = (), room_tokens: int = 20480
    ) -> None:
        """`room_tokens` are those of the device's pool."""
        port = free_port()
        self.base, self.log = f"http://127.0.0.1:{port}", log
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        command += [*ON_CPU, "--page-size", str(PAGE_TOKENS), "--enable-metrics", "--enable-cache-report"]
        command += ["--admin-api-key", KEY, "--max-total-tokens", str(room_tokens), *options]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )

    def wait(self) -> "Server":
        """Returns when it answers requests."""
        until(self._answers, READY_S)
        return self

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"it has ended: {self.log.read_text(errors='replace')[-3000:]}"
        try:
            self.ask("/health")
        except OSError:
            time.sleep(0.2)
            return False
        return True

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """The answer to a request, which need not have come yet."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, headers, method=method)
        return urllib.request.urlopen(request, timeout=ANSWER_S)

    def generate(self, prompt: list[int], count: int = 16) -> Said:
        """The most likely `count` tokens behind a prompt. Measures when the first one comes."""
        asked = {"input_ids": prompt, "stream": True}
        asked["sampling_params"] = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        begun, first, last = time.perf_counter(), 0.0, b""
        with self.ask("/generate", asked) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - begun
                    last = line
        said = json.loads(last.removeprefix(b"data: "))
        where = said["meta_info"].get("cached_tokens_details") or {}
        places = {place: where.get(place) or 0 for place in ("device", "host", "storage")}
        wait_s = said["meta_info"].get("storage_prefetch_wait") or 0.0
        return Said(said["output_ids"], first_token_s=first, storage_wait_s=wait_s, **places)

    def flush(self) -> None:
        """Has it forget what it keeps on the device and in its host pool. It must do nothing else."""
        until(self._flushed, ANSWER_S)

    def _flushed(self) -> bool:
        try:
            self.ask("/flush_cache", {})
        except urllib.error.HTTPError:  # A request, or a store, is not over yet.
            return False
        return True

    def attach(self, backend: str, extra: dict[str, Any]) -> None:
        """Gives HiCache a storage."""
        asked = {"hicache_storage_backend": backend}
        asked["hicache_storage_backend_extra_config_json"] = json.dumps(extra)
        asked["hicache_storage_prefetch_policy"] = "wait_complete"
        self.ask("/hicache/storage-backend", asked, "PUT")

    def detach(self) -> None:
        """Takes the storage from HiCache."""
        self.ask("/hicache/storage-backend", method="DELETE")

    def clear(self) -> None:
        """Has the storage forget what is in it."""
        self.ask("/hicache/storage-backend/clear", {})

    def counter(self, name: str) -> float:
        """A counter of its page of metrics, summed over labels."""
        with self.ask("/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def stored(self, tokens: float) -> None:
        """Waits until it has given so many tokens to the storage since its start."""
        until(lambda: self.counter("sglang:backuped_tokens_total") >= tokens)

    def kill(self) -> None:
        """As a machine dies, with all processes that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
