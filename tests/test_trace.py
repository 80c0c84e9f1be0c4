"""`forebay trace` as a command: what it reads and how, what a replay sends, and what its exit status says.

Knows the command line and the completions API, for which a server of this file stands in.
"""

import gzip
import http.server
import json
import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from processes import binary

LIMIT_S = 120.0
# More than a pipe holds, and than what is looked at to tell a format.
MANY = 4_000


def lines(times: list[int], tokens: int = 100, answer: int = 5) -> str:
    """A Mooncake trace of requests that arrive at these milliseconds."""
    rows = [{"timestamp": ms, "input_length": tokens, "output_length": answer} for ms in times]
    return "".join(json.dumps(row) + "\n" for row in rows)


def run(*arguments: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    """`forebay trace ...`."""
    command = [binary(), "trace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **more)


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """A trace with this text."""

    def written(text: str) -> pathlib.Path:
        path = tmp_path / "trace.jsonl"
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize("how", ["pipe", "stdin", "tiers through a pipe"])
def test_a_trace_through_a_pipe_loses_nothing(tmp_path: pathlib.Path, how: str) -> None:
    rows = [
        {"timestamp": ms, "input_length": 600, "output_length": 1, "hash_ids": [0, ms % 50]}
        for ms in range(MANY)
    ]
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    figures = tmp_path / "info.json"
    more = ["--tiers", "memory=10%,ssd=20%"] if "tiers" in how else []
    reading, writing = os.pipe()
    feeder = threading.Thread(target=feed, args=(writing, packed))
    feeder.start()
    name = "-" if how == "stdin" else f"/dev/fd/{reading}"
    descriptors = {"stdin": reading} if how == "stdin" else {"pass_fds": [reading]}
    done = run("info", name, "--json", figures, *more, **descriptors)
    os.close(reading)
    feeder.join()
    assert done.returncode == 0, done.stderr
    said = json.loads(figures.read_text())
    assert (said["requests"], said["skipped_lines"]) == (MANY, 0)
    assert bool(more) == ("tiers" in said)


def feed(writing: int, data: bytes) -> None:
    """As slowly as `zcat` may be."""
    with open(writing, "wb", buffering=0) as pipe:
        for at in range(0, len(data), 1_000):
            pipe.write(data[at : at + 1_000])


def test_an_empty_sample_is_an_error(trace: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    done = run("sample", trace(lines([0, 10])), "--start", "100", "--out", tmp_path / "sample.jsonl")
    assert done.returncode != 0
    assert "the sample is empty" in done.stderr and "--start" in done.stderr, done.stderr


def test_blocks_of_another_size_are_noted_and_can_be_said(
    trace: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    row = {"timestamp": 0, "input_length": 8_192, "output_length": 1, "hash_ids": list(range(8))}
    path, figures = trace(json.dumps(row) + "\n"), tmp_path / "info.json"
    done = run("info", path)
    assert done.returncode == 0 and "--block-tokens" in done.stderr, done.stderr
    done = run("info", path, "--block-tokens", "1024", "--time-unit", "s", "--json", figures)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(figures.read_text())["prefix"]["block_tokens"] == 1_024


class Server(http.server.ThreadingHTTPServer):
    """Answers completions with the events that `events` makes of a request's body."""

    daemon_threads = True
    events: Callable[[dict[str, Any]], list[Any]]
    seen: list[tuple[float, dict[str, Any]]]


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((time.monotonic(), body))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in self.server.events(body):
            text = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {text}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def serving(events: Callable[[dict[str, Any]], list[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Where such a server is, and what it has seen."""
    server = Server(("127.0.0.1", 0), Handler)
    server.events, server.seen = events, []  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.seen
    finally:
        server.shutdown()
        server.server_close()


def text(count: int, reason: str = "length", usage: bool = True) -> list[Any]:
    """An answer of so many tokens, without their ids."""
    events: list[Any] = [{"choices": [{"text": f" t{token}"}]} for token in range(count)]
    events.append({"choices": [{"text": "", "finish_reason": reason}]})
    if usage:
        events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}})
    return [*events, "[DONE]"]


def replay(
    path: pathlib.Path, events: Callable[[dict[str, Any]], list[Any]], *more: str
) -> tuple[subprocess.CompletedProcess[str], list[Any], dict[str, Any]]:
    """What the command says, what the server saw, and the figures of the arm."""
    folder = path.parent
    log, summary = folder / "log.jsonl", folder / "summary.json"
    log.unlink(missing_ok=True)
    with serving(events) as (url, seen):
        done = run("replay", path, "--target", url, "--log", log, "--summary", summary, *more)
    arms = json.loads(summary.read_text())["arms"] if summary.exists() else [{}]
    return done, seen, arms[0]


def test_an_unsorted_trace_is_sent_at_its_times_and_the_command_says_so(
    trace: Callable[[str], pathlib.Path],
) -> None:
    times = [2_000, 0, 500, 1_000, 1_500]
    rows = [{"timestamp": ms, "input_length": 100 + ms, "output_length": 1} for ms in times]
    path = trace("".join(json.dumps(row) + "\n" for row in rows))
    for pacing in ("open", "closed"):
        done, seen, _ = replay(path, lambda body: text(1), "--pacing", pacing)
        assert done.returncode == 0, done.stderr
        assert "4 requests of the trace stand behind ones that arrive later" in done.stderr, done.stderr
        sent = sorted((at, len(body["prompt"]) - 100) for at, body in seen)
        assert [ms for _, ms in sent] == sorted(times)
        # A busy machine may be late, and is never early.
        assert sent[-1][0] - sent[0][0] > 1.9


def test_asked_and_got_tokens_are_shown(trace: Callable[[str], pathlib.Path]) -> None:
    path = trace(lines([0, 10, 20], answer=50))
    done, _, arm = replay(path, lambda body: text(5))
    assert done.returncode == 0, done.stderr
    assert (arm["asked_tokens"], arm["output_tokens"], arm["short_answers"]) == (150, 15, 3)
    assert "shorter than asked" in done.stdout and "15 of 150 tokens came" in done.stdout, done.stdout
    done, _, arm = replay(path, lambda body: text(50, usage=False))
    assert done.returncode == 0, done.stderr
    assert (arm["output_tokens"], arm["short_answers"], arm["estimated_answers"]) == (150, 0, 3)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (["[DONE]"], "empty answer"),
        (text(0), "empty answer"),
        (text(3, reason="abort"), "aborted"),
        ([{"choices": [{"text": " a"}]}, {"error": {"message": "no blocks"}}, "[DONE]"], "engine error"),
        ([{"object": "error", "message": "no blocks", "code": 400}, "[DONE]"], "engine error"),
    ],
)
def test_what_is_no_answer_is_a_failure_and_fails_the_command(
    trace: Callable[[str], pathlib.Path], events: list[Any], kind: str
) -> None:
    path = trace(lines([0, 10, 20, 30], tokens=100))
    one_fails = iter([events, text(5), text(5), text(5)])
    done, _, arm = replay(path, lambda body: next(one_fails))
    assert arm["failures"] == {kind: 1}, arm["failures"]
    assert done.returncode != 0 and "1 of 4 requests failed" in done.stderr, done.stderr
    one_fails = iter([events, text(5), text(5), text(5)])
    done, _, arm = replay(path, lambda body: next(one_fails), "--max-failures", "1")
    assert done.returncode == 0 and arm["failures"] == {kind: 1}, done.stderr


def test_a_replay_of_nothing_is_an_error(trace: Callable[[str], pathlib.Path]) -> None:
    done, seen, _ = replay(trace(""), lambda body: text(1), "--format", "mooncake")
    assert done.returncode != 0 and not seen
    assert "the trace has no requests" in done.stderr, done.stderr
