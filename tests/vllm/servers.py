"""`vllm serve` and a proxy before it, in processes of their own, and what they say over HTTP.

Knows vLLM's command line, its OpenAI API and its page of metrics. Must never know connectors or prompts.
"""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import BLOCK, ENGINE_S, ENVIRONMENT, PYTHON
from processes import TIMEOUT_S, binary, free_port, until

MODEL_NAME = "tiny"


class Process:
    """A program that answers HTTP on a port of loopback."""

    def __init__(self, command: list[str], port: int, ready: str, log: Path, environment: Any = None) -> None:
        """Started, and not ready yet: `ready` is the page that says so."""
        self.base, self.ready, self.log = f"http://127.0.0.1:{port}", ready, log
        self.process = subprocess.Popen(
            command,
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )

    def wait(self) -> None:
        """Returns when it is ready."""
        until(self.is_ready, ENGINE_S)

    def is_ready(self) -> bool:
        """Whether it answers. It fails the test if it has ended."""
        assert self.process.poll() is None, f"it has ended: {self.log.read_text(errors='replace')[-3000:]}"
        try:
            self.page(self.ready)
        except OSError:
            return False
        return True

    def page(self, path: str) -> str:
        """What it answers to a GET."""
        with urllib.request.urlopen(self.base + path, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def complete(self, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
        """What it says to a prompt; `urllib.error.HTTPError` if it says that it cannot."""
        with self.post(tokens, count, **more) as answer:
            return dict(json.loads(answer.read()))

    def stream(self, tokens: list[int], count: int) -> Iterator[str]:
        """The same, piece by piece."""
        with self.post(tokens, count, stream=True) as answer:
            for line in answer:
                said = line.decode().strip().removeprefix("data: ")
                if said and said != "[DONE]":
                    yield str(json.loads(said)["choices"][0]["text"])

    def post(self, tokens: list[int], count: int, headers: Any = None, **more: Any) -> Any:
        """Asks for `count` tokens behind a prompt."""
        asked = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": count, "temperature": 0}
        asked |= {"ignore_eos": True, "skip_special_tokens": False} | more  # All tokens are seen.
        headers = {"Content-Type": "application/json"} | (headers or {})
        request = urllib.request.Request(self.base + "/v1/completions", json.dumps(asked).encode(), headers)
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    def counters(self) -> dict[str, float]:
        """The counters of its page of metrics by name, summed over labels."""
        found: dict[str, float] = {}
        for line in self.page("/metrics").splitlines():
            if not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
                found[name] = found.get(name, 0.0) + value
        return found

    def freeze(self) -> None:
        """It answers nothing from now on."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """As a machine dies, with all processes that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def options(port: int) -> list[str]:
    """Options of a small `vllm serve` on CPUs, behind its model."""
    given = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    given += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
    given += ["--block-size", str(BLOCK), "--max-model-len", "2048", "--max-num-batched-tokens", "512"]
    return [*given, "--max-num-seqs", "8", "--num-gpu-blocks-override", "400"]


def on_processor(processor: int) -> dict[str, str]:
    """The environment of an engine that computes on one processor."""
    mine = sorted(os.sched_getaffinity(0))
    return ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": str(mine[processor % len(mine)])}


def serve(model: Path, transfer: dict[str, Any], processor: int, log: Path) -> Process:
    """A `vllm serve` that computes on one processor."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options(port)]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
    return Process(command, port, "/health", log, on_processor(processor))


def toy_proxy(script: Path, prefiller: Process, decoder: Process, log: Path) -> Process:
    """vLLM's own toy proxy."""
    port = free_port()
    command = [PYTHON, str(script), "--port", str(port)]
    for name, server in (("prefiller", prefiller), ("decoder", decoder)):
        command += [f"--{name}-hosts", "127.0.0.1", f"--{name}-ports", server.base.rsplit(":", 1)[1]]
    return Process(command, port, "/healthcheck", log)


def router(policy: str, profile: Path, engines: dict[str, Process], log: Path, *more: str) -> Process:
    """`forebay route` before these engines."""
    port = free_port()
    command = [binary(), "route", "--listen", f"127.0.0.1:{port}", "--policy", policy, *more]
    command += ["--profile", str(profile)]
    for name, engine in engines.items():
        command += ["--backend", f"{name}={engine.base}"]
    return Process(command, port, "/health", log)
