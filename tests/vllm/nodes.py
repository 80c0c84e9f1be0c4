"""Nodes in processes of their own, one or two that are peers. Knows how a node's file says so."""

from pathlib import Path

from processes import free_port, kill, start_node


class Node:
    """A node with memory alone. It is started when it is made."""

    def __init__(self, folder: Path, name: str = "node", more: str = "") -> None:
        """`more` are tables of its configuration."""
        self.socket = folder / f"{name}.sock"
        config = folder / f"{name}.toml"
        memory = "[memory]\nsize = '64MiB'\nlargest_chunk = '4MiB'\n"
        config.write_text(f"name = '{name}'\nsocket = '{self.socket}'\n{memory}{more}")
        self.process = start_node(config)

    def kill(self) -> None:
        """As a machine dies."""
        kill(self.process)


def two_peers(folder: Path) -> tuple[Node, Node]:
    """Two nodes, each of which finds chunks of the other."""
    ports = {name: free_port() for name in ("left", "right")}
    directory = folder / "nodes.toml"
    entries = [f"[[nodes]]\nname = '{name}'\naddress = '127.0.0.1:{port}'\n" for name, port in ports.items()]
    directory.write_text("".join(entries))
    left, right = (
        Node(folder, name, f"[peers]\nlisten = '127.0.0.1:{port}'\n[directory]\nfile = '{directory}'\n")
        for name, port in ports.items()
    )
    return left, right
