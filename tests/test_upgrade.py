"""Nodes that are replaced while engines read from them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import binary, free_port, kill, line_of, start_node, until
from steady_load import Prompts, Reader

import forebay

TIMEOUT_S = 60.0
# Of each node.
PROMPTS = 6


class Fleet:
    """Three nodes that read from each other. The prompts of each have a beginning of their own."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.folders = [folder / name for name in ("a", "b", "c")]
        ports = [free_port() for _ in self.folders]
        listed = "".join(
            f"[[nodes]]\nname = '{at.name}'\naddress = '127.0.0.1:{port}'\n"
            for at, port in zip(self.folders, ports, strict=True)
        )
        (folder / "nodes.toml").write_text(listed)
        self.nodes: list[subprocess.Popen[str]] = []
        for at, port in zip(self.folders, ports, strict=True):
            at.mkdir()
            (at / "node.toml").write_text(
                f"name = '{at.name}'\nsocket = '{at}/node.sock'\n[memory]\nsize = '32MiB'\n"
                f"largest_chunk = '1MiB'\n[peers]\nlisten = '127.0.0.1:{port}'\n"
                f"[directory]\nfile = '{folder}/nodes.toml'\n"
            )
            self.nodes.append(start_node(at / "node.toml"))
        ends.callback(lambda: [kill(node) for node in self.nodes])

    def socket(self, number: int) -> Path:
        return self.folders[number] / "node.sock"

    def replace(self, number: int) -> None:
        """Another process goes on with a node's memory. Returns when the old one has ended."""
        config = str(self.folders[number] / "node.toml")
        command = [binary(), "--end-with", str(os.getpid()), "node", "--config", config, "--take-over"]
        old, new = self.nodes[number], subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.nodes[number] = new
        assert "forebay node" in line_of(new)
        assert old.wait(TIMEOUT_S) == 0
        kill(old)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as ends:
        yield Fleet(tmp_path, ends)


def test_three_nodes_are_replaced_one_after_the_other_while_engines_read_from_all(fleet: Fleet) -> None:
    prompts = Prompts(PROMPTS, 4, 64 << 10)
    prompts.store(fleet.socket(0))
    whole = sum(map(len, prompts.ids))
    with ExitStack() as ends:
        # The engines at the other two nodes read what the first one has, and their nodes keep it.
        readers = [Reader(fleet.socket(number), prompts, number) for number in range(3)]
        for reader in readers:
            ends.callback(reader.stop)
        until(lambda: all(len(reader.hits) > 50 for reader in readers), TIMEOUT_S)
        for number in range(3):
            before = len(readers[number].hits)
            fleet.replace(number)
            until(lambda at=number, than=before: len(readers[at].hits) > than + 50, TIMEOUT_S)
            assert prompts.found(readers[number].node) == whole
    assert [reader.failed for reader in readers] == [[], [], []]


def test_an_engine_that_is_started_again_finds_what_it_stored_before_its_node_was_replaced(
    fleet: Fleet,
) -> None:
    prompts = Prompts(PROMPTS, 4, 64 << 10)
    prompts.store(fleet.socket(0))
    fleet.replace(0)
    engine = forebay.Node(fleet.socket(0), name="again", wait=True)
    assert prompts.found(engine) == sum(map(len, prompts.ids))
    engine.close()
