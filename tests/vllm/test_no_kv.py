"""A model that keeps no KV, one that only encodes: it starts with the connector, and is left alone."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, PYTHON, Daemon, Engine, arguments, prompt, transfer

PROMPTS = [prompt(400 + number, 300) for number in range(4)]


def embedded(model: Path, log: Path, connector: dict[str, Any] | None) -> list[list[float]]:
    """What an engine makes of the prompts, twice. With a connector, that it has left all alone."""
    more: dict[str, Any] = {"runner": "pooling", "max_model_len": 512, "skip_tokenizer_init": False}
    given = arguments(model, connector, **more)
    del given["num_gpu_blocks_override"]  # There are none.
    with Engine(given, log) as engine:
        first, second = (engine.embed(prompts=PROMPTS) for _ in range(2))
        assert first == second
        if connector is not None:
            assert engine.left_alone() == 2 * len(PROMPTS)
        return [list(vector) for vector in first]


def test_a_model_that_keeps_no_kv_starts_and_is_left_alone(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    subprocess.run([PYTHON, str(HERE / "tiny_encoder.py"), str(folder), str(model)], check=True)
    log = tmp_path / "log"
    right = embedded(folder, tmp_path / "plain", None)
    with Daemon(tmp_path / "node") as node:
        found = embedded(folder, log, transfer(node.socket))
    for mine, theirs in zip(found, right, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert "keeps no KV: all its requests are left alone" in log.read_text(errors="replace")
