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


def test_objects_of_the_sizes_asked_for_are_spread_over_all_directories(tmp_path: Path) -> None:
    directories, out = [tmp_path / name for name in ("a", "b", "c")], tmp_path / "disk.json"
    for directory in directories:
        directory.mkdir()
    places = [word for directory in directories for word in ("--dir", str(directory))]
    command = [binary(), "bench", "disk", "--quick", *places, "--sizes", "1mib", "--json", str(out)]
    subprocess.run(command, check=True, timeout=120)
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert {name for name in rows if "retrieve" in name} == {"disk.retrieve.1mib", "disk.raw.retrieve.1mib"}
    assert all(rows[f"disk.{verb}.1mib"]["ratio"] > 0 for verb in ("retrieve", "store"))
    assert [list(directory.iterdir()) for directory in directories] == [[], [], []]


def test_a_size_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    command = [binary(), "bench", "disk", "--dir", str(tmp_path), "--sizes", "1mib,3mib"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 2
    assert "'3mib' is not allowed: 80kib, 128kib, 1mib, 2mib" in said.stderr
