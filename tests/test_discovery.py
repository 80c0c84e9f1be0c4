"""`forebay route --discover`: which engines the router has as the pods of a pool come and go.

The API server is a stand-in (`kube_api.py`), a process of its own, so that it can be killed. `make test-kube`
has the same router before a real one.
"""

import http.client
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from processes import binary, free_port, kill, line_of, until

API = pathlib.Path(__file__).parent / "kube_api.py"
PODS = "/api/v1/namespaces/serving/pods"
POOL = "/apis/inference.networking.k8s.io/v1/namespaces/serving/inferencepools/qwen"


def pool(port: int = 8000, **labels: str) -> dict[str, Any]:
    return {
        "spec": {"selector": {"matchLabels": labels or {"app": "vllm"}}, "targetPorts": [{"number": port}]}
    }


def pod(ip: str, ready: str = "True", **more: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    metadata = {"labels": {"app": "vllm"}, **more}
    status = {"podIP": ip, "conditions": conditions}
    return {"metadata": metadata, "spec": {"nodeName": "host-1"}, "status": status}


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")


class Cluster:
    """An API server, and a router that watches a pool there."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.api: subprocess.Popen[str] | None = None
        self.start_api()
        self.router: subprocess.Popen[str] | None = None

    def start_api(self) -> None:
        command = [sys.executable, str(API), str(self.port)]
        self.api = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line_of(self.api)

    def start_router(self, *options: str) -> None:
        (self.folder / "token").write_text("secret\n")
        self.at = free_port()
        command = [
            binary(),
            "route",
            "--listen",
            f"127.0.0.1:{self.at}",
            "--discover",
            "kubernetes://serving/qwen",
        ]
        command += [
            "--kube-api",
            f"http://127.0.0.1:{self.port}",
            "--admin-token-file",
            str(self.folder / "token"),
        ]
        with (self.folder / "log").open("w") as log:
            self.router = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert line_of(self.router).startswith("forebay route")

    def put(self, path: str, of: Any) -> None:
        ask(self.port, "POST", path, of or {})

    def fault(self, **fault: Any) -> list[str]:
        """The API server has this fault now. Gives what it was asked for."""
        _, said = ask(self.port, "POST", "/fault", fault)
        asked: list[str] = said["asked"]
        return asked

    def engines(self) -> dict[str, Any]:
        status, said = ask(self.at, "GET", "/admin/engines", authorization="Bearer secret")
        assert status == 200, said
        return {engine["name"]: engine for engine in said}

    def has(self, *names: str) -> Callable[[], bool]:
        return lambda: sorted(self.engines()) == sorted(names)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> None:
        kill(self.router)
        kill(self.api)


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


def test_ready_pods_of_the_pool_are_engines_and_a_request_reaches_one(cluster: Cluster) -> None:
    port = free_port()
    command = [binary(), "engine", "--port", str(port), "--model", "m", "--clock-ratio", "50"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line_of(engine)
        cluster.put(POOL, pool(port))
        cluster.put(f"{PODS}/a", pod("127.0.0.1"))
        cluster.put(f"{PODS}/starts", pod("10.0.0.2", ready="False"))
        cluster.put(f"{PODS}/leaves", pod("10.0.0.3", deletionTimestamp="2026-11-28T00:00:00Z"))
        cluster.put(f"{PODS}/other", pod("10.0.0.4", labels={"app": "postgres"}))
        cluster.start_router("--discover-store", "host", "--discover-events", "5557")
        until(cluster.has("a"))
        known = cluster.engines()["a"]
        assert (known["url"], known["store"]) == (f"http://127.0.0.1:{port}", "host-1")
        assert known["events"][0]["publish"] == "tcp://127.0.0.1:5557"
        body = {"model": "m", "prompt": "once", "max_tokens": 2}
        until(lambda: ask(cluster.at, "POST", "/v1/completions", body)[0] == 200)
    finally:
        kill(engine)


def test_pods_that_come_go_and_change_are_followed_at_once(cluster: Cluster) -> None:
    cluster.put(POOL, pool())
    cluster.start_router()
    cluster.put(f"{PODS}/a", pod("10.0.0.1"))
    cluster.put(f"{PODS}/b", pod("10.0.0.2"))
    until(cluster.has("a", "b"))
    cluster.put(f"{PODS}/a", pod("10.0.0.1", ready="False"))
    until(cluster.has("b"))
    # The pod of a StatefulSet keeps its name and gets another address.
    cluster.put(f"{PODS}/b", pod("10.0.0.9"))
    until(lambda: cluster.engines().get("b", {}).get("url") == "http://10.0.0.9:8000")
    cluster.put(f"{PODS}/b", None)
    until(cluster.has())


def test_a_thousand_changes_leave_what_the_last_ones_say(cluster: Cluster) -> None:
    cluster.put(POOL, pool())
    cluster.start_router()
    for number in range(1000):
        cluster.put(f"{PODS}/p{number % 20}", pod(f"10.0.{number // 20}.1", ready=str(number % 3 != 0)))
    left = {f"p{number % 20}": number for number in range(1000)}
    ready = {name: f"http://10.0.{number // 20}.1:8000" for name, number in left.items() if number % 3}
    until(lambda: {name: engine["url"] for name, engine in cluster.engines().items()} == ready)


def test_a_watch_that_is_too_far_behind_lists_again(cluster: Cluster) -> None:
    cluster.put(POOL, pool())
    cluster.put(f"{PODS}/a", pod("10.0.0.1"))
    cluster.start_router()
    until(cluster.has("a"))
    cluster.fault(end=True)
    cluster.put(f"{PODS}/a", None)
    cluster.put(f"{PODS}/b", pod("10.0.0.2"))
    cluster.fault(forget=True)
    until(cluster.has("b"))
    lists = [path for path in cluster.fault() if path.startswith(PODS) and "watch" not in path]
    assert len(lists) == 2, lists


def test_engines_stay_while_the_api_server_is_away_and_refuses(cluster: Cluster) -> None:
    cluster.put(POOL, pool())
    cluster.put(f"{PODS}/a", pod("10.0.0.1"))
    cluster.start_router()
    until(cluster.has("a"))
    kill(cluster.api)
    until(lambda: "Connection refused" in cluster.log())
    assert cluster.has("a")()
    cluster.start_api()
    denied = 'pods is forbidden: User "system:serviceaccount:serving:forebay" cannot list resource "pods"'
    cluster.fault(status=403, message=denied)
    until(lambda: "cannot list resource" in cluster.log())
    assert cluster.has("a")()
    # The server has forgotten all: what it lists now counts.
    cluster.put(POOL, pool())
    cluster.put(f"{PODS}/b", pod("10.0.0.2"))
    cluster.fault(forget=True)
    until(cluster.has("b"))


def test_a_pool_that_is_deleted_has_no_engines_and_says_so(cluster: Cluster) -> None:
    cluster.start_router()
    until(lambda: "there is no such pool" in cluster.log())
    cluster.put(f"{PODS}/a", pod("10.0.0.1"))
    cluster.put(POOL, pool())
    until(cluster.has("a"))
    cluster.put(POOL, pool(port=9000))
    until(lambda: cluster.engines().get("a", {}).get("url") == "http://10.0.0.1:9000")
    cluster.put(POOL, pool(app="nobody"))
    until(cluster.has())
    cluster.put(POOL, pool())
    until(cluster.has("a"))
    cluster.put(POOL, None)
    until(cluster.has())
    assert cluster.log().count("there is no such pool") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--discover", "serving/qwen"], "kubernetes://NAMESPACE/POOL"),
        (["--discover", "kubernetes://serving/qwen"], "KUBERNETES_SERVICE_HOST is not set"),
        (["--discover", "kubernetes://serving/qwen", "--kube-api", "api:443"], "http://HOST:PORT"),
        (
            ["--discover", "kubernetes://serving/qwen", "--discover-store", "node"],
            "host and pool are allowed",
        ),
        (["--discover-events", "5557"], "--discover"),
    ],
)
def test_what_cannot_be_watched_is_told_at_the_start(options: list[str], said: str) -> None:
    run = subprocess.run([binary(), "route", *options], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert said in run.stderr
