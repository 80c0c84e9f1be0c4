"""The demo with nodes and engines as processes: right tokens, peer hits, a killed node, nothing left over."""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest
from processes import binary

# Pools so small that KV has to come back from a node, and a policy that sends each turn to another
# engine.
SMALL = ["--requests", "60", "--engines", "3", "--clock-ratio", "20", "--pool-tokens", "40000"]
ROUND_ROBIN = ["--policies", "round-robin"]


def demo(directory, *arguments):
    """Runs a small demo; gives its rows by name, the counters of its only arm, and what it printed."""
    results = directory / "results.json"
    command = [binary(), "demo", "--out", str(directory / "out"), "--json", str(results)]
    command += [*SMALL, *ROUND_ROBIN, *arguments]
    done = subprocess.run(command, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["name"].rsplit(".", 1)[1]: row["value"] for row in json.loads(results.read_text())["rows"]}
    summary = json.loads((directory / "out" / "summary.json").read_text())
    assert rows["wrong_tokens"] == 0, done.stdout
    assert rows["failures"] == 0, done.stdout
    return rows, summary["arms"][0], done.stdout


def processes_of(parent):
    """Processes, other than `parent`, whose environment names the run that it began."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != parent.pid:
                environment = (entry / "environ").read_bytes()
                if parent.mark.encode() in environment.split(b"\0"):
                    found.append(int(entry.name))
        except OSError:
            pass
    return found


def start_marked(directory, *arguments):
    """Starts a demo whose processes can be told from all others."""
    mark = f"FOREBAY_TEST_MARK={directory}"
    environment = {**os.environ, "FOREBAY_TEST_MARK": str(directory), "TMPDIR": str(directory)}
    command = [binary(), "demo", "--out", str(directory / "out"), *SMALL, *ROUND_ROBIN, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, start_new_session=True)
    process.mark = mark
    return process


def wait_until(what, done, limit_s=60):
    """Waits for a condition."""
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def test_engines_in_processes_of_their_own_load_from_their_node(tmp_path):
    rows, arm, _ = demo(tmp_path, "--node")
    assert arm["sources"]["memory"] > 0
    assert arm["sources"]["peer"] == 0
    assert arm["counters"]["chunks loaded"] > 0
    assert arm["counters"]["chunks computed without a node"] == 0
    assert "nodes_killed" not in rows


def test_what_one_node_has_engines_of_the_others_load(tmp_path):
    rows, arm, printed = demo(tmp_path, "--nodes", "3")
    assert arm["sources"]["peer"] > 0, printed
    assert rows["peer_hit_percent"] > 0
    assert arm["counters"]["chunks loaded from peers"] > 0


def test_a_killed_node_costs_computing_and_not_one_token(tmp_path):
    rows, arm, printed = demo(tmp_path, "--nodes", "3", "--kill-one")
    assert rows["nodes_killed"] == 1
    assert rows["tokens_again"] > 0, printed
    assert arm["counters"]["chunks computed without a node"] > 0
    assert arm["sources"]["memory"] > 0
    assert arm["sources"]["peer"] > 0
    assert "node-2 was killed after 30 requests" in printed


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_its_processes_end_too(tmp_path, end):
    process = start_marked(tmp_path, "--nodes", "2")
    wait_until("two nodes and three engines run", lambda: len(processes_of(process)) == 5)
    process.send_signal(end)
    process.communicate(timeout=60)
    wait_until("all processes have ended", lambda: not processes_of(process))
    if end != signal.SIGKILL:
        assert process.returncode == 0
        assert not list(tmp_path.glob("forebay-demo-*")), "the sockets are removed"


def test_a_node_that_cannot_start_is_named_with_its_own_words(tmp_path):
    command = [binary(), "demo", "--out", str(tmp_path / "out"), *SMALL, "--node"]
    command += ["--ssd", str(tmp_path / "ssd"), "--ssd-size", "1MiB"]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert done.returncode != 0
    assert "node-0" in done.stderr, done.stderr
    assert "ssd.size is 1MiB" in done.stderr, done.stderr
    assert "panicked" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nodes", "0"], "1..=8"),
        (["--node", "--nodes", "2"], "--nodes"),
        (["--kill-one"], "--nodes"),
        (["--node", "--fault", "flip-bit:1e-5"], "--fault"),
        (["--node", "--ssd", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_bad_arguments_are_refused_with_what_is_allowed(tmp_path, arguments, named):
    command = [binary(), "demo", "--out", str(tmp_path / "out"), *arguments]
    done = subprocess.run(command, timeout=30, capture_output=True, text=True)
    assert done.returncode != 0
    assert named in done.stderr, done.stderr
