"""The demo with `--engine vllm`, as far as that is the demo's affair: the vLLMs are stand-ins.

Says nothing about the real vLLM: `tests/vllm/test_demo_vllm.py` does.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from processes import binary
from test_demo_nodes import processes_of, wait_until

STANDIN = pathlib.Path(__file__).parent / "vllm_server"
CONFIG = {
    "vocab_size": 2000,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}


@pytest.fixture
def command(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    command = [binary(), "demo", "--engine", "vllm", "--vllm", sys.executable, "--model", str(model)]
    return [*command, "--out", str(tmp_path / "out"), "--policies", "round-robin"]


def environment(directory, **more):
    return {**os.environ, "PYTHONPATH": str(STANDIN), "FOREBAY_TEST_MARK": str(directory), **more}


def start(command, directory, **more):
    """Starts a demo whose processes can be told from all others."""
    pipe = subprocess.PIPE
    settings = environment(directory, TMPDIR=str(directory), **more)
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=settings, start_new_session=True)
    process.mark = f"FOREBAY_TEST_MARK={directory}"
    return process


def interrupt(process, directory):
    """What a Ctrl-C does. Long before a vLLM that is waited for would be given up, nothing runs any more."""
    try:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert b"interrupted" in said
        wait_until("all processes have ended", lambda: not processes_of(process))
        assert not list(directory.glob("forebay-demo-*")), "the sockets are removed"
    finally:
        process.kill()
        for left in processes_of(process):
            os.kill(left, signal.SIGKILL)


def test_stand_ins_of_vllm_with_a_node_answer_through_the_router(command, tmp_path):
    results = tmp_path / "results.json"
    more = ["--requests", "12", "--json", str(results)]
    done = subprocess.run(
        [*command, *more], timeout=180, capture_output=True, text=True, env=environment(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "2 vLLMs with" in done.stdout and "clock x1" in done.stdout
    rows = {row["name"]: row["value"] for row in json.loads(results.read_text())["rows"]}
    assert rows["demo.round-robin.failures"] == 0
    assert "demo.round-robin.wrong_tokens" not in rows, "nobody knows what a real model must say"
    assert rows["demo.round-robin.hit_rate"] == pytest.approx(0.5, abs=0.01)
    arm = json.loads((tmp_path / "out" / "summary.json").read_text())["arms"][0]
    counters, sources = arm["counters"], arm["sources"]
    assert counters["tokens loaded from nodes"] == 140 and counters["tokens found on the GPU"] == 14
    assert counters["chunks stored"] == 6
    assert (sources["memory"], sources["ssd"], sources["peer"]) == (80, 40, 20)
    assert sources["gpu"] == pytest.approx(sources["computed"] - 140, abs=12), (
        "half of each prompt was cached"
    )


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_its_stand_ins_end_too(command, tmp_path, end):
    process = start(command, tmp_path)
    wait_until("a node and two vLLMs run", lambda: len(processes_of(process)) == 3)
    process.send_signal(end)
    process.communicate(timeout=60)
    wait_until("all processes have ended", lambda: not processes_of(process))


def test_a_ctrl_c_is_heeded_while_a_stand_in_starts(command, tmp_path):
    process = start(command, tmp_path, FOREBAY_TEST_VLLM="never serves")
    wait_until("a node, a vLLM and what this has started run", lambda: len(processes_of(process)) == 3)
    interrupt(process, tmp_path)
    assert (tmp_path / "out" / "report.html").exists()


def test_a_ctrl_c_ends_stand_ins_that_do_not_end_when_they_are_asked_to(command, tmp_path):
    process = start(command, tmp_path, FOREBAY_TEST_VLLM="never ends")
    records = tmp_path / "out" / "records.jsonl"
    wait_until("requests are sent", lambda: records.exists() and records.stat().st_size > 0)
    interrupt(process, tmp_path)


def test_a_vllm_that_cannot_start_is_named_with_its_own_words(command, tmp_path):
    nowhere = {**environment(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, env=nowhere)
    assert done.returncode != 0
    assert "engine-0" in done.stderr and "vllm" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--clock-ratio", "20"], "--clock-ratio is 20"),
        (["--fault", "flip-bit:1e-5"], "--fault is given"),
        (["--model", "/proc/nowhere"], "/proc/nowhere/config.json"),
    ],
)
def test_what_no_vllm_can_do_is_refused(command, tmp_path, more, named):
    if "--model" in more:
        at = command.index("--model")
        command = command[:at] + command[at + 2 :]
    done = subprocess.run([*command, *more], timeout=30, capture_output=True, text=True)
    assert done.returncode != 0
    assert named in done.stderr, done.stderr


def test_a_vllm_has_to_be_named(tmp_path):
    command = [binary(), "demo", "--engine", "vllm", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, timeout=30, capture_output=True, text=True)
    assert done.returncode != 0 and "--vllm" in done.stderr
