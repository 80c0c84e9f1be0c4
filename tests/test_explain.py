"""What `forebay explain` says of a prompt that was no hit, and what it refuses."""

import json
import os
import subprocess

import pytest
from explain_causes import CAUSES, Engine, place, prompt
from processes import binary, kill, until


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told_by_its_name(cause: str) -> None:
    with place() as at:
        verdict = CAUSES[cause](at)
        assert verdict["cause"] == cause, verdict["text"]
        assert verdict["text"].endswith(".") and verdict["action"]


def test_a_prompt_that_is_there_is_said_to_be_there_run_by_run() -> None:
    with place() as at:
        engine = Engine(at.start().socket)
        engine.store(prompt(1))
        said = at.explain(tokens=prompt(1))
        assert said["verdict"]["cause"] == "all_there"
        runs = said["own"][0]["runs"]
        assert [(run["first"], run["chunks"], run["place"]) for run in runs] == [(0, 4, "memory")]
        ids = ",".join(id.hex() for id in engine.ids(prompt(1)))
        assert at.verdict("--keys", ids)["cause"] == "all_there"


def test_a_namespace_has_to_be_named_where_there_are_several_and_the_error_says_how() -> None:
    with place() as at:
        engines = [Engine(at.start().socket), Engine(at.socket, dtype="fp8_e4m3")]
        tokens = at.folder / "tokens.json"
        tokens.write_text(json.dumps(prompt(1)))
        ask = [binary(), "explain", "--node", str(at.socket), "--tokens", str(tokens)]
        for more, says in (
            ([], "they differ in dtype (bfloat16, fp8_e4m3)"),
            (["--namespace", "dtype=fp16"], "no client has described a namespace with dtype=fp16"),
        ):
            said = subprocess.run([*ask, *more], capture_output=True, text=True, timeout=60)
            assert said.returncode == 1 and says in said.stderr, said.stderr
        assert all(engine.node.is_connected for engine in engines)


def test_what_was_described_is_known_to_a_node_that_was_started_again() -> None:
    with place() as at:
        engine = Engine(at.start().socket)
        kill(at.processes.pop())
        at.start()
        until(lambda: bool(at.explain(tokens=prompt(1))["own"]))
        facts = at.explain(tokens=prompt(1))["own"][0]["facts"]
        assert facts["dtype"] == "bfloat16" and engine.node.is_connected


@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: it takes root to become another user")
def test_other_users_may_not_ask_although_they_may_connect() -> None:
    with place() as at:
        at.folder.chmod(0o755)
        at.start("allow_uids = [65534]")
        ask = [binary(), "explain", "--node", str(at.socket), "--tokens", "-"]
        said = subprocess.run(ask, input="[1]", capture_output=True, text=True, timeout=60, user=65534)
        assert said.returncode == 1 and "only root and the node's own user" in said.stderr, said.stderr
