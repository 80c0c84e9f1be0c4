"""The chart, as it was rendered: objects that Kubernetes takes, and processes that take what they are told.

CI has no helm. Fields of objects are held against Kubernetes' own schemas, of those that have one there.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from processes import binary, free_port, kill, line_of
from rendered_chart import CHART, RENDERED, cases, head

ROOT = Path(__file__).parents[1]
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
# Of the operator of Prometheus and of the gateway; their schemas are where they are installed.
ELSEWHERE = {"PodMonitor", "PrometheusRule", "InferencePool"}
WORKLOADS = {"DaemonSet", "Deployment"}


def objects(case: str) -> list[dict[str, Any]]:
    """The objects of a rendered file."""
    return [made for made in yaml.safe_load_all((RENDERED / f"{case}.yaml").read_text()) if made]


def pods(case: str) -> dict[str, dict[str, Any]]:
    """What the pods are told, by the workload's name."""
    found = [made for made in objects(case) if made["kind"] in WORKLOADS]
    return {made["metadata"]["name"]: made["spec"]["template"]["spec"] for made in found}


def test_what_is_rendered_is_of_the_chart_as_it_is() -> None:
    assert {path.stem for path in RENDERED.iterdir()} == set(cases())
    for case in cases():
        assert (RENDERED / f"{case}.yaml").read_text().startswith(head(case)), "run `make chart`"


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(version: str) -> None:
    seen = set()
    for made in (made for case in cases() for made in objects(case)):
        if made["kind"] not in ELSEWHERE and json.dumps(made) not in seen:
            seen.add(json.dumps(made))
            kubernetes_validate.validate(made, version, strict=True)
    assert len(seen) > 10


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    (daemon,) = [made for made in objects("router") if made["kind"] == "DaemonSet"]
    daemon["spec"]["template"]["spec"]["hostPid"] = daemon["spec"]["template"]["spec"].pop("hostPID")
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        kubernetes_validate.validate(daemon, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("case", cases())
def test_no_container_has_a_right_that_it_does_not_need(case: str) -> None:
    for name, pod in pods(case).items():
        is_node = name.endswith("-node")
        assert pod.get("hostPID", False) == is_node, "it watches the processes of its clients"
        assert not pod.get("hostNetwork") and not pod.get("hostIPC")
        assert pod["automountServiceAccountToken"] == name.endswith("-epp"), "it watches a pool and its pods"
        folders = {volume["hostPath"]["path"] for volume in pod.get("volumes", []) if "hostPath" in volume}
        assert folders <= ({"/run/forebay", "/var/lib/forebay"} if is_node else set())
        for container in pod["containers"] + pod.get("initContainers", []):
            allowed = container["securityContext"]
            assert not allowed.get("privileged") and allowed["allowPrivilegeEscalation"] is False
            added = {"drop": ["ALL"], "add": ["IPC_LOCK"]} if is_node else {"drop": ["ALL"]}
            assert allowed["capabilities"] == added and allowed["readOnlyRootFilesystem"]
            assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
            assert is_node or allowed["runAsNonRoot"]


@pytest.mark.parametrize("case", cases())
def test_selectors_find_the_pods_that_they_are_for(case: str) -> None:
    made = objects(case)
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"].items()
        for one in made
        if one["kind"] in WORKLOADS
    }
    engines = {"app": "vllm", "model": "qwen"}.items()
    for one in made:
        selector = one.get("spec", {}).get("selector")
        if selector is None:
            continue
        chosen = selector.get("matchLabels", selector).items()
        found = [name for name, has in labels.items() if chosen <= has]
        is_of_engines = chosen <= engines
        assert len(found) == (0 if is_of_engines else 1), f"{one['kind']} {one['metadata']['name']}: {found}"


@pytest.mark.parametrize("case", cases())
def test_the_node_takes_its_configuration(case: str, tmp_path: Path) -> None:
    (made,) = [one for one in objects(case) if "node.toml" in one.get("data", {})]
    for folder in ("/run/forebay", "/var/lib/forebay", "/etc/forebay-peers"):
        (tmp_path / folder[1:]).mkdir(parents=True)
        made["data"]["node.toml"] = made["data"]["node.toml"].replace(folder, f"{tmp_path}{folder}")
    (tmp_path / "etc/forebay-peers/token").write_text("secret")
    config = tmp_path / "node.toml"
    config.write_text(made["data"]["node.toml"])
    command = [binary(), "node", "--config", str(config), "--check-config"]
    env = os.environ | {"NODE_NAME": "host-7", "POD_IP": "10.244.0.7"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and 'name = "host-7"' in done.stdout, done.stderr
    assert ("10.244.0.7:7600" in done.stdout) == (case == "all")
    env.pop("NODE_NAME")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "${NODE_NAME} is not set" in done.stderr


@pytest.mark.parametrize(
    ("case", "name"), [("router", "router"), ("all", "router"), ("all", "epp"), ("epp", "epp")]
)
def test_router_and_endpoint_picker_take_their_options(case: str, name: str) -> None:
    (container,) = pods(case)[f"forebay-{name}"]["containers"]
    listens = [option for option in container["args"] if option.startswith("0.0.0.0:")]
    assert {int(one.split(":")[1]) for one in listens} == {
        port["containerPort"] for port in container["ports"]
    }
    places = {one: f"127.0.0.1:{free_port()}" for one in listens}
    options = [places.get(option, option) for option in container["args"]]
    if "--discover" in options:
        options += ["--kube-api", f"http://127.0.0.1:{free_port()}"]
    command = [binary(), "--end-with", str(os.getpid()), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert places[listens[0]] in line_of(process)
    finally:
        kill(process)


def test_the_preflight_takes_its_options_and_goes_on_where_there_is_no_fault(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'socket = "{tmp_path}/node.sock"\n[memory]\nsize = "8MiB"\n')
    (preflight,) = [
        one for one in pods("router")["forebay-node"]["initContainers"] if one["name"] == "preflight"
    ]
    given = {"/etc/forebay/node.toml": str(config), "/usr/bin/forebay": binary()}
    options = [given.get(option, option) for option in preflight["args"]]
    done = subprocess.run([binary(), *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("forebay "), (
        done.stdout + done.stderr
    )


def test_boards_and_rules_reach_the_cluster_as_they_are() -> None:
    made = objects("all")
    (rule,) = [one for one in made if one["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/chart/rules.yaml").read_text())
    boards: dict[str, str] = {}
    for one in made:
        if one["metadata"]["labels"].get("grafana_dashboard") == "1":
            boards |= one["data"]
    files = {
        f"forebay-{path.name}": path.read_text() for path in (ROOT / "deploy/chart/dashboards").iterdir()
    }
    assert boards == files


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """As helm merges values: tables by their keys, all else as a whole."""
    both = {
        key: merged(values[key], more[key])
        for key in values.keys() & more.keys()
        if isinstance(values[key], dict)
    }
    return values | more | both


LABELLED = {"modelServers": {"matchLabels": {"app": "vllm"}}}


def checked(more: dict[str, Any]) -> None:
    """Holds values against the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft202012Validator(schema).validate(merged(values, more))


@pytest.mark.parametrize("case", cases())
def test_the_schema_allows_the_cases(case: str) -> None:
    checked(yaml.safe_load((CHART / f"ci/{case}.yaml").read_text()))
    checked({"router": {"enabled": False}})


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"modelServers": {"matchLabels": {}}}, "{}"),
        ({"node": {"memory": "64GB"}}, "64GB"),
        ({"node": {"memory": "0GiB"}}, "0GiB"),
        ({"node": {"pages": "2MiB"}}, "2MiB"),
        ({"node": {"metricsPort": 70000}}, "70000"),
        ({"node": {"terminationGracePeriodSeconds": 30}}, "30"),
        ({"node": {"socketFolder": "run/forebay"}}, "run/forebay"),
        ({"node": {"writeback": "all"}}, "writeback"),
        ({"node": {"peers": {"enabled": True, "etcd": ["http://etcd:2379"]}}}, "''"),
        ({"node": {"peers": {"enabled": True, "tokenSecret": "t"}}}, "[]"),
        ({"node": {"peers": {"etcd": ["https://etcd:2379"]}}}, "https://etcd:2379"),
        ({"router": {"policy": "psychic"}}, "psychic"),
        ({"router": {"replicas": -1}}, "-1"),
        ({"modelServers": {"matchLabels": {"app": "vllm"}, "targetPorts": []}}, "[]"),
        ({"inferencePool": {"failureMode": "Maybe"}}, "Maybe"),
        ({"monitoring": {"interval": "often"}}, "often"),
        ({"image": {"pullPolicy": "Sometimes"}}, "Sometimes"),
        ({"engine": {}}, "engine"),
    ],
    ids=str,
)
def test_the_schema_names_a_value_that_is_not_allowed(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(jsonschema.ValidationError) as caught:
        checked({**LABELLED, **bad})
    assert named in caught.value.message
