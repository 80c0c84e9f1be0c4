"""A node with memory and a log on the SSD, for SGLang's pages. Knows how a node's file says so."""

import signal
import subprocess
import urllib.request
from pathlib import Path

from processes import free_port, kill, start_node, until


class Node:
    """A node, started when it is made. What it has in its log stays there when it ends."""

    def __init__(
        self, folder: Path, memory: str = "256MiB", disk: str = "512MiB", page: str = "1MiB"
    ) -> None:
        """`page` is the largest page that it takes."""
        self.socket, self.log = folder / "node.sock", folder / "node.log"
        self.config = folder / "node.toml"
        self.metrics_at = f"127.0.0.1:{free_port()}"
        self.config.write_text(
            f"socket = '{self.socket}'\nwrite_back = 'all'\n"
            f"[metrics]\nlisten = '{self.metrics_at}'\n"
            f"[memory]\nsize = '{memory}'\nlargest_chunk = '{page}'\novercommit = true\n"
            f"[[ssd]]\npath = '{self.log}'\nsize = '{disk}'\n"
        )
        self.process: subprocess.Popen[str] = start_node(self.config)

    def metric(self, name: str) -> float:
        """The sum over all lines whose name and labels begin like this."""
        with urllib.request.urlopen(f"http://{self.metrics_at}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def written(self, pages: float) -> None:
        """Waits until so many pages are in the log to stay."""
        until(lambda: self.metric('forebay_chunks{tier="disk"') >= pages)
        until(lambda: self.metric("forebay_disk_pending_records") == 0)

    def restart(self) -> None:
        """Ends it well and starts it again: its memory is empty, its log is not. Clients come back."""
        clients = self.metric("forebay_clients{")
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.process = start_node(self.config)
        until(lambda: self.metric("forebay_clients{") >= clients)

    def kill(self) -> None:
        """As a machine dies."""
        kill(self.process)
