"""A node's spans of what a Python client asks hang below the span that the client names.

Knows the client and a receiver of OTLP. Which requests vLLM traces is the connector's business.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import free_port, kill, line_of, start_node, until
from test_py_paged import LAYERS, TOKENS, Engine, ids_of

import forebay

pytest.importorskip("opentelemetry.proto", reason="SKIPPED: no opentelemetry-proto from PyPI")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NODE_TOML = """name = "left"
socket = "{folder}/left.sock"
[memory]
size = "16MiB"
[metrics.push]
endpoint = "http://127.0.0.1:{port}"
trace_one_of = 0
"""


@pytest.fixture
def received(tmp_path: Path) -> Iterator[Path]:
    """The spans of a node that listens on `left.sock` beside this file."""
    port, spans = free_port(), tmp_path / "spans.jsonl"
    script = Path(__file__).parent / "otlp_receiver.py"
    command = [sys.executable, str(script), str(port), str(spans)]
    receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert line_of(receiver)
    (tmp_path / "left.toml").write_text(NODE_TOML.format(folder=tmp_path, port=port))
    node = start_node(tmp_path / "left.toml")
    yield spans
    kill(node)
    kill(receiver)


def test_a_lookup_is_part_of_the_trace_that_is_named_and_of_no_other(received: Path) -> None:
    node = forebay.Node(str(received.parent / "left.sock"))
    ids = [bytes([number]) * 32 for number in range(3)]
    for trace in (None, "nonsense", PARENT[:-1] + "0", PARENT):
        assert node.find([ids], trace=trace).wait(20.0) == (0, 0, 0)
    until(lambda: received.exists(), 30.0)
    [span] = [json.loads(line) for line in received.read_text().splitlines()]
    assert (span["name"], span["traceId"], span["parentSpanId"]) == ("lookup", PARENT[3:35], PARENT[36:52])
    node.close()


def test_a_load_is_part_of_the_trace_that_is_named(received: Path) -> None:
    daemon: Any = SimpleNamespace(socket=str(received.parent / "left.sock"))
    engine, ids = Engine(daemon, range(2), 16), ids_of(b"traced")
    engine.store(1, ids)
    blocks = engine.blocks(2)
    engine.cache.load(2, [(ids, 0, 0, 2)], [blocks], tokens=TOKENS, layerwise=True, trace=PARENT)
    for layer in range(LAYERS):
        engine.cache.wait_layer(layer)
    assert engine.is_true(blocks)
    until(lambda: received.exists(), 30.0)
    [span] = [json.loads(line) for line in received.read_text().splitlines()]
    assert (span["name"], span["traceId"], span["parentSpanId"]) == ("lease", PARENT[3:35], PARENT[36:52])
    engine.cache.close()
