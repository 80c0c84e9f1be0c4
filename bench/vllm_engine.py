"""What the benchmarks of vLLM have in common: the model, the ways to keep KV, and a node.

A way (`plain`, `offloading`, `simple`, `example`, `pegaflow`, `lmcache`, `memory`, `multipath`, `relay`,
`ssd`, `ssd-always`) is a `--kv-transfer-config`, and for ours a node beside it; `pegaflow` and `lmcache` have
a server, which `vllm_peers` starts. `memory` has the link of one GPU. `multipath` has those
of all, which the engine sees; so has `relay`, where the engine sees one and the node all. With `ssd` the
connector computes what it believes to be computed sooner; with `ssd-always` it loads all there is. Knows
vLLM's public settings and how a node is started; must never know what is measured.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_peers

GIB = 1 << 30
BLOCK_TOKENS = 16  # On a GPU.
CPU_BLOCK_TOKENS = 32  # vLLM takes only multiples of this one from 0.32 on.
BF16_BYTES = 2
CHUNK_TOKENS = 64  # The connector's usual one.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
TINY = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONHASHSEED": "0",
}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
# vLLM's name of each peer.
PEERS = {
    "offloading": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
    "example": "ExampleConnector",
    "pegaflow": "PegaKVConnector",
    "lmcache": "LMCacheMPConnector",
}
FROM_DISK = ("ssd", "ssd-always")
ALL_LINKS = ("multipath", "relay")
OURS = ("memory", *ALL_LINKS, *FROM_DISK)
WAYS = ("plain", *PEERS, *OURS)
NODE_READY_S = 120
NODE_END_S = 60


@dataclass(frozen=True)
class Site:
    """Where a run takes place, and how large it is."""

    folder: Path  # The model, the node's socket and its log.
    tiny: bool  # On a CPU, with a model of a few MB.
    memory_bytes: int  # Host memory for KV.
    disk_bytes: int  # The log, where there is one.
    forebay: str  # The program.
    chunk_tokens: int = CHUNK_TOKENS  # Of ours.

    @property
    def model(self) -> dict[str, Any]:
        """What `config.json` says."""
        return TINY if self.tiny else LLAMA_8B

    @property
    def bytes_per_token(self) -> int:
        """KV of one token."""
        model = self.model
        heads = model["num_key_value_heads"] * model["head_dim"]
        return int(2 * model["num_hidden_layers"] * heads * BF16_BYTES)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return CPU_BLOCK_TOKENS if self.tiny else BLOCK_TOKENS

    @property
    def socket(self) -> Path:
        """Where the node answers."""
        return self.folder / "node.sock"

    @property
    def relays(self) -> Path:
        """Where the node's GPUs are asked to relay."""
        return self.folder / "relays.sock"

    def environment(self, way: str) -> dict[str, str]:
        """What an engine's process is told. One GPU is visible, but to the way that uses the links of all."""
        own = dict(QUIET)
        if self.tiny:
            own |= ON_CPU
        elif way != "multipath":
            own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if way == "relay":
            own["FOREBAY_RELAYS"] = str(self.relays)
        return os.environ | own


def engine_arguments(site: Site, way: str, max_tokens: int) -> dict[str, Any]:
    """What vLLM's engine is built with; the model's configuration is written first."""
    model = site.folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(site.model))
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": site.tiny,  # On GPUs as vLLM is if it is told nothing: in CUDA graphs.
        "max_model_len": max_tokens,
        "block_size": site.block_tokens,
        "enable_prefix_caching": True,
    }
    if not site.tiny:
        arguments["gpu_memory_utilization"] = 0.6
    transfer = transfer_config(site, way)
    return arguments | ({"kv_transfer_config": transfer} if transfer else {})


def transfer_config(site: Site, way: str) -> dict[str, Any] | None:
    """The `--kv-transfer-config` of a way."""
    if way == "plain":
        return None
    if way == "nothing":
        return {"kv_connector": "Nothing", "kv_connector_module_path": "nothing", "kv_role": "kv_both"}
    if way in OURS:
        own = {
            "node": str(site.socket),
            "gate": way != "ssd-always",
            "chunk_tokens": site.chunk_tokens,
        }
        return {
            "kv_connector": "ForebayConnector",
            "kv_connector_module_path": "forebay.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": own,
        }
    if way in vllm_peers.MODULES:
        module = {"kv_connector_module_path": vllm_peers.MODULES[way]}
        extra = {"kv_connector_extra_config": vllm_peers.extra_config(way)}
        return {"kv_connector": PEERS[way], "kv_role": "kv_both"} | module | extra
    extra = {"cpu_bytes_to_use": site.memory_bytes}
    if way == "example":
        extra = {"shared_storage_path": str(site.folder / "example")}
    return {"kv_connector": PEERS[way], "kv_role": "kv_both", "kv_connector_extra_config": extra}


def seed_weights(worker: Any) -> None:
    """Draws every weight from a seed. Called by vLLM, with its worker.

    vLLM's own dummy weights are nearly zero: all tokens would be the same, whatever the KV. Queries and keys
    are drawn wider, so that attention looks at few tokens and one wrong page changes what is said."""
    import torch

    for number, (name, weight) in enumerate(worker.get_model().named_parameters()):
        if weight.dim() < 2:
            weight.data.fill_(1.0)
            continue
        generator = torch.Generator(weight.device).manual_seed(number)
        spread = 0.7 * weight.shape[-1] ** -0.5
        weight.data.normal_(0.0, 3 * spread if "qkv" in name else spread, generator=generator)


class Node:
    """A running `forebay node`."""

    def __init__(self, site: Site, *, disk: bool, more: Sequence[str] = ()) -> None:
        """`more` are lines of its configuration."""
        self.site = site
        self.config = site.socket.with_suffix(".toml")
        self.metrics = f"127.0.0.1:{free_port()}"
        chunk_mib = max(1, site.chunk_tokens * site.bytes_per_token >> 20)
        lines = [
            f'socket = "{site.socket}"',
            'write_back = "all"',
            "[memory]",
            f'size = "{site.memory_bytes >> 20}MiB"',
            f'chunk_size = "{chunk_mib}MiB"',
            # A virtual machine may show little of its memory before it is asked for it.
            "overcommit = true",
            "[metrics]",
            f'listen = "{self.metrics}"',
        ]
        if disk:
            lines += ["[[ssd]]", f'path = "{self.log}"', f'size = "{site.disk_bytes >> 20}MiB"']
            # Four chunks, each with a page of its own behind it.
            lines += [f'segment_size = "{4 * chunk_mib + 1}MiB"']
        self.config.write_text("\n".join([*lines, *more]) + "\n")
        self.process = self.start()

    @property
    def log(self) -> Path:
        """What is on disk."""
        return self.site.folder / "node.log"

    def start(self) -> subprocess.Popen[str]:
        """Starts it and waits until clients may come."""
        command = [self.site.forebay, "node", "--config", str(self.config)]
        # It sees all GPUs, whatever the engine sees.
        own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)
        assert process.stdout is not None
        line = process.stdout.readline()
        if "bytes behind" not in line:
            process.kill()
            sys.exit(f"{' '.join(command)} did not start: {line.strip() or 'see its output above'}")
        print(line.strip(), file=sys.stderr, flush=True)
        return process

    def restart(self) -> None:
        """Ends it and starts it again: its memory is empty then."""
        self.stop()
        self.process = self.start()

    def stop(self) -> None:
        """Ends it in order, or kills it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)  # A second signal cuts off what is leased.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(NODE_END_S)
            self.process.kill()
            self.process.wait()

    def figure(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )

    def wait_written(self, limit_s: float) -> None:
        """Waits until nothing is written to disk any more."""
        end, before, quiet = time.monotonic() + limit_s, -1.0, 0
        while quiet < 3 and time.monotonic() < end:
            now = self.figure("forebay_disk_bytes_total")
            quiet, before = (quiet + 1 if now == before else 0), now
            time.sleep(0.5)


@contextlib.contextmanager
def node_beside(site: Site, way: str) -> Iterator[Node | None]:
    """The node that a way needs, if it needs one. What it kept on disk goes with it. A peer's server is not
    yielded: only its engine speaks to it."""
    if way in vllm_peers.MODULES:
        with vllm_peers.server_beside(way, site.folder, site.memory_bytes):
            yield None
        return
    if way not in OURS:
        yield None
        return
    relays = ["[relays]", f'socket = "{site.relays}"'] if way == "relay" else []
    node = Node(site, disk=way in FROM_DISK, more=relays)
    try:
        yield node
    finally:
        node.stop()
        node.log.unlink(missing_ok=True)


def free_port() -> int:
    """A port of loopback that nobody has now."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def row(name: str, unit: str, runs: list[float], **more: Any) -> dict[str, Any]:
    """A figure and its spread, as all benchmarks write it."""
    figures = {"value": statistics.median(runs), "min": min(runs), "max": max(runs), "runs": len(runs)}
    return {"name": name, "unit": unit} | figures | more


def results(bench: str, gpus: list[str], disk: str | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The results object, as all benchmarks write it."""
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    machine = {
        "cpus": os.cpu_count(),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "kernel": platform.release(),
        "gpus": gpus,
        "disk": disk,
    }
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"bench": bench, "commit": commit(), "date": date, "machine": machine, "rows": rows}


def commit() -> str:
    """The checkout's commit, or `unknown`."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def program(given: str | None) -> str:
    """The `forebay` program: as told, else that of the checkout, else the one in the path."""
    built = Path(__file__).parent.parent / "target" / "release" / "forebay"
    found = given or (str(built) if built.exists() else shutil.which("forebay"))
    if not found:
        sys.exit("no forebay program: build it with `cargo build --release`, or name it with --forebay")
    return found


def in_environment(environment: dict[str, str]) -> None:
    """Starts this program again where it lacks that environment: some of it is read before the first line."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
