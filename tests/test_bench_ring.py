"""`forebay bench ring`, and `bench disk --gpu`, as a user runs them, on the fake driver's GPU."""

import json
import subprocess
from pathlib import Path

from fake_cuda import Cuda
from processes import binary

SIZES = (16, 64, 256)


def rows_of(arguments: list[str], out: Path) -> dict[str, dict[str, float]]:
    """The rows of a benchmark, which loads the driver of the fixture."""
    command = [binary(), "bench", *arguments, "--json", str(out)]
    subprocess.run(command, check=True, timeout=120)
    return {row["name"]: row for row in json.loads(out.read_text())["rows"]}


def test_every_context_that_a_gpu_publishes_is_taken_whole(cuda: Cuda, tmp_path: Path) -> None:
    rows = rows_of(["ring", "--runs", "1", "--contexts", "20000"], tmp_path / "ring.json")
    rates = {f"ring.{by}contexts_per_s.{size}" for by in ("", "host.") for size in SIZES}
    assert all(rows[name]["value"] > 0 for name in rates | {"ring.host.round_trip_us.p50"})
    assert rows["ring.torn"]["value"] == rows["ring.host.torn"]["value"] == 0
    assert rows["ring.requests"]["value"] == sum(20_000 // size for size in SIZES)


def test_objects_come_to_gpu_memory_and_are_checked_there(cuda: Cuda, tmp_path: Path) -> None:
    arguments = ["disk", "--quick", "--gpu", "0", "--dir", str(tmp_path), "--sizes", "80kib,1mib"]
    rows = rows_of(arguments, tmp_path / "disk.json")
    for name in (f"ssd.gpu.{verb}.{size}" for verb in ("retrieve", "store") for size in ("80kib", "1mib")):
        assert rows[name]["ratio"] > 0
        assert rows[f"{name}.cpu_us"]["value"] > 0
    assert not [name for name in rows if name.startswith("disk.")]
