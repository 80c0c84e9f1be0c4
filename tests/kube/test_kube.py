"""The chart and `--discover` before a real control plane of Kubernetes: `make test-kube`.

There is no kubelet: what pods say of themselves is written by the tests. Engines are not run.
"""

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane import ControlPlane, eventually
from processes import binary, free_port, kill, line_of, until

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "target/kube"
# Of operators that are not here.
ELSEWHERE = {"PodMonitor", "PrometheusRule"}
ENGINES = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "vllm", "namespace": "serving"},
    "spec": {
        "replicas": 3,
        "selector": {"matchLabels": {"app": "vllm"}},
        "template": {
            "metadata": {"labels": {"app": "vllm", "model": "qwen"}},
            "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        },
    },
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with the chart as it is rendered for an endpoint picker, and three engines."""
    with ExitStack() as ends:
        plane = ControlPlane(PROGRAMS, tmp_path_factory.mktemp("kube"), ends)
        plane.apply((Path(__file__).parent / "inferencepools.yaml").read_text())
        plane.kubectl("create", "namespace", "serving")
        until(lambda: plane.request("GET", "/apis/inference.networking.k8s.io/v1")[0] == 200)
        plane.apply(chart())
        plane.apply(json.dumps(ENGINES))
        yield plane


def chart() -> str:
    """The objects of the chart that this control plane knows."""
    rendered = yaml.safe_load_all((ROOT / "deploy/rendered/epp.yaml").read_text())
    return yaml.safe_dump_all([made for made in rendered if made and made["kind"] not in ELSEWHERE])


def pods(plane: ControlPlane, selector: str) -> list[dict[str, Any]]:
    """The pods with these labels."""
    _, said = plane.request("GET", f"/api/v1/namespaces/serving/pods?labelSelector={selector}")
    return sorted(said["items"], key=lambda pod: pod["metadata"]["name"])


class Picker:
    """`forebay epp` with the options that the chart gives it, and the account of its pod."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        pod, _ = pods(plane, "app.kubernetes.io/component=epp")
        (container,) = pod["spec"]["containers"]
        given = iter(container["args"])
        options = ["127.0.0.1:0" if option.startswith("0.0.0.0:") else option for option in given]
        self.pages = free_port()
        options[options.index("--metrics-listen") + 1] = f"127.0.0.1:{self.pages}"
        (folder / "secret").write_text("secret")
        options += ["--admin-token-file", str(folder / "secret")]
        command, environment = plane.as_pod(pod["spec"]["serviceAccountName"])
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [*command, binary(), *options],
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=environment,
            text=True,
        )
        assert line_of(self.process), self.log.read_text()

    def engines(self) -> dict[str, str]:
        """Where each engine is that it has."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.pages, timeout=30)) as connection:
            connection.request("GET", "/admin/engines", headers={"authorization": "Bearer secret"})
            return {engine["name"]: engine["url"] for engine in json.loads(connection.getresponse().read())}


@pytest.fixture
def picker(plane: ControlPlane, tmp_path: Path) -> Iterator[Picker]:
    eventually(lambda: len(pods(plane, "app.kubernetes.io/component=epp")), 2)
    made = Picker(plane, tmp_path)
    yield made
    kill(made.process)


@pytest.fixture
def engines(plane: ControlPlane) -> list[str]:
    """The names of three pods. The first two are ready."""
    eventually(lambda: len(pods(plane, "app=vllm")), 3)
    names = [pod["metadata"]["name"] for pod in pods(plane, "app=vllm")]
    for number, name in enumerate(names):
        plane.set_pod(name, f"10.244.0.{number}", number < 2)
    return names


def test_the_charts_pods_are_made_and_a_host_is_found_for_each(plane: ControlPlane) -> None:
    for component, count in (("node", 1), ("epp", 2)):
        made = f"app.kubernetes.io/component={component}"
        hosts = lambda made=made: [pod["spec"].get("nodeName") for pod in pods(plane, made)]  # noqa: E731
        eventually(hosts, ["host-1"] * count)


def test_the_picker_follows_pods_with_the_account_that_the_chart_gives_it(
    plane: ControlPlane, picker: Picker, engines: list[str]
) -> None:
    at = {name: f"http://10.244.0.{number}:8000" for number, name in enumerate(engines)}
    eventually(picker.engines, {name: at[name] for name in engines[:2]})
    plane.set_pod(engines[2], "10.244.0.2", True)
    eventually(picker.engines, at, 5)
    plane.set_pod(engines[0], "10.244.0.0", False)
    eventually(picker.engines, {name: at[name] for name in engines[1:]}, 5)
    plane.kubectl("label", "pod", "--namespace", "serving", engines[1], "app-")
    eventually(picker.engines, {engines[2]: at[engines[2]]}, 5)
    plane.kubectl("delete", "pod", "--namespace", "serving", engines[1], "--force")


def test_a_thousand_changes_leave_what_the_last_ones_say(
    plane: ControlPlane, picker: Picker, engines: list[str]
) -> None:
    for number in range(1000):
        plane.set_pod(engines[number % 3], f"10.244.1.{number % 250}", number % 7 != 0)
    # 997, 998 and 999 came last.
    last = {engines[number % 3]: f"http://10.244.1.{number % 250}:8000" for number in range(997, 1000)}
    eventually(picker.engines, last, 10)


def test_engines_stay_while_the_api_server_is_away_and_are_followed_again(
    plane: ControlPlane, picker: Picker, engines: list[str]
) -> None:
    eventually(lambda: sorted(picker.engines()), engines[:2])
    plane.restart_api(2)
    assert sorted(picker.engines()) == engines[:2]
    plane.set_pod(engines[2], "10.244.0.2", True)
    eventually(lambda: sorted(picker.engines()), engines, 30)


def test_without_the_right_to_list_the_log_says_so(
    plane: ControlPlane, tmp_path: Path, engines: list[str]
) -> None:
    binding = "/apis/rbac.authorization.k8s.io/v1/namespaces/serving/rolebindings/forebay-epp"
    _, kept = plane.request("GET", binding)
    plane.request("DELETE", binding)
    picker = Picker(plane, tmp_path)
    try:
        denied = 'cannot list resource \\"inferencepools\\"'
        until(lambda: denied in picker.log.read_text().replace('\\\\"', '\\"'), 30)
        assert picker.engines() == {}
        kept["metadata"] = {"name": "forebay-epp", "namespace": "serving"}
        plane.apply(json.dumps(kept))
        eventually(lambda: sorted(picker.engines()), engines[:2], 30)
    finally:
        kill(picker.process)


def test_without_its_pool_the_picker_has_no_engines(
    plane: ControlPlane, picker: Picker, engines: list[str]
) -> None:
    eventually(lambda: sorted(picker.engines()), engines[:2])
    plane.kubectl("delete", "inferencepool", "--namespace", "serving", "forebay")
    eventually(picker.engines, {}, 10)
    plane.apply(chart())
    eventually(lambda: sorted(picker.engines()), engines[:2], 10)
