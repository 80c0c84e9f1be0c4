"""The demo as a user runs it: right tokens, faults caught, clear errors, nothing left behind."""

import json
import os
import pathlib
import signal
import subprocess

import pytest
from processes import binary, until

ROW_FIGURES = {
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_p90_s",
    "tpot_p99_s",
    "e2e_p50_s",
    "hit_rate",
    "wrong_tokens",
    "failures",
    "short_answers",
    "corruptions_caught",
}
SMALL = ["--requests", "60", "--engines", "2", "--clock-ratio", "20"]


def demo(directory, *arguments):
    """Runs a small demo and returns its results rows by name."""
    results = directory / "results.json"
    command = [binary(), "demo", "--out", str(directory / "out"), "--json", str(results), *SMALL, *arguments]
    done = subprocess.run(command, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(results.read_text())["rows"]}, done.stdout


def test_every_policy_answers_every_request_with_the_right_tokens(tmp_path):
    rows, printed = demo(tmp_path, "--policies", "lpwl,round-robin")
    expected = {f"demo.{policy}.{figure}" for policy in ("lpwl", "round-robin") for figure in ROW_FIGURES}
    assert set(rows) == expected
    for policy in ("lpwl", "round-robin"):
        assert rows[f"demo.{policy}.wrong_tokens"]["value"] == 0
        assert rows[f"demo.{policy}.failures"]["value"] == 0
        assert rows[f"demo.{policy}.hit_rate"]["value"] > 0.3
    assert "wrong tokens" in printed
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for arm in summary["arms"]:
        decided = arm["decisions"]
        assert decided["decisions"] == sum(decided["choices"].values()) == 60, decided
        assert decided["choices"]["home"] > 0 and decided["ttft_off_s"]["count"] == 60, decided
        assert decided["ttft_off_s"]["p50"] < 2 * arm["ttft_s"]["p50"], "both in model seconds"


def test_what_one_run_left_on_the_ssd_the_next_one_finds(tmp_path):
    ssd = ["--policies", "lpwl", "--ssd", str(tmp_path / "ssd"), "--ssd-size", "256MiB"]
    ssd += ["--memory-tokens", "200000"]
    counters = []
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        rows, printed = demo(tmp_path / run, *ssd)
        assert rows["demo.lpwl.wrong_tokens"]["value"] == 0, printed
        assert rows["demo.lpwl.failures"]["value"] == 0, printed
        summary = json.loads((tmp_path / run / "out" / "summary.json").read_text())
        counters.append(summary["arms"][0]["counters"])
    first, second = counters
    assert first["chunks found on SSD"] == 0
    assert second["chunks found on SSD"] > 0.9 * first["chunks written to SSD"] > 0
    assert rows["demo.lpwl.ssd_hit_percent"]["value"] > 0


def test_flipped_bits_are_caught_and_no_token_is_wrong(tmp_path):
    rows, _ = demo(tmp_path, "--policies", "round-robin", "--fault", "flip-bit:1e-5")
    assert rows["demo.round-robin.corruptions_caught"]["value"] > 0
    assert rows["demo.round-robin.wrong_tokens"]["value"] == 0
    assert rows["demo.round-robin.failures"]["value"] == 0


def test_ctrl_c_ends_it_soon_with_a_report_and_leaves_no_process(tmp_path):
    command = [binary(), "demo", "--out", str(tmp_path / "out"), *SMALL]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True)
    records = tmp_path / "out" / "records.jsonl"
    until(lambda: records.exists() and '"request"' in records.read_text())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and b"interrupted" in said
    assert (tmp_path / "out" / "report.html").exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--fault", "flip-bit:7"], "flip-bit:P"),
        (["--policies", "psychic"], "round-robin"),
        (["--engines", "0"], "1..=16"),
        (["--clock-ratio", "0"], "clock_ratio"),
        (["--trace", "no-such-trace.jsonl"], "no-such-trace.jsonl"),
        (["--ssd", "/proc/nowhere"], "/proc/nowhere"),
        (["--ssd-size", "1GiB"], "--ssd"),
    ],
)
def test_bad_arguments_are_refused_with_what_is_allowed(tmp_path, arguments, named):
    command = [binary(), "demo", "--out", str(tmp_path / "out"), *arguments]
    done = subprocess.run(command, timeout=30, capture_output=True, text=True)
    assert done.returncode != 0
    assert named in done.stderr, done.stderr
    assert "panicked" not in done.stderr


def test_a_git_lfs_pointer_is_named_as_one(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 132054902\n")
    done = subprocess.run(
        [binary(), "demo", "--out", str(tmp_path / "out"), "--trace", str(trace)],
        timeout=30,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "git" in done.stderr.lower() and "lfs" in done.stderr.lower()


def test_a_public_trace_runs(tmp_path):
    beside = pathlib.Path(__file__).parents[2] / "shared" / "traces"
    traces = pathlib.Path(os.environ.get("FOREBAY_TRACES", beside))
    trace = traces / "mooncake-fast25" / "conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"SKIPPED: no public traces at {traces}; set FOREBAY_TRACES")
    rows, _ = demo(tmp_path, "--policies", "lpwl", "--trace", str(trace))
    assert rows["demo.lpwl.wrong_tokens"]["value"] == 0
    assert rows["demo.lpwl.failures"]["value"] == 0
