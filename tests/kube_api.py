"""A stand-in for the API server of Kubernetes, with what a watch of pods and pools needs of it.

Says nothing about the real one: `make test-kube` asks that. Run with a port of loopback. It is told what to
do by POST: objects at their paths, and faults at /fault.
"""

import json
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


class Store:
    """Objects by their paths, and all that happened to them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # Versions go on when the server is started again.
        self.version = time.time_ns() // 1_000_000
        self.objects: dict[str, Json] = {}
        self.events: list[tuple[int, str, str, Json]] = []
        # What was forgotten of `events`: a watch from before it is too far behind.
        self.forgotten = 0
        self.fault: Json = {}
        self.asked: list[str] = []

    def put(self, path: str, given: Json | None) -> None:
        """An object is this now, or gone."""
        with self.changed:
            self.version += 1
            kind = "ADDED" if path not in self.objects else "MODIFIED"
            if given is None:
                kind, given = "DELETED", self.objects.pop(path)
            else:
                self.objects[path] = given
            given.setdefault("metadata", {}).update(
                name=path.rsplit("/", 1)[1], resourceVersion=str(self.version)
            )
            self.events.append((self.version, kind, path, json.loads(json.dumps(given))))
            self.changed.notify_all()


STORE = Store()


def is_wanted(of: Json, query: dict[str, str]) -> bool:
    """Whether selectors find an object."""
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    labels = of["metadata"].get("labels", {})
    pairs = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    return name in ("", of["metadata"]["name"]) and all(labels.get(key) == value for key, value in pairs)


class Handler(BaseHTTPRequestHandler):
    """Requests of a client, and what a test wants."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: Json) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/fault":
            with STORE.changed:
                STORE.fault = given
                if given.get("forget"):
                    STORE.forgotten, STORE.events = STORE.version, []
                STORE.changed.notify_all()
        else:
            STORE.put(self.path, given or None)
        self.answer(200, {"asked": STORE.asked})

    def do_GET(self) -> None:
        path, _, text = self.path.partition("?")
        query = dict(urllib.parse.parse_qsl(text))
        STORE.asked.append(self.path)
        if STORE.fault.get("status"):
            status = STORE.fault["status"]
            return self.answer(status, {"kind": "Status", "code": status, "message": STORE.fault["message"]})
        if "watch" in query:
            return self.watch(path, query)
        with STORE.changed:
            items = [
                of for at, of in STORE.objects.items() if at.startswith(f"{path}/") and is_wanted(of, query)
            ]
            version = STORE.version
        self.answer(200, {"metadata": {"resourceVersion": str(version)}, "items": items})

    def watch(self, path: str, query: dict[str, str]) -> None:
        told = int(query["resourceVersion"])
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        while True:
            with STORE.changed:
                fault = STORE.fault
                new = [event for event in STORE.events if event[0] > told]
                if not new and not fault.get("end") and told >= STORE.forgotten:
                    STORE.changed.wait(60)
                    continue
            if told < STORE.forgotten:
                status = {"kind": "Status", "code": 410, "message": "too old resource version"}
                return self.line("ERROR", status)
            if fault.get("end"):
                # Half of an object.
                self.wfile.write(b'{"type":"DELETED","object":{"metadata":{"na')
                return
            for version, kind, at, of in new:
                told = version
                if at.startswith(f"{path}/") and is_wanted(of, query):
                    self.line(kind, of)

    def line(self, kind: str, of: Json) -> None:
        self.wfile.write(json.dumps({"type": kind, "object": of}).encode() + b"\n")


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()
