"""A control plane of Kubernetes without any kubelet: etcd, API server, controllers and scheduler on loopback.

Knows their command lines. Pods are what they are told to be: nobody runs them.
"""

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from processes import free_port, kill, until

CONTROLLERS = "deployment-controller,replicaset-controller,daemonset-controller,serviceaccount-controller"
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "host-1", "labels": {"kubernetes.io/hostname": "host-1"}},
}
ROOM = {"cpu": "64", "memory": "1Ti", "pods": "110", "hugepages-2Mi": "512Gi"}


class ControlPlane:
    """Its processes, and an administrator's requests."""

    def __init__(self, programs: Path, folder: Path, ends: ExitStack) -> None:
        self.programs, self.folder = programs, folder
        self.etcd, self.port = free_port(), free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        ends.callback(lambda: [kill(process) for process in self.processes.values()])
        self.write_secrets()
        self.start_etcd()
        self.start_api()
        self.start_controllers()
        self.apply(json.dumps(NODE))
        status = {"capacity": ROOM, "allocatable": ROOM, "conditions": [{"type": "Ready", "status": "True"}]}
        self.kubectl("patch", "node", "host-1", "--subresource=status", "-p", json.dumps({"status": status}))
        # The controller that would see that it is ready waits for a kubelet, and is not run.
        self.kubectl("taint", "node", "host-1", "node.kubernetes.io/not-ready-")

    def write_secrets(self) -> None:
        """The key that signs accounts' tokens, and an administrator's token."""
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        public = ["openssl", "rsa", "-in", key, "-pubout", "-out", self.folder / "accounts.pub"]
        subprocess.run(public, check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text("administrator,admin,1,system:masters\n")
        user = {"name": "admin", "user": {"token": "administrator"}}
        server = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        context = {"name": "all", "context": {"cluster": "all", "user": "admin"}}
        clusters = [{"name": "all", "cluster": server}]
        config = {"apiVersion": "v1", "kind": "Config", "users": [user], "clusters": clusters}
        config |= {"contexts": [context], "current-context": "all"}
        (self.folder / "config").write_text(json.dumps(config))

    def start(self, name: str, *command: str) -> None:
        """A process whose lines go to a file of its name."""
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def start_etcd(self) -> None:
        program = shutil.which("etcd")
        assert program, "etcd is needed: `make setup` installs it"
        mine, peers = f"http://127.0.0.1:{self.etcd}", f"http://127.0.0.1:{free_port()}"
        options = {
            "data-dir": self.folder / "etcd",
            "listen-client-urls": mine,
            "advertise-client-urls": mine,
        }
        options |= {"listen-peer-urls": peers, "initial-advertise-peer-urls": peers}
        options |= {"initial-cluster": f"default={peers}"}
        self.start("etcd", program, *(f"--{name}={value}" for name, value in options.items()))

    def start_api(self) -> None:
        """Returns when it can be asked."""
        options = {
            "etcd-servers": f"http://127.0.0.1:{self.etcd}",
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": self.port,
            "cert-dir": self.folder / "certificates",
            "service-account-key-file": self.folder / "accounts.pub",
            "service-account-signing-key-file": self.folder / "accounts.key",
            "service-account-issuer": "https://forebay.test",
            "token-auth-file": self.folder / "tokens.csv",
            "authorization-mode": "RBAC",
            "service-cluster-ip-range": "10.0.0.0/24",
            "disable-admission-plugins": "ServiceAccount",
            "endpoint-reconciler-type": "none",
        }
        program = str(self.programs / "kube-apiserver")
        self.start("api", program, *(f"--{name}={value}" for name, value in options.items()))
        until(lambda: self.is_up())

    def is_up(self) -> bool:
        assert self.processes["api"].poll() is None, (self.folder / "api.log").read_text()[-2000:]
        try:
            return self.request("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def start_controllers(self) -> None:
        config = str(self.folder / "config")
        controllers = str(self.programs / "kube-controller-manager")
        own = [f"--controllers={CONTROLLERS}", "--leader-elect=false", "--secure-port=0"]
        self.start("controllers", controllers, f"--kubeconfig={config}", *own)
        scheduler = str(self.programs / "kube-scheduler")
        self.start(
            "scheduler", scheduler, f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0"
        )

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """What the API server says to an administrator."""
        trusting = ssl._create_unverified_context()
        headers = {"authorization": "Bearer administrator", "content-type": kind}
        data = None if body is None else json.dumps(body).encode()
        url = f"https://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=trusting) as answer:
                said = answer.read()
                return answer.status, json.loads(said) if said.startswith(b"{") else said
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """What kubectl says; the test fails if it fails."""
        command = ["kubectl", f"--kubeconfig={self.folder / 'config'}", *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def apply(self, objects: str, *words: str) -> None:
        """These objects are there now; fields that Kubernetes does not know are refused."""
        self.kubectl("apply", "--validate=strict", "-f", "-", *words, given=objects)

    def set_pod(self, name: str, ip: str, ready: bool) -> None:
        """A pod says this of itself."""
        condition = {"type": "Ready", "status": str(ready)}
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [condition]}
        path = f"/api/v1/namespaces/serving/pods/{name}/status"
        kind = "application/merge-patch+json"
        answer, said = self.request("PATCH", path, {"status": status}, kind)
        assert answer == 200, said

    def restart_api(self, away_s: float) -> None:
        """It is away for a while."""
        kill(self.processes["api"])
        time.sleep(away_s)
        self.start_api()

    def as_pod(self, account: str) -> tuple[list[str], dict[str, str]]:
        """What runs a command with an account of the namespace, as a pod has it, and in what environment."""
        token = self.kubectl("create", "token", account, "--namespace", "serving", "--duration=1h")
        mounted = self.folder / "account"
        mounted.mkdir(exist_ok=True)
        (mounted / "token").write_text(token)
        shutil.copy(self.folder / "certificates/apiserver.crt", mounted / "ca.crt")
        place = "/run/secrets/kubernetes.io/serviceaccount"
        script = f'mount -t tmpfs none /run && mkdir -p {place} && cp {mounted}/* {place} && exec "$@"'
        where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}
        return ["unshare", "--mount", "sh", "-c", script, "sh"], os.environ | where


def eventually(what: Callable[[], Any], wanted: Any, limit_s: float = 60) -> None:
    """Waits until something is as it is wanted; tells how it is if it does not become so."""
    end = time.monotonic() + limit_s
    while (found := what()) != wanted:
        assert time.monotonic() < end, f"{found} instead of {wanted}"
        time.sleep(0.05)
