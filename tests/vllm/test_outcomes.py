"""Why a request loads less than it could, as the connector tells its node, and `forebay explain` asks for."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CHUNK, Engine, arguments, prompt, transfer
from processes import binary
from test_parts import facts

pytest.importorskip("vllm")

from forebay.vllm.connector.outcomes import Outcomes  # noqa: E402

ROOM = 10


def chunks(count: int | None) -> Any:
    """What is there or chosen: so many chunks in memory."""
    if count is None:
        return None
    return SimpleNamespace(chunks=count, in_memory=count, on_disk=0, on_peers=0)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("reason", "tokens", "case"),
    [
        ("shorter_than_a_chunk", CHUNK - 1, {}),
        ("held", 4 * CHUNK, {"held": 4 * CHUNK}),
        ("may_not_load", 4 * CHUNK, {"may_load": False}),
        ("load_failed", 4 * CHUNK, {"chunk_limit": 0, "there": 2, "chosen": 0}),
        ("computing_is_faster", 4 * CHUNK, {"there": 4, "chosen": 1}),
        ("no_room", 4 * CHUNK, {"there": 4, "chosen": 4}),
        ("loaded", 4 * CHUNK, {"there": 4, "chosen": 4, "loaded": 4 * CHUNK}),
        ("loaded", 4 * CHUNK, {"chosen": 4, "loaded": 4 * CHUNK}),
        ("partly_found", 4 * CHUNK, {"there": 3, "chosen": 3, "loaded": 3 * CHUNK}),
        ("not_found", 4 * CHUNK, {"there": 0, "chosen": 0}),
    ],
)
def test_a_request_is_told_with_why_it_loads_no_more(reason: str, tokens: int, case: dict[str, Any]) -> None:
    told: list[Any] = []
    node: Any = SimpleNamespace(
        note_outcome=lambda name, why, **numbers: told.append((name, why, numbers)), describe=None
    )
    tracked: Any = SimpleNamespace(
        name="one",
        tenant=None,
        request=SimpleNamespace(num_tokens=tokens),
        held=case.get("held", 0),
        there=chunks(case.get("there")),
        found=chunks(case.get("chosen")),
        chunk_limit=case.get("chunk_limit"),
        ids=SimpleNamespace(ranks=[[bytes([number]) for number in range(tokens // CHUNK)]]),
    )
    Outcomes(node, facts()).admitted(tracked, case.get("loaded", 0), case.get("may_load", True))
    ((name, why, numbers),) = told
    assert (name, why, numbers["prompt_tokens"]) == ("one", reason, tokens)
    there = max(case.get("there") or 0, case.get("chosen") or 0)
    assert numbers["found"] == (there, 0, 0)
    assert numbers["missing"] == ([bytes([there])] if there < tokens // CHUNK else [])


@pytest.mark.smoke
def test_each_new_namespace_is_described_with_what_people_call_it_and_a_reset_is_another() -> None:
    told: list[tuple[dict[str, Any], dict[str, str]]] = []
    node: Any = SimpleNamespace(describe=lambda fields, chunk_tokens, labels: told.append((fields, labels)))
    two = facts(labels={"model": "llama"})
    Outcomes(node, two)
    first = two.namespaces(None, two.shape)
    assert two.namespaces(None, two.shape) == first and len(told) == 1
    two.forget()
    two.namespaces(None, two.shape)
    two.namespaces("salted", two.shape)
    assert [labels["resets"] for _, labels in told] == ["0", "1", "1"]
    assert [labels["cache_salt"] == "none" for _, labels in told] == [True, True, False]
    assert all(labels["model"] == "llama" for _, labels in told)
    two.identity()
    assert len(told) == 3, "an identity is no namespace"


def test_a_request_of_vllm_is_explained_by_its_name(model: Path, tmp_path: Path) -> None:
    from conftest import Daemon

    node = Daemon(tmp_path / "node")
    tokens = prompt(70, 3 * CHUNK + ROOM)

    def explain(*more: str) -> dict[str, Any]:
        command = [binary(), "explain", "--node", str(node.socket), "--json", *more]
        said: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return said

    with node, Engine(arguments(model, transfer(node.socket)), tmp_path / "log") as engine:
        engine.generate(prompts=[tokens], tokens=1)
        engine.settle()
        said = explain("--request", "r1-")
        assert said["facts"]["requests"][0]["reason"] == "not_found"
        file = tmp_path / "tokens.json"
        file.write_text(json.dumps(tokens))
        assert explain("--tokens", str(file))["verdict"]["cause"] == "all_there"
        file.write_text(json.dumps(tokens[: 2 * CHUNK] + prompt(71, CHUNK)))
        assert explain("--tokens", str(file))["verdict"]["cause"] == "diverges"
