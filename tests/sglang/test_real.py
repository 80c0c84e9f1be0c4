"""SGLang's own server with HiCache, whose pages a real node keeps: its tokens are those of a server without.

SGLang's package is the one of PyPI, on the CPU (`testing/sglang_cpu.py` says how). Whether a prompt was
computed or came from the node, SGLang says itself, and the node's counters say it too.
"""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import until
from sglang_node import Node
from sglang_server import HICACHE, PAGE_TOKENS, Said, Server, ours, storage

PYTHON = os.environ.get("FOREBAY_SGLANG_PYTHON", sys.executable)
TINY_MODEL = Path(__file__).parents[1] / "vllm" / "tiny_model.py"


def has_sglang() -> bool:
    """Whether that Python has SGLang and forebay."""
    script = "import importlib.metadata as m, forebay; m.version('sglang')"
    return subprocess.run([PYTHON, "-c", script], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(
    not has_sglang(),
    reason=f"SKIPPED: {PYTHON} has no SGLang or no forebay: `make test-sglang`",
)


def prompt(seed: int, tokens: int) -> list[int]:
    """Tokens that follow from the seed."""
    state, found = seed * 7919 + 1, []
    for _ in range(tokens):
        state = (state * 1103515245 + 12345) % (1 << 31)
        found.append(3 + (state >> 8) % 1000)
    return found


BEGINNING = prompt(3, 512)
PROMPTS = {
    "long": prompt(1, 1000),
    "whole pages": prompt(2, 640),
    "one end": BEGINNING + prompt(4, 200),
    "another end": BEGINNING + prompt(5, 130),
}


def pages(tokens: list[int]) -> int:
    """How many pages of a prompt can come from a cache: its last token is always computed."""
    return (len(tokens) - 1) // PAGE_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([PYTHON, str(TINY_MODEL), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def weights(model: Path) -> str:
    """What `weights_digest` is."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with memory and an SSD."""
    made = Node(tmp_path_factory.mktemp("node"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def servers(
    model: Path, weights: str, node: Node, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """A server without HiCache, and one whose HiCache has the node. Both start at once."""
    folder = tmp_path_factory.mktemp("servers")
    plain = Server(PYTHON, model, folder / "plain.log", ["--disable-radix-cache"])
    options = [*HICACHE, *storage("dynamic", ours(node.socket, weights))]
    stored = Server(PYTHON, model, folder / "stored.log", options)
    try:
        yield plain.wait(), stored.wait()
    finally:
        plain.kill()
        stored.kill()


@pytest.fixture(scope="module")
def right(servers: tuple[Server, Server]) -> dict[str, list[int]]:
    """What the server without HiCache says."""
    said = {name: servers[0].generate(tokens) for name, tokens in PROMPTS.items()}
    assert not any(each.cached for each in said.values())
    return {name: each.tokens for name, each in said.items()}


@pytest.fixture(scope="module")
def stored(servers: tuple[Server, Server], right: dict[str, list[int]], node: Node) -> Server:
    """The server with HiCache, when the node has the pages of all prompts."""
    server = servers[1]
    for name, tokens in PROMPTS.items():
        assert server.generate(tokens).tokens == right[name]
    server.stored(PAGE_TOKENS * each_once())
    assert node.metric("forebay_chunks{") >= each_once()
    return server


def each_once() -> int:
    """The pages of all prompts: of the common beginning once, and whole pages are all stored."""
    every = sum(len(tokens) // PAGE_TOKENS for tokens in PROMPTS.values())
    return every - len(BEGINNING) // PAGE_TOKENS


def ask_all(server: Server) -> dict[str, Said]:
    """All prompts, when SGLang itself has nothing of them."""
    said = {}
    for name, tokens in PROMPTS.items():
        server.flush()
        said[name] = server.generate(tokens)
    return said


def assert_from_storage(said: dict[str, Said], right: dict[str, list[int]]) -> None:
    """Tokens are right, and all that can come from a cache came from the storage."""
    assert {name: each.tokens for name, each in said.items()} == right
    for name, each in said.items():
        assert (each.device, each.host) == (0, 0)
        assert each.storage == PAGE_TOKENS * pages(PROMPTS[name]), name


def test_the_server_is_the_release_that_the_docs_name() -> None:
    page = (Path(__file__).parents[2] / "docs/sglang.md").read_text()
    assert f"SGLang {importlib.metadata.version('sglang')}" in page


def test_prompts_that_come_from_the_node_have_the_right_tokens(
    stored: Server, right: dict[str, list[int]]
) -> None:
    assert_from_storage(ask_all(stored), right)


def test_a_prompt_whose_beginning_is_stored_computes_its_end(
    stored: Server, servers: tuple[Server, Server]
) -> None:
    tokens = BEGINNING + prompt(6, 150)
    stored.flush()
    said = stored.generate(tokens)
    assert said.storage == len(BEGINNING)
    assert said.tokens == servers[0].generate(tokens).tokens


def test_a_node_that_was_started_again_has_them_on_its_ssd(
    stored: Server, right: dict[str, list[int]], node: Node
) -> None:
    node.written(each_once())
    node.restart()
    assert node.metric('forebay_chunks{tier="memory"') == 0
    assert_from_storage(ask_all(stored), right)
    assert node.metric('forebay_disk_bytes_total{direction="read"') > 0


def test_pages_travel_through_tensors_of_their_own_too(
    stored: Server, right: dict[str, list[int]], node: Node, weights: str
) -> None:
    stored.flush()
    stored.detach()
    stored.attach("dynamic", ours(node.socket, weights, interface_v1=0))
    try:
        assert_from_storage(ask_all(stored), right)
    finally:
        stored.flush()
        stored.detach()
        stored.attach("dynamic", ours(node.socket, weights))
    assert_from_storage(ask_all(stored), right)


def test_a_server_with_other_weights_finds_nothing(
    stored: Server, right: dict[str, list[int]], node: Node, weights: str
) -> None:
    stored.flush()
    stored.detach()
    stored.attach("dynamic", ours(node.socket, "ab" * 32))
    try:
        stored.flush()
        said = stored.generate(PROMPTS["long"])
    finally:
        stored.flush()
        stored.detach()
        stored.attach("dynamic", ours(node.socket, weights))
    assert said.cached == 0 and said.tokens == right["long"]


def test_another_server_finds_what_this_one_stored(
    stored: Server, right: dict[str, list[int]], node: Node, model: Path, weights: str, tmp_path: Path
) -> None:
    options = [*HICACHE, *storage("dynamic", ours(node.socket, weights))]
    other = Server(PYTHON, model, tmp_path / "other.log", options)
    try:
        assert_from_storage(ask_all(other.wait()), right)
    finally:
        other.kill()


def test_after_clear_a_server_computes_and_stores_anew(
    stored: Server, right: dict[str, list[int]], node: Node
) -> None:
    stored.flush()
    stored.clear()
    said = stored.generate(PROMPTS["long"])
    assert said.cached == 0 and said.tokens == right["long"]

    def comes_back() -> bool:
        stored.flush()
        said = stored.generate(PROMPTS["long"])
        assert said.tokens == right["long"]
        return said.storage == PAGE_TOKENS * pages(PROMPTS["long"])

    until(comes_back)


def test_without_its_node_a_server_computes(stored: Server, right: dict[str, list[int]], node: Node) -> None:
    node.kill()
    said = ask_all(stored)
    assert {name: each.tokens for name, each in said.items()} == right
    assert not any(each.cached for each in said.values())
