"""`forebay kv` and the methods of `forebay.Node` that say what becomes of chunks, with a real node."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explain_causes import FIELDS
from processes import Daemon, binary, free_port, kill, start_node, until

import forebay

NAMESPACE = bytes(range(32))
LAYERS, LAYER_BYTES = 4, 64 << 10
CONFIG = """socket = '{folder}/node.sock'
write_back = 'all'
[memory]
size = '32MiB'
largest_chunk = '1MiB'
[[ssd]]
path = '{folder}/log'
size = '64MiB'
segment_size = '4MiB'
"""
PEERS = """[peers]
listen = '127.0.0.1:{port}'
[directory]
file = '{list}'
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Daemon]:
    """A node with a little memory, and a log that is written at once."""
    config = tmp_path / "node.toml"
    config.write_text(CONFIG.format(folder=tmp_path))
    made = Daemon(tmp_path, start_node(config))
    yield made
    kill(made.process)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """Two of them that know of each other."""
    ports = {name: free_port() for name in ("left", "right")}
    nodes, entry = tmp_path / "nodes.toml", "[[nodes]]\nname = '{}'\naddress = '127.0.0.1:{}'\n"
    nodes.write_text("".join(entry.format(*node) for node in ports.items()))
    made = []
    for name, port in ports.items():
        folder = tmp_path / name
        folder.mkdir()
        config = f"name = '{name}'\n" + CONFIG.format(folder=folder) + PEERS.format(port=port, list=nodes)
        (folder / "node.toml").write_text(config)
        made.append(Daemon(folder, start_node(folder / "node.toml")))
    left, right = made
    yield left, right
    left.kill()
    right.kill()


class Session:
    """Chunks of one prompt, and the bytes that they have."""

    def __init__(self, site: Daemon, chunks: int) -> None:
        self.node = forebay.Node(site.socket)
        self.ids = forebay.chunk_ids(NAMESPACE, list(range(64 * chunks)), 64)
        self.data = [random.Random(n).randbytes(LAYERS * LAYER_BYTES) for n in range(chunks)]
        for n, data in enumerate(self.data):
            memory = self.node.register_memory(bytearray(data))
            assert self.node.store(self.ids[n], self.ids[n - 1] if n else None, layers(memory.address)).wait()

    def places(self) -> list[str]:
        return [place for _, _, place, _ in self.node.list_chunks(self.ids)]

    def loads(self, chunk: int) -> bytes:
        target = bytearray(LAYERS * LAYER_BYTES)
        memory = self.node.register_memory(target)
        assert self.node.load(self.node.lease(self.ids), chunk, layers(memory.address)).wait()
        return bytes(target)


def layers(address: int) -> list[list[tuple[int, int, int]]]:
    return [[(address + layer * LAYER_BYTES, LAYER_BYTES, 0)] for layer in range(LAYERS)]


def kv(site: Daemon, verb: str, ids: list[bytes], *more: str) -> list[dict[str, Any]]:
    """What `forebay kv` says of each chunk."""
    keys = ",".join(id.hex() for id in ids)
    command = [binary(), "kv", verb, "--node", str(site.socket), "--keys", keys, "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["verb"] == verb
    chunks: list[dict[str, Any]] = said["chunks"]
    return chunks


def verdicts(chunks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(chunk["verdict"], chunk["reason"]) for chunk in chunks]


def test_a_session_that_pauses_leaves_memory_and_is_back_before_it_is_asked_for(site: Daemon) -> None:
    session = Session(site, 6)
    assert session.places() == ["memory"] * 6

    def demoted() -> bool:
        kv(site, "demote", session.ids)
        return session.places() == ["disk"] * 6

    until(demoted)
    assert verdicts(kv(site, "prefetch", session.ids)) == [("accepted", "none")] * 6
    until(lambda: session.places() == ["memory"] * 6)
    assert [session.loads(n) for n in range(6)] == session.data


def test_what_is_forgotten_is_in_no_byte_of_the_disk_and_nobody_finds_it(site: Daemon) -> None:
    session = Session(site, 4)
    log = site.folder / "log"
    marks = [data[4096:4160] for data in session.data]
    until(lambda: all(mark in log.read_bytes() for mark in marks))
    assert verdicts(session_reports(session.node.forget(session.ids[2:]))) == [("accepted", "none")] * 2
    assert session.places()[2:] == ["nowhere"] * 2 and session.node.lookup(session.ids) == 2
    until(lambda: not any(mark in log.read_bytes() for mark in marks[2:]))
    assert all(mark in log.read_bytes() for mark in marks[:2]), "the others stay"
    assert [session.loads(n) for n in range(2)] == session.data[:2]
    assert verdicts(kv(site, "forget", session.ids[2:])) == [("rejected", "not_stored")] * 2


def test_what_one_node_forgets_is_in_no_byte_of_its_peers_disk(pair: tuple[Daemon, Daemon]) -> None:
    left, right = pair
    session, log = Session(left, 4), left.folder / "log"
    marks = [data[4096:4160] for data in session.data]
    until(lambda: all(mark in log.read_bytes() for mark in marks))
    until(lambda: forebay.Node(right.socket).lookup(session.ids) == 4)
    assert verdicts(kv(right, "forget", session.ids[2:])) == [("accepted", "none")] * 2
    assert session.places() == ["memory"] * 2 + ["nowhere"] * 2
    until(lambda: not any(mark in log.read_bytes() for mark in marks[2:]))
    assert all(mark in log.read_bytes() for mark in marks[:2]), "the others stay"
    left.kill()
    assert verdicts(kv(right, "forget", session.ids)) == [("clipped", "peers_unreached")] * 4


def session_reports(reports: list[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    """The answers of `forebay.Node` as `forebay kv` writes them."""
    return [{"verdict": verdict, "reason": reason} for verdict, reason, _, _ in reports]


def test_a_pin_has_a_time_and_a_budget_and_is_told(site: Daemon) -> None:
    session = Session(site, 6)
    pinned = kv(site, "pin", session.ids, "--ttl", "60")
    assert verdicts(pinned) == [("accepted", "none")] * 6
    assert all(50_000 < chunk["pinned_ms"] <= 60_000 for chunk in pinned)
    demoted = verdicts(kv(site, "demote", session.ids[-1:]))
    assert demoted in ([("rejected", "pinned")], [("clipped", "not_on_disk")]), "it may not be on disk yet"
    ((verdict, reason, _, left_ms),) = session.node.pin(session.ids[:1], ttl_ms=10**15)
    assert (verdict, reason) == ("clipped", "ttl_cut") and left_ms <= 24 * 3_600_000
    assert verdicts(kv(site, "unpin", session.ids))[1:] == [("accepted", "none")] * 5
    # A quarter of 32 MiB is the budget of a tenant.
    many = Session(site, 40)
    said = session_reports(many.node.pin(many.ids, ttl_ms=60_000))
    assert ("clipped", "over_budget") in verdicts(said)


def test_chunks_that_nobody_stored_are_rejected_and_a_wrong_id_is_told(site: Daemon) -> None:
    ids = forebay.chunk_ids(NAMESPACE, list(range(128)), 64)
    for verb in ("pin", "unpin", "prefetch", "demote", "forget"):
        assert verdicts(kv(site, verb, ids)) == [("rejected", "not_stored")] * 2, verb
    assert [chunk["place"] for chunk in kv(site, "list", ids)] == ["nowhere"] * 2
    command = [binary(), "kv", "list", "--node", str(site.socket), "--keys", "12ab"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "64 hexadecimal digits" in done.stderr, done.stderr


def test_a_prompt_of_an_engine_is_named_by_its_tokens_for_its_tenant_alone(site: Daemon) -> None:
    session = Session(site, 3)
    fields = FIELDS
    key, tokens = forebay.namespace_key(fields), list(range(64 * 3 + 5))
    file = site.folder / "prompt.json"
    file.write_text(json.dumps({"count": len(tokens), "tokens": tokens}))

    def said(verb: str, *more: str) -> subprocess.CompletedProcess[str]:
        asked = ["--node", str(site.socket), "--prompt-file", str(file), "--json", *more]
        return subprocess.run([binary(), "kv", verb, *asked], capture_output=True, text=True, timeout=60)

    assert "no engine of tenant 0 has told this node how it names chunks" in said("list").stderr
    assert session.node.prompt_ids(tokens) == []
    session.node.describe(fields, 64)
    session.node.describe(fields | {"dtype": "float32"}, 64)
    until(lambda: said("list").returncode == 0)
    ids = forebay.chunk_ids(key, tokens, 64)
    until(lambda: len(session.node.prompt_ids(tokens)) == 2)
    assert ids in session.node.prompt_ids(tokens) and session.node.prompt_ids([1, 2]) == [[], []]
    assert session.node.for_tenant(7).prompt_ids(tokens) == []
    memory = session.node.register_memory(bytearray(session.data[0]))
    assert session.node.store(ids[0], None, layers(memory.address)).wait()
    until(lambda: len(json.loads(said("list").stdout)["chunks"]) == 6)
    chunks = {one["id"]: one["place"] for one in json.loads(said("list").stdout)["chunks"]}
    assert [chunks[id.hex()] for id in ids] == ["memory", "nowhere", "nowhere"]
    assert "no engine of tenant 7" in said("list", "--tenant", "7").stderr
    gone = json.loads(said("forget").stdout)["chunks"]
    assert {one["id"]: one["verdict"] for one in gone}[ids[0].hex()] == "accepted"
    assert json.loads(said("list").stdout)["chunks"][0]["place"] == "nowhere"
    file.write_text("[1, 2]")
    assert "--prompt-file: 2 tokens are less than a chunk" in said("pin").stderr
    file.write_text('{"prompt": "a"}')
    assert "allowed is a JSON list of numbers" in said("pin").stderr
