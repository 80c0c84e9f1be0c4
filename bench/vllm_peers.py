"""The servers of PegaFlow and of LMCache that keep KV beside a vLLM.

Both are called by the names that their wheels install, `pegaflow-server` and `lmcache`, which must
be on the path. Knows how these are started and how their connectors find them; must never know what
is measured.
"""

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Where vLLM finds the connector. It has one for LMCache of its own, for older servers.
MODULES = {
    "pegaflow": "pegaflow.connector",
    "lmcache": "lmcache.integration.vllm.lmcache_mp_connector",
}
PORTS = {"pegaflow": 50055, "lmcache": 5555}
HTTP_PORTS = {"pegaflow": 9091, "lmcache": 8080}
HEALTH = {"pegaflow": "health", "lmcache": "healthcheck"}
LMCACHE_FULL = 0.8  # It evicts above this part of its memory, so it gets as much more.
READY_S = 120.0
POLL_S = 0.25
END_S = 15


def extra_config(way: str) -> dict[str, Any]:
    """What the connector is told: where its server listens. PegaFlow's knows."""
    if way == "pegaflow":
        return {}
    return {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": PORTS[way]}


def command(way: str, memory_bytes: int) -> list[str]:
    """How the server is started. All of its memory is pinned before it says that it is well."""
    port, http = str(PORTS[way]), str(HTTP_PORTS[way])
    if way == "pegaflow":
        size = ["--pool-size", f"{memory_bytes >> 20}mb", "--devices", "0"]
        return [
            "pegaflow-server",
            *size,
            "--addr",
            f"127.0.0.1:{port}",
            "--http-addr",
            f"127.0.0.1:{http}",
        ]
    size = [
        "--l1-size-gb",
        f"{memory_bytes / (1 << 30):.2f}",
        "--no-l1-use-lazy",
        "--eviction-policy",
        "LRU",
    ]
    where = ["--host", "127.0.0.1", "--port", port, "--http-host", "127.0.0.1", "--http-port", http]
    return ["lmcache", "server", *size, *where]


@contextlib.contextmanager
def server_beside(way: str, folder: Path, memory_bytes: int) -> Iterator[subprocess.Popen[bytes]]:
    """The server, while it is needed. What it says is in the folder."""
    log = folder / f"{way}-server.log"
    with log.open("wb") as said:
        process = subprocess.Popen(command(way, memory_bytes), stdout=said, stderr=subprocess.STDOUT)
    try:
        wait_until_well(way, process, log)
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()


def wait_until_well(way: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; ends this program if it does not."""
    end, url = time.monotonic() + READY_S, f"http://127.0.0.1:{HTTP_PORTS[way]}/{HEALTH[way]}"
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"the server of {way} does not answer; the end of {log}:\n{log.read_text()[-2000:]}")
        time.sleep(POLL_S)
