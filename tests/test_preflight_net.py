"""`forebay preflight net` between hosts that are network namespaces, each with one thing wrong.

Knows how hosts are joined, and what has to be said. Needs root and iproute2; what needs nftables is skipped
without it.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from processes import binary, kill, line_of

Finding = dict[str, str]
TOKEN = "what both hosts have"
PORT = 7600
PAUSE = ("--pause", "127.0.0.1:8099")


@dataclass
class Net:
    """Hosts, and the folder with their files."""

    folder: pathlib.Path
    hosts: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> "Net":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            kill(process)
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host], check=True)

    def host(self, name: str) -> str:
        """A host without links."""
        space = f"pf{os.getpid()}-{name}"
        subprocess.run(["ip", "netns", "add", space], check=True)
        self.hosts.append(space)
        self.run(space, "ip", "link", "set", "lo", "up")
        return space

    def join(self, one: str, other: str, addresses: tuple[str, str], mtu: int = 1500) -> tuple[str, str]:
        """A cable between two hosts. Returns the devices."""
        number = len(list(self.folder.glob("cable.*")))
        (self.folder / f"cable.{number}").touch()
        devices = (f"a{number}", f"b{number}")
        ends = [f"{device} mtu {mtu} netns {at}" for device, at in zip(devices, (one, other), strict=True)]
        subprocess.run(f"ip link add {ends[0]} type veth peer name {ends[1]}".split(), check=True)
        for device, space, address in zip(devices, (one, other), addresses, strict=True):
            if address:
                self.run(space, "ip", "address", "add", address, "dev", device)
            self.run(space, "ip", "link", "set", device, "up")
        return devices

    def run(self, host: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs something on a host."""
        whole = ["ip", "netns", "exec", host, *command]
        ran = subprocess.run(whole, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, f"{command}: {ran.stderr}"
        return ran

    def start(self, host: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts something on a host, which ends with the test."""
        whole = ["ip", "netns", "exec", host, *command]
        process = subprocess.Popen(whole, stdout=subprocess.PIPE, text=True, env=os.environ | (env or {}))
        self.started.append(process)
        return process

    def filter(self, host: str, *rules: str) -> None:
        """Rules of nftables for what comes in at a host, or with `forward ` for what passes it."""
        if shutil.which("nft") is None:
            pytest.skip("SKIPPED: no nft: install nftables")
        text = "table inet t {\n"
        for hook in ("input", "output"):
            own = "\n".join(rule.removeprefix(f"{hook} ") for rule in rules if rule.startswith(f"{hook} "))
            text += f"chain {hook} {{ type filter hook {hook} priority 0; policy accept;\n{own}\n}}\n"
        file = self.folder / f"{host}.nft"
        file.write_text(text + "}\n")
        self.run(host, "nft", "-f", str(file))

    def config(self, name: str, address: str, others: dict[str, str], token: str = TOKEN) -> str:
        """The configuration of a node, with a list of all nodes."""
        folder = self.folder / name
        folder.mkdir()
        nodes = {name: address} | others
        listed = [f'[[nodes]]\nname = "{node}"\naddress = "{at}:{PORT}"\n' for node, at in nodes.items()]
        (folder / "nodes.toml").write_text("".join(listed))
        (folder / "token").write_text(token)
        (folder / "token").chmod(0o600)
        (folder / "node.toml").write_text(
            f"name = '{name}'\nsocket = '{folder}/node.sock'\n"
            "[memory]\nsize = '16MiB'\nlargest_chunk = '1MiB'\n"
            f"[peers]\nlisten = '{address}:{PORT}'\ntoken_file = '{folder}/token'\n"
            "plain_beyond_loopback = true\n"
            f"[directory]\nfile = '{folder}/nodes.toml'\n"
        )
        return str(folder / "node.toml")

    def preflight(self, host: str, *arguments: str, through: tuple[str, ...] = ()) -> "Report":
        """Runs a preflight to its end."""
        file = self.folder / "report.json"
        file.unlink(missing_ok=True)
        command = [*through, binary(), "preflight", "net", "--json", str(file), *arguments]
        whole = ["ip", "netns", "exec", host, *command]
        begin = time.monotonic()
        ran = subprocess.run(whole, capture_output=True, text=True, timeout=100)
        assert file.exists(), ran.stderr
        return Report(ran.returncode, ran.stdout, json.loads(file.read_text()), time.monotonic() - begin)

    def pause(self, host: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a preflight that pauses, and waits until it does."""
        process = self.start(host, binary(), "preflight", "net", *arguments, env=env)
        assert process.stdout is not None
        # It has a limit for everything that it does before.
        assert any(line.startswith("paused: ") for line in process.stdout), "the preflight has ended"
        return process


@dataclass
class Report:
    """What a preflight said."""

    code: int
    told: str
    json: dict[str, Any]
    seconds: float

    def of(self, check: str, subject: str | None = None) -> list[Finding]:
        """The findings of one check, about one peer or all."""
        findings = [one for one in self.json["findings"] if one["check"] == check]
        return [one for one in findings if subject in (None, one["subject"])]

    def one(self, check: str, subject: str | None = None) -> Finding:
        """The only finding of a check."""
        found = self.of(check, subject)
        assert len(found) == 1, found
        return found[0]

    def bad(self, check: str) -> list[str]:
        """What a check finds fault with."""
        return [one["subject"] for one in self.of(check) if one["severity"] != "ok"]


@pytest.fixture
def net(tmp_path: pathlib.Path) -> Iterator[Net]:
    """Hosts can be made here, and are taken down in the end."""
    probe = f"pf{os.getpid()}-probe"
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("SKIPPED: no network namespaces: root and iproute2 are needed")
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        pytest.skip("SKIPPED: no network namespaces may be made here")
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    with Net(tmp_path) as made:
        yield made


@dataclass
class Pair:
    """Two hosts with one cable, and their configurations."""

    left: str
    right: str
    left_toml: str
    right_toml: str


def pair(net: Net, mtu: int = 1500) -> Pair:
    """`left` is 10.77.0.1, `right` 10.77.0.2."""
    left, right = net.host("left"), net.host("right")
    net.join(left, right, ("10.77.0.1/24", "10.77.0.2/24"), mtu)
    left_toml = net.config("left", "10.77.0.1", {"right": "10.77.0.2"})
    return Pair(left, right, left_toml, net.config("right", "10.77.0.2", {"left": "10.77.0.1"}))


def test_between_two_hosts_that_are_fit_nothing_is_found(net: Net) -> None:
    two = pair(net, mtu=9000)
    net.pause(two.right, "--config", two.right_toml, *PAUSE)
    report = net.preflight(two.left, "--config", two.left_toml)
    for check in ("mtu", "route", "ports", "dns", "latency", "clocks", "versions", "rdma", "transports"):
        assert report.one(check)["severity"] == "ok", report.of(check)
    assert "9000 bytes" in report.one("mtu")["seen"]
    assert not report.of("bandwidth"), "it was not asked for"
    assert report.json["peers"] == {"10.77.0.2:7600": "right"}
    assert report.seconds < 10


def test_refused_filtered_wrong_and_silent_ports_are_told_apart(net: Net) -> None:
    two = pair(net)
    rules = ("tcp dport 7601 drop", "udp dport 7601 drop", "tcp dport 7602 reject")
    net.filter(two.right, *(f"input {rule}" for rule in rules))
    web = "import http.server as h; s = h.ThreadingHTTPServer(('', 7604), h.SimpleHTTPRequestHandler);"
    silent = "import socket, time; s = socket.create_server(('', 7605));"
    for make, serve in ((web, "s.serve_forever()"), (silent, "time.sleep(1000)")):
        program = f"{make} print('ready', flush=True); {serve}"
        assert line_of(net.start(two.right, sys.executable, "-c", program)) == "ready\n"
    ports = range(7601, 7606)
    given = [f"--peer=10.77.0.2:{port}" for port in ports] + ["--zmq=10.77.0.2:7604", "--zmq=10.77.0.2:7603"]
    report = net.preflight(two.left, *given)
    seen = {port: report.of("ports", f"10.77.0.2:{port}")[0]["seen"] for port in ports}
    assert seen[7601] == "filtered: nothing comes back"
    assert seen[7602] == seen[7603] == "refused: nobody listens there"
    assert seen[7604].startswith("wrong service: ")
    assert seen[7605] == "it accepts and says nothing"
    zeromq = [one["seen"] for one in report.of("ports") if one["expected"] == "ZeroMQ"]
    assert len(zeromq) == 2 and "refused: nobody listens there" in zeromq
    assert report.code == 2 and all(one["severity"] == "fault" for one in report.of("ports"))
    assert report.one("mtu", "10.77.0.2:7601")["severity"] == "unknown", "no datagram was answered"
    assert report.json["seconds"] < 10
    nobody = net.preflight(two.left, "--peer=10.77.0.2:7603").one("mtu")
    assert nobody["severity"] == "ok", "that nobody listens says it arrived"


def test_a_host_that_answers_few_datagrams_is_not_said_to_swallow_long_ones(net: Net) -> None:
    two = pair(net)
    # Nobody listens. The system says so six times, and then once a second.
    peers = [f"10.77.0.2:{port}" for port in range(7601, 7611)]
    report = net.preflight(two.left, *(f"--peer={peer}" for peer in peers))
    assert {report.one("mtu", peer)["severity"] for peer in peers} <= {"ok", "unknown"}
    assert report.json["seconds"] < 10


def test_a_wrong_token_is_told(net: Net) -> None:
    two = pair(net)
    net.pause(two.right, "--config", two.right_toml, *PAUSE)
    (pathlib.Path(two.left_toml).parent / "token").write_text("another one")
    finding = net.preflight(two.left, "--config", two.left_toml).one("ports")
    assert finding["severity"] == "fault" and finding["seen"].startswith("wrong token: ")
    assert "another one" not in json.dumps(finding) and "the same token" in finding["action"]


def chain(net: Net) -> Pair:
    """Two hosts with jumbo frames, and a way between them that carries 1500 bytes."""
    left, right, first, second = (net.host(name) for name in ("left", "right", "r1", "r2"))
    net.join(left, first, ("10.77.1.1/24", "10.77.1.2/24"), 9000)
    net.join(first, second, ("10.77.2.1/24", "10.77.2.2/24"), 1500)
    net.join(second, right, ("10.77.3.1/24", "10.77.3.2/24"), 9000)
    for router in (first, second):
        net.run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    gateways = {left: "10.77.1.2", right: "10.77.3.1", first: "10.77.2.2", second: "10.77.2.1"}
    for host, gateway in gateways.items():
        net.run(host, "ip", "route", "add", "default", "via", gateway)
    left_toml = net.config("left", "10.77.1.1", {"right": "10.77.3.2"})
    return Pair(left, right, left_toml, net.config("right", "10.77.3.2", {"left": "10.77.1.1"}))


def test_a_black_hole_for_long_packets_is_a_fault_and_a_router_that_tells_is_none(net: Net) -> None:
    two = chain(net)
    paused = net.pause(two.right, "--config", two.right_toml, *PAUSE)
    told = net.preflight(two.left, "--config", two.left_toml)
    assert told.one("mtu")["severity"] == "warning"
    assert "too long for the way, where 1500 are the most; 1500 bytes do" in told.one("mtu")["seen"]
    assert "over 10.77.1.2" in told.one("route")["seen"]
    net.filter(two.left.replace("left", "r1"), "output icmp type destination-unreachable drop")
    net.run(two.left, "ip", "route", "flush", "cache")
    hole = net.preflight(two.left, "--config", two.left_toml)
    assert hole.one("mtu")["severity"] == "fault" and hole.code == 2
    assert "9000 bytes do not arrive, and nobody says why; 1500 bytes do" in hole.one("mtu")["seen"]
    kill(paused)
    nobody = net.preflight(two.left, "--config", two.left_toml)
    assert nobody.one("mtu")["severity"] == "fault", "it says only that nobody listens"
    assert max(hole.json["seconds"], nobody.json["seconds"]) < 10


def test_a_host_that_would_drop_what_peers_send_is_told(net: Net) -> None:
    left, right = net.host("left"), net.host("right")
    arrives, _ = net.join(left, right, ("10.77.1.1/24", "10.77.1.2/24"))
    leaves, _ = net.join(left, right, ("10.77.2.1/24", "10.77.2.2/24"))
    toml = net.config("left", "10.77.1.1", {"right": "10.77.2.2"})
    net.pause(right, "--config", net.config("right", "10.77.2.2", {"left": "10.77.1.1"}), *PAUSE)
    for value, severity in (("1", "fault"), ("2", "warning")):
        filters = (f"net.ipv4.conf.{arrives}.rp_filter={value}", "net.ipv4.conf.all.rp_filter=0")
        net.run(left, "sysctl", "-qw", *filters)
        finding = net.preflight(left, "--config", toml).one("route")
        assert finding["severity"] == severity, finding
        assert f"leave by {leaves}, and its own arrive at {arrives}, which has 10.77.1.1" in finding["seen"]


def site(net: Net, number: int = 3, strangers: bool = False) -> list[tuple[str, str]]:
    """Hosts at one switch, each with its configuration, all but the first paused.

    Strangers know the first one only.
    """
    switch = net.host("switch")
    net.run(switch, "ip", "link", "add", "br0", "type", "bridge")
    net.run(switch, "ip", "link", "set", "br0", "up")
    at = {f"h{nth}": f"10.77.0.{nth + 1}" for nth in range(number)}
    made = []
    for name, address in at.items():
        host = net.host(name)
        _, port = net.join(host, switch, (f"{address}/24", ""))
        net.run(switch, "ip", "link", "set", port, "master", "br0")
        known = {"h0"} if strangers and name != "h0" else set(at)
        others = {other: there for other, there in at.items() if other in known - {name}}
        made.append((host, net.config(name, address, others)))
    for host, toml in made[1:]:
        net.pause(host, "--config", toml, *PAUSE)
    return made


def test_a_slow_host_is_named_and_not_its_pairs_and_drift_is_told(net: Net) -> None:
    hosts = site(net)
    first, toml = hosts[0]
    baseline = net.folder / "baseline.json"
    good = net.preflight(first, "--config", toml, "--measure", "--baseline", str(baseline))
    rates = json.loads(baseline.read_text())["hosts"]
    assert set(rates) == set(good.json["measured"]["hosts"]) == {"h0", "h1", "h2"}
    measured = good.json["measured"]
    assert len(measured["pairs"]) == 3 and 0 < measured["bytes"] <= measured["bytes_max"]
    assert "3 pairs of hosts are measured; at most" in good.told
    slow, device = hosts[2][0], "a2"
    net.run(slow, *f"tc qdisc add dev {device} root tbf rate 200mbit burst 64kb latency 50ms".split())
    metrics = net.folder / "preflight.prom"
    options = ("--measure", "--baseline", str(baseline), "--metrics", str(metrics))
    report = net.preflight(first, "--config", toml, *options)
    slow_ones = [one for one in report.of("bandwidth") if "this host is slow" in one["seen"]]
    assert [one["subject"] for one in slow_ones] == ["h2"], report.of("bandwidth")
    drifted = [one["subject"] for one in report.of("bandwidth") if "less than on" in one["expected"]]
    assert "h2" in drifted
    assert report.json["measured"]["hosts"]["h2"]["sends_bytes_per_s"] < 30e6
    assert 'host_bytes_per_second{host="h2",direction="sends"}' in metrics.read_text()
    assert report.json["measured"]["seconds"] < 60 and report.json["seconds"] < 10


def test_a_host_that_loses_packets_is_named(net: Net) -> None:
    hosts = site(net)
    net.filter(hosts[1][0], "input iif != lo numgen random mod 100 < 2 drop")
    first, toml = hosts[0]
    report = net.preflight(first, "--config", toml, "--measure")
    lossy = [one["subject"] for one in report.of("latency") if "were sent again" in one["seen"]]
    assert lossy == ["h1"], report.of("latency")


def test_a_host_measures_with_peers_of_its_own_list_only(net: Net) -> None:
    first, toml = site(net, strangers=True)[0]
    report = net.preflight(first, "--config", toml, "--measure")
    unknown = [one for one in report.of("bandwidth") if one["severity"] == "unknown"]
    assert [one["subject"] for one in unknown] in (["h1 and h2"], ["h2 and h1"]), report.of("bandwidth")
    assert "is none of this host's peers" in unknown[0]["seen"]
    assert len(report.json["measured"]["pairs"]) == 2, "the pairs of the first host"


DNS = """
import socket, struct, sys, time
mode, s = sys.argv[1], socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 53))
print("ready", flush=True)
count = 0
while True:
    question, client = s.recvfrom(512)
    end = question.index(b"\\0", 12) + 5
    is_a = question[end - 4 : end - 2] == b"\\0\\x01"
    count += is_a
    time.sleep(0.15 if mode == "slow" else 0)
    last = count if mode == "stale" else 2
    code, answers = (3, b"") if mode == "none" else (0, b"")
    if is_a and mode != "none":
        answers = b"\\xc0\\x0c\\0\\x01\\0\\x01" + struct.pack(">IH4B", 60, 4, 10, 77, 0, last)
    head = question[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, bool(answers), 0, 0)
    s.sendto(head + question[12:end] + answers, client)
"""


@pytest.mark.parametrize(
    ("mode", "severity", "says"),
    [
        ("good", "ok", "resolves within 100 ms"),
        ("none", "fault", "does not resolve"),
        ("stale", "warning", "resolves to 10.77.0.1, and then to 10.77.0.2"),
        ("slow", "warning", "resolves in "),
    ],
)
def test_names_have_to_resolve_twice_to_the_same_and_soon(
    net: Net, mode: str, severity: str, says: str
) -> None:
    host = net.host("left")
    server = net.start(host, sys.executable, "-c", DNS, mode)
    assert line_of(server) == "ready\n"
    conf = net.folder / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\noptions ndots:1 timeout:1 attempts:1\n")
    inner = f'mount --bind {conf} /etc/resolv.conf && exec "$@"'
    report = net.preflight(
        host, "--peer", "right.kv.test:7600", through=("unshare", "--mount", "sh", "-c", inner, "sh")
    )
    finding = report.one("dns")
    assert finding["subject"] == "right.kv.test"
    assert finding["severity"] == severity and says in finding["seen"], finding
    assert report.json["seconds"] < 10


def test_a_clock_that_is_off_is_told(net: Net) -> None:
    two = pair(net)
    net.pause(two.right, "--config", two.right_toml, *PAUSE, "--clock-offset-ms", "-5000")
    finding = net.preflight(two.left, "--config", two.left_toml).one("clocks")
    assert finding["severity"] == "warning"
    assert finding["seen"].startswith(("its clock is 5.00", "its clock is 4.99"))
    assert "behind" in finding["seen"]


def test_a_node_that_serves_answers_all_but_what_needs_a_preflight(net: Net) -> None:
    two = pair(net)
    node = net.start(two.right, binary(), "node", "--config", two.right_toml)
    assert "forebay node" in line_of(node)
    report = net.preflight(two.left, "--config", two.left_toml, "--measure")
    for check in ("ports", "mtu", "route", "clocks", "versions"):
        assert report.one(check)["severity"] == "ok", report.of(check)
    bandwidth = report.one("bandwidth")
    assert bandwidth["severity"] == "unknown" and "no preflight answers there" in bandwidth["seen"]


def test_without_peers_nothing_is_ok_that_needs_one(net: Net) -> None:
    report = net.preflight(net.host("left"))
    for check in ("mtu", "route", "ports", "clocks", "versions", "latency"):
        assert report.one(check)["severity"] == "unknown", report.of(check)
    assert report.code == (2 if report.json["severity"] == "fault" else 1)


def test_small_shared_memory_and_little_locked_memory_are_told(net: Net) -> None:
    inner = 'mount -t tmpfs -o size=64m none /dev/shm && ulimit -l 8192 && exec "$@"'
    report = net.preflight(net.host("left"), through=("unshare", "--mount", "sh", "-c", inner, "sh"))
    assert {"/dev/shm", "locked memory"} <= set(report.bad("limits")), report.of("limits")
    assert "8388608 bytes" in report.one("limits", "locked memory")["seen"]


def ask(host: str, method: str, path: str, port: int = 8099) -> tuple[int, Any]:
    """Asks a paused preflight, on its host."""
    request = (
        "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[3]), timeout=60);"
        "c.request(sys.argv[1], sys.argv[2]); r = c.getresponse(); print(r.status); print(r.read().decode())"
    )
    command = ["ip", "netns", "exec", host, sys.executable, "-c", request, method, path, str(port)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=70).stdout
    status, body = said.split("\n", 1)
    return int(status), json.loads(body) if body.startswith("{") else body.strip()


def test_a_pause_tells_checks_again_and_goes_on_when_it_is_told(net: Net) -> None:
    two = pair(net)
    command = ("--", sys.executable, "-c", "print('the engine')")
    paused = net.pause(two.left, "--config", two.left_toml, *PAUSE, *command)
    status, told = ask(two.left, "GET", "/status")
    assert (status, told["state"], told["runs"], told["report"]["severity"]) == (200, "paused", 1, "fault")
    assert ask(two.left, "GET", "/health") == (200, "paused")
    assert ask(two.left, "POST", "/run?fly")[0] == 400
    net.pause(two.right, "--config", two.right_toml, *PAUSE)
    status, again = ask(two.left, "POST", "/run?measure")
    assert status == 200
    assert [one["severity"] for one in again["findings"] if one["check"] == "ports"] == ["ok"]
    assert len(again["measured"]["pairs"]) == 1
    assert ask(two.left, "GET", "/status")[1]["runs"] == 2
    assert ask(two.left, "POST", "/exit")[0] == 200
    assert paused.stdout is not None
    assert paused.stdout.read().endswith("the engine\n") and paused.wait(10) == 0


def test_a_pause_that_nobody_ends_ends_by_itself_and_a_signal_ends_it_all(net: Net) -> None:
    host = net.host("left")
    command = ("--", sys.executable, "-c", "print('the engine')")
    left_alone = net.pause(host, *PAUSE, "--pause-limit", "0.5", *command)
    assert left_alone.stdout is not None
    rest = left_alone.stdout.read()
    assert "nobody has ended the pause" in rest and rest.endswith("the engine\n")
    stopped = net.pause(host, *PAUSE, *command)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.stdout is not None and "the engine" not in stopped.stdout.read()
    assert stopped.wait(10) == 1


def test_a_pod_of_llm_d_pauses_at_the_engines_port(net: Net) -> None:
    host = net.host("left")
    env = {"LLMD_PREFLIGHT_CHECKS": "pause", "VLLM_INFERENCE_PORT": "8200"}
    paused = net.pause(host, "--", "true", env=env)
    assert ask(host, "GET", "/health", 8200)[0] == 200
    assert ask(host, "GET", "/exit", 8200)[0] == 200
    assert paused.wait(10) == 0


def test_a_gate_holds_the_command_back_after_faults_only(net: Net) -> None:
    two = pair(net)
    engine = ("--", sys.executable, "-c", "print('the engine')")
    shut = net.preflight(two.left, "--config", two.left_toml, "--gate", *engine)
    assert shut.code == 2 and "the engine" not in shut.told
    without = net.preflight(two.left, "--config", two.left_toml, *engine)
    assert without.code == 0 and without.told.endswith("the engine\n")
    net.pause(two.right, "--config", two.right_toml, *PAUSE)
    opened = net.preflight(two.left, "--config", two.left_toml, "--gate", *engine)
    assert opened.code == 0 and opened.told.endswith("the engine\n"), opened.told


def test_a_peer_that_comes_later_is_waited_for(net: Net) -> None:
    two = pair(net)
    waits = net.start(two.left, binary(), "preflight", "net", "--config", two.left_toml, "--wait", "60")
    assert line_of(waits) == "other preflights can ask this one at 10.77.0.1:7600\n"
    time.sleep(0.5)
    assert waits.poll() is None, "nobody has refused it for good"
    net.pause(two.right, "--config", two.right_toml, *PAUSE)
    told, _ = waits.communicate(timeout=60)
    assert "right: a Forebay lets this host in" in told and "refused" not in told, told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--peer", "left"], "'left' is not allowed: HOST:PORT"),
        (["--peers", "/no/such/list"], "/no/such/list"),
        (["--config", "/no/such/node.toml"], "/no/such/node.toml"),
        (["--pause-limit", "0", "--pause", "127.0.0.1:1"], "a number of seconds above 0"),
        (["--gate"], "required"),
        (["--baseline", "file"], "--measure"),
    ],
)
def test_bad_arguments_are_refused_with_what_is_allowed(arguments: list[str], says: str) -> None:
    command = [binary(), "preflight", "net", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0 and says in ran.stderr, ran.stderr


def test_the_port_of_the_engine_has_to_be_one() -> None:
    env = os.environ | {"LLMD_PREFLIGHT_CHECKS": "pause", "VLLM_INFERENCE_PORT": "x"}
    ran = subprocess.run([binary(), "preflight", "net"], capture_output=True, text=True, env=env, timeout=60)
    assert ran.returncode != 0 and "VLLM_INFERENCE_PORT is 'x'; allowed is a port" in ran.stderr
