"""`forebay bench disk --quick` as a user runs it: every row is there, and nothing stays behind."""

import json
import subprocess
from pathlib import Path

from processes import binary

SIZES = ["80kib", "128kib", "1mib"]
ROWS = {f"disk.{verb}.{size}" for verb in ("retrieve", "store") for size in SIZES} | {
    "disk.retrieve.churn.128kib",
    "disk.store.churn.128kib",
    "disk.cpu_us.80kib",
    "disk.index_bytes_per_chunk",
    "disk.recovery_s.100k",
}


def test_every_row_is_measured_and_nothing_stays_behind(tmp_path: Path) -> None:
    directory, out = tmp_path / "disk", tmp_path / "disk.json"
    directory.mkdir()
    command = [binary(), "bench", "disk", "--quick", "--dir", str(directory), "--json", str(out)]
    subprocess.run(command, check=True, timeout=120)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() >= ROWS
    assert all(rows[name]["value"] > 0 for name in ROWS)
    assert all("ratio" in rows[name] for name in ROWS if name.startswith(("disk.retrieve", "disk.store")))
    assert list(directory.iterdir()) == []
