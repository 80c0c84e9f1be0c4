"""`forebay report` on pages that are saved, and on a node that is asked."""

import json
import pathlib
import subprocess

import pytest
from explain_causes import place
from processes import binary, free_port

ENGINE = 'vllm:forebay_tokens_memory_total{model_name="llama",engine="0"} '


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    prices = ["--gpu-price", "3.6/hour", "--memory-price", "2/GiB-hour", "--hours", "24"]
    return subprocess.run(
        [binary(), "report", *prices, *arguments], capture_output=True, text=True, timeout=60
    )


def test_what_was_saved_since_the_page_before_is_set_against_the_memory_of_a_node_that_runs(
    tmp_path: pathlib.Path,
) -> None:
    now, before, made = tmp_path / "now.txt", tmp_path / "before.txt", tmp_path / "report.json"
    now.write_text(ENGINE + "5000\n")
    before.write_text(ENGINE + "1000\n")
    with place() as at:
        port = free_port()
        at.start(after=f"[metrics]\nlisten = '127.0.0.1:{port}'\n")
        said = report(
            *("--engine", f"{now},before={before},tenant=7", "--node", f"http://127.0.0.1:{port}"),
            *("--prefill-tokens-per-gpu-second", "4", "--json", str(made)),
            *("--html", str(tmp_path / "report.html")),
        )
    assert said.returncode == 0, said.stderr
    found = json.loads(made.read_text())
    (row,) = found["rows"]
    assert (row["model"], row["tenant"], row["tier"], row["tokens"]) == ("llama", "7", "memory", 4000)
    assert row["gpu_seconds"] == 1000 and row["worth"] == pytest.approx(1)
    assert found["memory_gib"] == 1 / 64 and found["memory_cost"] == pytest.approx(2 * 24 / 64)
    assert "GPU-seconds" in (tmp_path / "report.html").read_text()


def test_a_profile_says_how_fast_a_gpu_computes(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "now.txt"
    page.write_text(ENGINE + "5000\n")
    made = tmp_path / "report.json"
    said = report("--engine", str(page), "--profile", "no such profile")
    assert said.returncode == 1 and "no such profile" in said.stderr
    said = report("--engine", str(page), "--profile", "h100-llama-3.1-8b", "--json", str(made))
    assert said.returncode == 0, said.stderr
    rate = json.loads(made.read_text())["prefill_tokens_per_gpu_second"]
    assert 1_000 < rate < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "missing.txt"], "missing.txt"),
        (["--engine", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["--engine", "x,tenant=-1"], "'tenant=-1' is not allowed"),
        (["--engine", "x", "--ssd-price", "1/GB"], "'1/GB' is not allowed"),
    ],
)
def test_what_cannot_be_read_is_named(arguments: list[str], says: str) -> None:
    said = report(*arguments, "--prefill-tokens-per-gpu-second", "4")
    assert said.returncode != 0 and says in said.stderr, said.stderr
