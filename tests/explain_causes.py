"""Thirteen reasons why a prompt is no hit, each made on real nodes with a real `forebay explain`.

Knows how each comes about and what has to be said of it. `test_explain.py` asks one by one,
`bench/explain.py` counts how many are right. Engines here describe their namespaces and note requests as the
connector does.
"""

import json
import pathlib
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from processes import binary, free_port, kill, start_node, until

import forebay

CHUNK_TOKENS, LAYERS, LAYER_BYTES = 64, 2, 128 << 10
CHUNK_BYTES = LAYERS * LAYER_BYTES
FIELDS: dict[str, Any] = {
    "weights": bytes(32),
    "dtype": "bfloat16",
    "order": "LBHNC",
    "block_tokens": 16,
    "tp": (0, 1),
    "pp": (0, 1),
    "attention": {"kv heads": "8"},
    "lora": None,
    "salt": b"",
}
SSD = "[[ssd]]\npath = '{folder}/log'\nsize = '{size}'\nsegment_size = '16MiB'\n"


class Engine:
    """What an engine says and stores, without an engine."""

    def __init__(self, socket: pathlib.Path, tenant: int = 0, **fields: Any) -> None:
        """`fields` of the namespace; others are labels."""
        self.node = forebay.Node(socket, name="engine", tenant=tenant)
        self.data = bytearray(random.Random(3).randbytes(CHUNK_BYTES))
        self.memory = self.node.register_memory(self.data)
        self.describe(**fields)

    def describe(self, **fields: Any) -> None:
        """Says what it computes with from now on."""
        named = FIELDS | {name: value for name, value in fields.items() if name in FIELDS}
        labels = {name: str(value) for name, value in fields.items() if name not in FIELDS}
        self.node.describe(named, CHUNK_TOKENS, labels)
        self.key = forebay.namespace_key(named)

    def ids(self, tokens: list[int]) -> list[bytes]:
        return forebay.chunk_ids(self.key, tokens, CHUNK_TOKENS)

    @property
    def layers(self) -> list[list[tuple[int, int, int]]]:
        return [[(self.memory.address + at * LAYER_BYTES, LAYER_BYTES, 0)] for at in range(LAYERS)]

    def store(self, tokens: list[int]) -> list[bytes]:
        """Stores a prompt's whole chunks."""
        ids = self.ids(tokens)
        self.node.used(ids, CHUNK_BYTES)
        for parent, id in zip([None, *ids], ids, strict=False):
            assert self.node.store(id, parent, self.layers).wait()
        return ids

    def push_out(self, ids: list[bytes]) -> None:
        """Stores other prompts until these chunks have left all tiers."""
        others = (prompt(1000 + number) for number in range(2000))
        while self.node.lookup(ids[-1:]):
            self.store(next(others))


@dataclass
class Place:
    """A node, and what is asked there."""

    folder: pathlib.Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def socket(self) -> pathlib.Path:
        return self.folder / "node.sock"

    def start(self, before: str = "", after: str = "", size: str = "512MiB") -> "Place":
        """A node with 16 MiB of memory. `before` and `after` are lines of its configuration."""
        config = self.folder / "node.toml"
        memory = "[memory]\nsize = '16MiB'\nlargest_chunk = '1MiB'\n"
        after = after.format(folder=self.folder, size=size)
        config.write_text(f"name = 'left'\nsocket = '{self.socket}'\n{before}\n{memory}{after}\n")
        self.processes.append(start_node(config))
        return self

    def explain(self, *arguments: str, tokens: list[int] | None = None) -> dict[str, Any]:
        """What `forebay explain` says, as JSON."""
        command = [binary(), "explain", "--node", str(self.socket), "--json", *arguments]
        if tokens is not None:
            (self.folder / "tokens.json").write_text(json.dumps(tokens))
            command += ["--tokens", str(self.folder / "tokens.json")]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert said.returncode == 0, said.stderr
        found: dict[str, Any] = json.loads(said.stdout)
        return found

    def verdict(self, *arguments: str, tokens: list[int] | None = None) -> dict[str, Any]:
        verdict: dict[str, Any] = self.explain(*arguments, tokens=tokens)["verdict"]
        return verdict


@contextmanager
def place() -> Iterator[Place]:
    """A folder for a node, which ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Place(pathlib.Path(folder))
        try:
            yield made
        finally:
            for process in made.processes:
                kill(process)


def prompt(seed: int, chunks: int = 4) -> list[int]:
    """Tokens that no other seed has."""
    return random.Random(seed).choices(range(50_000), k=chunks * CHUNK_TOKENS)


Verdict = dict[str, Any]


def never_stored(at: Place) -> Verdict:
    """Nobody has sent it before."""
    Engine(at.start().socket).store(prompt(1))
    return at.verdict(tokens=prompt(2))


def shorter_than_a_chunk(at: Place) -> Verdict:
    """It has 63 tokens."""
    Engine(at.start().socket).store(prompt(1))
    return at.verdict(tokens=prompt(1)[: CHUNK_TOKENS - 1])


def other_namespace(at: Place) -> Verdict:
    """An engine with another format of KV has stored it."""
    stored, asked = Engine(at.start().socket, dtype="fp8_e4m3"), Engine(at.socket)
    stored.store(prompt(1))
    verdict = at.verdict("--namespace", "dtype=bfloat16", tokens=prompt(1))
    assert [one["field"] for one in verdict["differences"]] == ["dtype"] and asked.node.is_connected
    return verdict


def other_model(at: Place) -> Verdict:
    """An engine with another revision of the model has stored it."""
    stored = Engine(at.start().socket, weights=bytes([1] * 32), model="llama", revision="v2")
    asked = Engine(at.socket, model="llama", revision="v1")
    stored.store(prompt(1))
    verdict = at.verdict("--namespace", "revision=v1", tokens=prompt(1))
    assert "revision is v1 here and v2 there" in verdict["text"] and asked.node.is_connected
    return verdict


def other_tenant(at: Place) -> Verdict:
    """An engine of another tenant has stored it."""
    stored, asked = Engine(at.start().socket, tenant=7, salt=b"seven"), Engine(at.socket)
    stored.store(prompt(1))
    verdict = at.verdict("--namespace", "tenant=0", tokens=prompt(1))
    assert "tenant is 0 here and 7 there" in verdict["text"] and asked.node.is_connected
    return verdict


def evicted_from_memory(at: Place) -> Verdict:
    """Others needed its room, and there is no SSD."""
    engine = Engine(at.start().socket)
    engine.push_out(engine.store(prompt(1)))
    return at.verdict(tokens=prompt(1))


def evicted_from_ssd(at: Place) -> Verdict:
    """Others needed its room in both tiers."""
    engine = Engine(at.start("write_back = 'all'", SSD, size="128MiB").socket)
    engine.push_out(engine.store(prompt(1)))
    return at.verdict(tokens=prompt(1))


def not_admitted(at: Place) -> Verdict:
    """It was used once, and left memory."""
    engine = Engine(at.start("write_back = 'second-hit'", SSD).socket)
    engine.push_out(engine.store(prompt(1)))
    return at.verdict(tokens=prompt(1))


def computing_is_faster(at: Place) -> Verdict:
    """The engine says that it chose to compute."""
    engine = Engine(at.start().socket)
    engine.store(prompt(1))
    engine.node.note_outcome(
        "cmpl-7-0", "computing_is_faster", prompt_tokens=256, found=(4, 0, 0), loaded_tokens=0
    )
    return at.verdict("--request", "cmpl-7", tokens=prompt(1))


def peer_unreached(at: Place) -> Verdict:
    """Another node is not reached."""
    listen, nobody = free_port(), free_port()
    (at.folder / "nodes.toml").write_text(
        f"[[nodes]]\nname = 'left'\naddress = '127.0.0.1:{listen}'\n"
        f"[[nodes]]\nname = 'right'\naddress = '127.0.0.1:{nobody}'\n"
    )
    after = f"[peers]\nlisten = '127.0.0.1:{listen}'\n[directory]\nfile = '{{folder}}/nodes.toml'\n"
    engine = Engine(at.start(after=after).socket)

    def looked() -> bool:
        engine.node.lookup(engine.ids(prompt(1)))
        return any(peer["unreached"] for peer in at.explain(tokens=prompt(1))["facts"]["peers"])

    until(looked)
    verdict = at.verdict(tokens=prompt(1))
    assert "right (refused" in verdict["text"], verdict["text"]
    return verdict


def reset(at: Place) -> Verdict:
    """The engine has reset its cache since."""
    engine = Engine(at.start().socket, resets=0)
    engine.store(prompt(1))
    engine.describe(salt=b"another", resets=1)
    return at.verdict(tokens=prompt(1))


def corrupt(at: Place) -> Verdict:
    """Bytes on the SSD have changed."""
    engine = Engine(at.start("write_back = 'all'", SSD).socket)
    ids = engine.store(prompt(1))
    others = (prompt(1000 + number) for number in range(100))
    while engine.node.find([ids[:1]]).wait(60) != (0, 1, 0):
        engine.store(next(others))
    log = at.folder / "log"
    data, part = log.read_bytes(), bytes(engine.data[:64])
    with log.open("r+b") as file:
        start = data.find(part)
        while start >= 0:
            file.seek(start)
            file.write(bytes(byte ^ 255 for byte in part))
            start = data.find(part, start + 1)
    lease = engine.node.lease(ids[:1])
    assert not engine.node.load(lease, 0, engine.layers).wait(), "its bytes are others"
    return at.verdict(tokens=prompt(1)[:CHUNK_TOKENS])


def diverges(at: Place) -> Verdict:
    """Its third chunk begins as one that is stored, and goes on otherwise."""
    Engine(at.start().socket).store(prompt(1))
    verdict = at.verdict(tokens=prompt(1)[: 2 * CHUNK_TOKENS + 10] + prompt(2))
    assert verdict["chunk"] == 2 and "the first token that differs is in chunk 2" in verdict["text"]
    return verdict


# What is to be said of each.
CAUSES: dict[str, Callable[[Place], Verdict]] = {
    "never_stored": never_stored,
    "shorter_than_a_chunk": shorter_than_a_chunk,
    "other_namespace": other_namespace,
    "other_model": other_model,
    "other_tenant": other_tenant,
    "evicted_from_memory": evicted_from_memory,
    "evicted_from_ssd": evicted_from_ssd,
    "not_admitted": not_admitted,
    "computing_is_faster": computing_is_faster,
    "peer_unreached": peer_unreached,
    "reset": reset,
    "corrupt": corrupt,
    "diverges": diverges,
}
