"""`bench/sglang.py` runs to its end, and its rows are what `bench/README.md` names. Rates are not tested."""

import json
import os
import subprocess
from pathlib import Path

from test_real import PYTHON, pytestmark

ROOT = Path(__file__).parents[2]
__all__ = ["pytestmark"]  # Where there is no SGLang, this is skipped too.


def test_a_round_of_the_benchmark_ends_with_rows_of_both_back_ends(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [PYTHON, str(ROOT / "bench/sglang.py"), "--dir", str(tmp_path), "--json", str(out)]
    command += ["--rounds", "1", "--tokens", "513"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    for state in ("memory", "ssd"):
        row = rows[f"sglang.ttft_ms.{state}"]
        assert row["value"] > 0 and row["peer"]["value"] > 0
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"], "the node's log is removed"
