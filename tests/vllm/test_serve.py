"""`forebay vllm serve` as docs/install.md says to paste it, with a tiny model in place of MODEL."""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CHUNK, PYTHON
from processes import TIMEOUT_S, free_port, until
from servers import MODEL_NAME, Process, on_processor, options

import forebay

PAGE = Path(__file__).parents[2] / "docs/install.md"
SECTION = re.compile(r"^## Three commands to a warm hit\n.*?^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# One command a paragraph.
PASTED = SECTION.findall(PAGE.read_text())[0].strip().split("\n\n")
PORT = "localhost:8000"

pytestmark = pytest.mark.smoke


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.fixture
def server(model: Path, socket: Path, tmp_path: Path) -> Iterator[Process]:
    program, *words = shlex.split(PASTED[1])
    assert program == "forebay" and words[:3] == ["vllm", "serve", "MODEL"]
    ours = ["--node", str(socket), "--node-memory", "64MiB", str(model)]
    port = free_port()
    command = [str(Path(PYTHON).with_name(program)), *words[:2], *ours, *words[3:], *options(port)]
    started = Process(command, port, "/health", tmp_path / "vllm.log", on_processor(0))
    yield started
    started.kill()


def has_node(socket: Path) -> bool:
    try:
        forebay.Node(socket).close()
    except forebay.ForebayError:
        return False
    return True


def test_the_pasted_commands_give_a_warm_hit_and_the_node_ends_with_vllm(
    server: Process, socket: Path
) -> None:
    assert len(PASTED) == 3 and PASTED[0].startswith("pip install ")
    asks = PASTED[2].replace(PORT, server.base.removeprefix("http://")).replace("MODEL", MODEL_NAME)
    assert asks.count(server.base.removeprefix("http://")) == 1
    done = subprocess.run(["bash", "-c", asks], capture_output=True, text=True, timeout=TIMEOUT_S)
    said = done.stdout + done.stderr + server.log.read_text(errors="replace")[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2, said
    details = [answer["usage"]["prompt_tokens_details"] or {} for answer in answers]
    cold, warm = (of_prompt.get("cached_tokens", 0) for of_prompt in details)
    # Its last chunks may still be on their way to the node.
    assert cold == 0 and warm >= CHUNK, said
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert has_node(socket)
    os.kill(server.process.pid, signal.SIGTERM)
    server.process.wait(TIMEOUT_S)
    until(lambda: not has_node(socket))
