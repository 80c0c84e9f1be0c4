"""`forebay bench slack --quick` as a user runs it: every row is there, and nothing stays behind."""

import json
import subprocess
from pathlib import Path

from processes import binary

TIMINGS = ("at_once", "windows", "idle")
READS = ("read_p50_ms", "read_p99_ms", "load_p50_ms", "load_p90_ms")
MIX = ("read_alone", "write_alone", "read_beside_writes", "write_beside_reads", "reads_keep", "writes_keep")
ROWS = (
    {f"slack.{timing}.{row}" for timing in (*TIMINGS, "reads_alone") for row in READS}
    | {f"slack.{timing}.stored_mean_ms" for timing in TIMINGS}
    | {f"slack.mix.{row}" for row in MIX}
)


def test_every_row_is_measured_and_nothing_stays_behind(tmp_path: Path) -> None:
    directory, out = tmp_path / "disk", tmp_path / "slack.json"
    directory.mkdir()
    command = [binary(), "bench", "slack", "--quick", "--dir", str(directory), "--json", str(out)]
    subprocess.run(command, check=True, timeout=240)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() >= ROWS
    assert all(rows[name]["value"] > 0 for name in ROWS)
    assert all("ratio" in rows[f"slack.{timing}.{row}"] for timing in TIMINGS for row in READS)
    assert all(rows[f"slack.{timing}.begun_in_window"]["value"] == 0 for timing in ("at_once", "idle"))
    assert list(directory.iterdir()) == []
