"""`forebay bench node` as a user runs it: rows of the prompt that was asked for, of any length."""

import json
import subprocess
from pathlib import Path

import pytest
from processes import binary


# Fewer chunks than are asked for together; more than those, and not a multiple; more than are under
# way.
@pytest.mark.parametrize(("tokens", "name"), [(192, "192"), (64 * 130, "8320"), (64 * 640, "40k")])
def test_a_prompt_of_any_length_is_stored_and_loaded(tmp_path: Path, tokens: int, name: str) -> None:
    out = tmp_path / "node.json"
    command = [binary(), "bench", "node", "--dir", str(tmp_path), "--tokens", str(tokens), "--runs", "1"]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=240)
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())["rows"]}
    acts = ("store", "load", "load_ssd")
    assert set(rows) == {f"node.{act}.{name}.{what}" for act in acts for what in ("ms", "cpu_ms", "messages")}
    assert all(rows[f"node.{act}.{name}.ms"] > 0 for act in acts)


def test_a_prompt_of_parts_of_chunks_is_refused(tmp_path: Path) -> None:
    command = [binary(), "bench", "node", "--dir", str(tmp_path), "--tokens", "100"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 2
    assert "'100' is not allowed: multiples of 64" in said.stderr
