"""`forebay demo --engine vllm` with the real vLLM: two servers with our connector, a node and the router.

Knows the demo's command line and the files that it writes. Must never know how the demo starts vLLM.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ENGINE_S, ENVIRONMENT, PYTHON
from processes import binary

pytest.importorskip("vllm.config", reason="SKIPPED: this Python has no vLLM: `make test-vllm`")

REQUESTS = 16


def test_real_vllms_answer_the_demo_in_full_and_load_from_the_node(model: Path, tmp_path: Path) -> None:
    out, results = tmp_path / "out", tmp_path / "results.json"
    command = [binary(), "demo", "--engine", "vllm", "--vllm", PYTHON, "--model", str(model)]
    # In turn, so that the turns of a session come to both servers, and one must get them from the
    # node.
    command += ["--policies", "round-robin", "--requests", str(REQUESTS)]
    command += ["--out", str(out), "--json", str(results)]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(
        command, timeout=2 * ENGINE_S, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["name"]: row["value"] for row in json.loads(results.read_text())["rows"]}
    assert rows["demo.round-robin.failures"] == 0
    assert 0 < rows["demo.round-robin.hit_rate"] < 1
    (arm,) = json.loads((out / "summary.json").read_text())["arms"]
    assert arm["requests"] == REQUESTS and len(arm["instances"]) == 2
    assert arm["short_answers"] == 0 and arm["output_tokens"] == arm["asked_tokens"] > 0
    assert arm["estimated_answers"] == 0, "vLLM says the ids of its tokens"
    assert arm["counters"]["chunks stored"] > 0 and arm["counters"]["tokens loaded from nodes"] > 0
