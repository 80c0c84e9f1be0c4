"""Traces of requests over the router, emulated engines and nodes, as an OTLP receiver gets them.

Knows how the processes are started and what a tree of spans is. The receiver is a process of its own.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from processes import binary, free_port, kill, line_of, start_node, until
from small_system import NODE_TOML

pytest.importorskip("opentelemetry.proto", reason="SKIPPED: no opentelemetry-proto from PyPI")

TESTS = Path(__file__).parent
PROFILE = TESTS.parent / "crates/steps/profiles/h100-llama-3.1-8b.toml"
TRACING = """[metrics.push]
endpoint = "http://127.0.0.1:{collector}"
trace_one_of = 0
"""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Site:
    """Processes by name, and where they are."""

    folder: Path
    collector: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def launch(self, name: str, command: list[str]) -> str:
        """Starts a process that says a line when it can be used."""
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return line_of(self.processes[name])

    def forebay(self, name: str, *command: str) -> str:
        return self.launch(name, [binary(), "--end-with", str(os.getpid()), *command])

    def start_receiver(self) -> None:
        script = str(TESTS / "otlp_receiver.py")
        assert self.launch("receiver", [sys.executable, script, str(self.collector), str(self.received)])

    @property
    def received(self) -> Path:
        return self.folder / "spans.jsonl"

    def start_nodes(self, *names: str) -> None:
        ports = {name: (free_port(), free_port()) for name in names}
        entry = '[[nodes]]\nname = "{}"\naddress = "127.0.0.1:{}"\n'
        listed = "".join(entry.format(name, peers) for name, (peers, _) in ports.items())
        (self.folder / "nodes.toml").write_text(listed)
        for name, (peers, metrics) in ports.items():
            config = self.folder / f"{name}.toml"
            at = {"folder": self.folder, "collector": self.collector}
            config.write_text((NODE_TOML + TRACING).format(name=name, peers=peers, metrics=metrics, **at))
            self.processes[name] = start_node(config)
            self.ports[name] = metrics

    def start_engine(self, name: str, *options: str) -> None:
        said = self.forebay(name, "engine", "--port", "0", "--model", "small", *options)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", said)
        assert found, said
        self.ports[name] = int(found[1])

    def start_router(self, *options: str, engines: list[str], one_of: int = 1) -> None:
        port = free_port()
        backends = [f"--backend={name}=http://127.0.0.1:{self.ports[name]}" for name in engines]
        traces = ["--trace-collector", f"http://127.0.0.1:{self.collector}", "--trace-one-of", str(one_of)]
        self.forebay(
            "router",
            "route",
            f"--listen=127.0.0.1:{port}",
            "--shutdown-delay=0",
            *backends,
            *traces,
            *options,
        )
        self.ports["router"] = port

    def ask(self, prompt: list[int], to: str = "router", **more: Any) -> tuple[int, dict[str, str]]:
        """The answer's status and headers, when all of it is there."""
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        body = json.dumps({"prompt": prompt, "max_tokens": 4, **more})
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[to], timeout=120)
        try:
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def keep_busy(self, prompt: list[int], **more: Any) -> None:
        """Asks, and waits for no answer."""

        def ask() -> None:
            with suppress(http.client.HTTPException, OSError):
                self.ask(prompt, **more)

        threading.Thread(target=ask, daemon=True).start()

    def metric(self, process: str, line: str) -> float:
        """The value of the series that is written so."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[process], timeout=20)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        return next(float(each[len(line) :]) for each in page.splitlines() if each.startswith(line + " "))

    def spans(self) -> list[dict[str, Any]]:
        """All that have come so far."""
        text = self.received.read_text() if self.received.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def trees(self, *names: str, count: int = 1) -> list[dict[str, Any]]:
        """The spans of the last trace that has all of these, when so many traces have come."""

        def found() -> list[list[dict[str, Any]]]:
            traces: dict[str, list[dict[str, Any]]] = {}
            for span in self.spans():
                traces.setdefault(span["traceId"], []).append(span)
            return [trace for trace in traces.values() if set(names) <= {span["name"] for span in trace}]

        until(lambda: len(found()) >= count, 60)
        return found()[-1]

    def stop(self) -> None:
        for process in self.processes.values():
            kill(process)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.stop()


def prompt(seed: int, tokens: int) -> list[int]:
    return [(place * 2_654_435_761 + seed * 77) % 30_000 for place in range(tokens)]


def service(span: dict[str, Any]) -> str:
    """Who made it: what it is, and which one."""
    of = {each["key"]: each["value"]["stringValue"] for each in span["resource"]["attributes"]}
    return of["service.name"] + (" " + of["service.instance.id"] if "node" in of["service.name"] else "")


def attributes(span: dict[str, Any]) -> dict[str, str]:
    return {each["key"]: each["value"]["stringValue"] for each in span["attributes"]}


def assert_connected(spans: list[dict[str, Any]], root_parent: str = "") -> None:
    """All spans hang below one, and lie in its time as far as clocks of one machine tell."""
    ids = {span["spanId"] for span in spans}
    assert len(ids) == len(spans), "a span has an id of its own"
    roots = [span for span in spans if span["parentSpanId"] not in ids]
    assert [(span["name"], span["parentSpanId"]) for span in roots] == [("request", root_parent)]
    assert all(
        int(span["startTimeUnixNano"]) >= int(roots[0]["startTimeUnixNano"]) - 10_000_000 for span in spans
    )


def parent_of(spans: list[dict[str, Any]], name: str) -> str:
    child = next(span for span in spans if span["name"] == name)
    return str(next(span["name"] for span in spans if span["spanId"] == child["parentSpanId"]))


def test_a_request_is_one_tree_from_the_router_to_the_peer_that_lends(site: Site) -> None:
    site.start_receiver()
    site.start_nodes("left", "right")
    for name, node in (("e0", "left"), ("e1", "right")):
        site.start_engine(name, "--node", str(site.folder / f"{node}.sock"), "--clock-ratio", "8")
    site.start_router("--policy", "round-robin", engines=["e0", "e1"])
    # Whoever has not computed it loads it from the other one's node.
    for _ in range(2):
        assert site.ask(prompt(1, 4000), stream=True)[0] == 200
        until(lambda: site.metric("left", 'forebay_chunks{tier="memory"}') > 0)
        time.sleep(1.0)
    for _ in range(6):
        site.ask(prompt(1, 4000), stream=True)
        if any(span["name"] == "lend" for span in site.spans()):
            break
        time.sleep(1.0)
    spans = site.trees("request", "choose", "attempt", "bring", "pull", "lend")
    assert_connected(spans)
    assert [parent_of(spans, name) for name in ("attempt", "choose", "pull", "lend")] == [
        "request",
        "request",
        "bring",
        "pull",
    ]
    assert {service(span) for span in spans} == {
        "forebay-route",
        "forebay-node left",
        "forebay-node right",
    }
    choice = attributes(next(span for span in spans if span["name"] == "choose"))
    assert choice["policy"] == "round-robin" and {"engine", "reason", "scores"} <= set(choice)
    request = next(span for span in spans if span["name"] == "request")
    assert [event["name"] for event in request["events"]] == ["first-token"]
    assert all(span["kind"] == 2 for span in spans if span["name"] in ("request", "bring", "lend"))


def test_a_handed_over_request_is_one_tree(site: Site) -> None:
    site.start_receiver()
    profile = slow_profile(site.folder / "slow.toml")
    for name in ("e0", "e1"):
        site.start_engine(name, "--profile", profile)
    elastic = ["--policy", "elastic", "--hand-over", "forebay", "--profile", profile, "--threads", "1"]
    site.start_router(*elastic, engines=["e0", "e1"])
    # One engine decodes behind a long context; the other one's prompt is computed, as far as is
    # seen, never.
    site.keep_busy(prompt(900, 1600), max_tokens=25_000, stream=True)
    context, pending = "forebay_route_context_tokens", "forebay_route_pending_prefill_tokens"
    until(lambda: site.metric("router", f'{context}{{backend="e0"}}') > 0)
    until(lambda: site.metric("router", f'{pending}{{backend="e0"}}') == 0)
    site.keep_busy(prompt(901, 700), max_tokens=25_000)
    until(lambda: site.metric("router", f'{pending}{{backend="e1"}}') > 0)
    for turn in range(2):
        status, headers = site.ask(prompt(turn, 700), max_tokens=12, stream=True)
        assert (status, headers["x-forebay-backend"], headers.get("x-forebay-prefill")) == (200, "e1", "e0")
    spans = site.trees("request", "hand-over", "prefill", "decode", count=2)
    assert_connected(spans)
    assert [parent_of(spans, name) for name in ("prefill", "decode", "hand-over")] == [
        "hand-over",
        "hand-over",
        "request",
    ]
    named = {span["name"]: attributes(span) for span in spans}
    assert (named["prefill"]["engine"], named["decode"]["engine"]) == ("e0", "e1")
    assert named["hand-over"]["end"] == "handed"


def slow_profile(file: Path) -> str:
    """A model whose steps a router sees: a millisecond a token."""
    text = PROFILE.read_text()
    for name, value in {
        "linear_us_per_token": 1000.0,
        "attention_ns_per_pair": 0.0,
        "kv_read_ns_per_context_token": 10000.0,
        "us_per_request": 10.0,
        "floor_eager_us": 1000.0,
        "floor_graph_us": 1000.0,
        "pool_tokens": 32768,
        "max_batched_tokens": 2048,
    }.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count >= 1, name
    file.write_text(text)
    return str(file)


def test_spans_wait_while_the_receiver_is_away_and_none_is_lost(site: Site) -> None:
    site.start_engine("e0")
    site.start_router(engines=["e0"])
    for seed in range(20):
        assert site.ask(prompt(seed, 30))[0] == 200
    until(lambda: site.metric("router", 'forebay_route_trace_pushes_total{end="failed"}') >= 2)
    site.start_receiver()
    until(lambda: sum(span["name"] == "request" for span in site.spans()) == 20, 60)
    spans = site.spans()
    assert sum(span["name"] == "attempt" for span in spans) == 20
    assert site.metric("router", "forebay_route_spans_dropped_total") == 0


def test_more_spans_than_there_is_room_for_are_counted(site: Site) -> None:
    site.start_engine("e0", "--clock-ratio", "100")
    site.start_router(engines=["e0"])
    # Three spans each, and room for 2048.
    for seed in range(720):
        site.ask(prompt(seed, 8), max_tokens=1)
    # A span is counted when it has ended, which may be after the answer.
    until(lambda: site.metric("router", "forebay_route_spans_dropped_total") >= 720 * 3 - 2048, 30)
    site.start_receiver()
    until(
        lambda: len(site.spans()) + site.metric("router", "forebay_route_spans_dropped_total") == 720 * 3, 60
    )


def test_one_of_a_hundred_is_sampled_and_a_parent_decides_for_itself(site: Site) -> None:
    site.start_receiver()
    site.start_engine("e0", "--clock-ratio", "100")
    site.start_router(engines=["e0"], one_of=100)
    for seed in range(500):
        site.ask(prompt(seed, 8), max_tokens=1)
    site.ask(prompt(0, 8), headers={"traceparent": PARENT})
    site.ask(prompt(0, 8), headers={"traceparent": PARENT[:-1] + "0"})
    site.ask(prompt(0, 8), headers={"traceparent": PARENT.upper()})
    until(lambda: any(span["parentSpanId"] == PARENT[36:52] for span in site.spans()), 60)
    time.sleep(2.5)
    requests = [span for span in site.spans() if span["name"] == "request"]
    asked = [span for span in requests if span["parentSpanId"]]
    assert [span["traceId"] for span in asked] == [PARENT[3:35]]
    assert_connected([span for span in site.spans() if span["traceId"] == PARENT[3:35]], PARENT[36:52])
    assert 4 <= len(requests) - len(asked) <= 6
    assert site.metric("router", "forebay_route_traceparents_ignored_total") == 1
