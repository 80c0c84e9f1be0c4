"""What is in the images is enough for what the chart runs in them, with the rights that the chart gives.

No container runtime is needed: a folder with the program and its libraries stands for the image.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import binary, free_port, kill, line_of, until

ROOT = Path(__file__).parents[1]
CONTAINERS = ROOT / "deploy/containers"
CONFINED = Path(__file__).with_name("confined.py")
IPC_LOCK, NONE = "14", ""
NODE_TOML = """name = "${{NODE_NAME}}"
socket = "/run/forebay/node.sock"
[memory]
size = "64MiB"
[[ssd]]
path = "/var/lib/forebay/log"
size = "256MiB"
[metrics]
listen = "127.0.0.1:{port}"
"""


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """The program with its libraries, and folders to mount."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("SKIPPED: no mounts may be made here")
    root = tmp_path / "image"
    for folder in ("usr/bin", "etc/forebay", "run/forebay", "var/lib/forebay", "proc", "tmp"):
        (root / folder).mkdir(parents=True)
    shutil.copy(binary(), root / "usr/bin/forebay")
    needed = subprocess.run(["ldd", binary()], check=True, capture_output=True, text=True).stdout
    for library in re.findall(r"(/\S+) \(0x", needed):
        target = root / library[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    yield root


def confined(root: Path, uid: int, capabilities: str, *arguments: str) -> subprocess.Popen[str]:
    """The program, as a container of the chart."""
    command = [sys.executable, str(CONFINED), str(root), str(uid), capabilities, "/usr/bin/forebay"]
    env = os.environ | {"NODE_NAME": "host-7"}
    whole = [*command, "--end-with", str(os.getpid()), *arguments]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, text=True, env=env)


def asked(port: int) -> int:
    """Asks for an answer to a long prompt, and says how many of its tokens were cached."""
    body = json.dumps({"model": "m", "prompt": list(range(3000)), "max_tokens": 2}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


def page(port: int) -> str:
    """What a node or a router counts."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def test_node_and_router_run_with_the_rights_of_the_chart_and_nothing_but_their_libraries(
    image: Path,
) -> None:
    metrics, engine_port, port = free_port(), free_port(), free_port()
    (image / "etc/forebay/node.toml").write_text(NODE_TOML.format(port=metrics))
    processes = []
    try:
        node = confined(image, 0, IPC_LOCK, "node", "--config", "/etc/forebay/node.toml")
        processes.append(node)
        assert "forebay node" in line_of(node)
        status = Path(f"/proc/{node.pid}/status").read_text()
        assert f"CapEff:\t{1 << int(IPC_LOCK):016x}\n" in status and "NoNewPrivs:\t1" in status
        options = ["--port", str(engine_port), "--model", "m", "--clock-ratio", "50"]
        options += ["--node", str(image / "run/forebay/node.sock")]
        command = [binary(), "--end-with", str(os.getpid()), "engine", *options]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert line_of(processes[-1])
        backend = f"e=http://127.0.0.1:{engine_port}"
        router = confined(image, 65532, NONE, "route", "--listen", f"127.0.0.1:{port}", "--backend", backend)
        processes.append(router)
        assert line_of(router)
        assert "CapEff:\t0000000000000000\n" in Path(f"/proc/{router.pid}/status").read_text()
        assert asked(port) == 0 and asked(port) > 2900
        until(lambda: 'forebay_chunks{tier="disk"} 11' in page(metrics), 60)
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == 0
    finally:
        for process in processes:
            kill(process)


def test_images_have_the_versions_that_are_tested() -> None:
    toolchain = tomllib.loads((ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
    assert f"FROM rust:{toolchain}-" in (CONTAINERS / "node.Containerfile").read_text()
    vllm = re.search(r"^VLLM_033 := \S+ (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert vllm and f"FROM vllm/vllm-openai:v{vllm[1]}\n" in (CONTAINERS / "vllm.Containerfile").read_text()
