"""`forebay top` in a terminal of 80 by 24, and as text.

Knows what the command sends to a terminal. What a frame says is tested where frames are made.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import TIMEOUT_S, binary, free_port, kill, line_of, start_node, until

ENTER, LEAVE, HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"
NODE_TOML = """name = "left"
socket = "{folder}/left.sock"
[memory]
size = "16MiB"
[metrics]
listen = "127.0.0.1:{port}"
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[str]:
    """The address of a node's metrics."""
    port = free_port()
    config = tmp_path / "left.toml"
    config.write_text(NODE_TOML.format(folder=tmp_path, port=port))
    process = start_node(config)
    yield f"127.0.0.1:{port}"
    kill(process)


class Terminal:
    """A terminal in which `forebay top` runs."""

    def __init__(self, *arguments: str) -> None:
        self.outer, self.inner = pty.openpty()
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.mode = termios.tcgetattr(self.inner)
        command = [binary(), "top", *arguments]
        self.process = subprocess.Popen(command, stdin=self.inner, stdout=self.inner)
        self.shown = ""

    def read(self) -> None:
        while select.select([self.outer], [], [], 0.05)[0]:
            self.shown += os.read(self.outer, 65536).decode()

    def frames(self) -> list[list[str]]:
        """What was shown in full."""
        self.read()
        frames = [frame for frame in self.shown.split(HOME)[1:] if END_OF_SCREEN in frame]
        whole = [frame.split(END_OF_SCREEN)[0].replace(END_OF_LINE, "") for frame in frames]
        # The terminal makes two of a carriage return before a new line.
        return [frame.replace("\r", "").split("\n") for frame in whole]

    def end(self, how: bytes | signal.Signals) -> int:
        """The exit code after a key or a signal."""
        if isinstance(how, bytes):
            os.write(self.outer, how)
        else:
            self.process.send_signal(how)
        code = self.process.wait(TIMEOUT_S)
        self.read()
        return code

    def close(self) -> None:
        kill(self.process)
        os.close(self.outer)
        os.close(self.inner)


@pytest.mark.parametrize("how", [b"q", b"\x03", signal.SIGTERM, signal.SIGINT])
def test_frames_fit_the_terminal_which_is_as_before_after_a_key_or_a_signal(
    node: str, how: bytes | signal.Signals
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    terminal = Terminal(*[node, gone] * 5)
    try:
        until(lambda: len(terminal.frames()) >= 3)
        for frame in terminal.frames():
            assert len(frame) <= 24 and all(len(line) <= 80 for line in frame), frame
        last = terminal.frames()[-1]
        assert any(line.startswith(f"node {node}") for line in last), last
        assert any(line.startswith(f"{gone}   no answer: ") for line in last), last
        assert "more lines: a taller window shows them" in last[-1]
        assert termios.tcgetattr(terminal.inner) != terminal.mode
        begin = time.monotonic()
        assert terminal.end(how) == 0
        assert time.monotonic() - begin < 10, "it does not wait for the next second"
        assert terminal.shown.startswith(ENTER) and terminal.shown.endswith(LEAVE)
        assert termios.tcgetattr(terminal.inner) == terminal.mode
    finally:
        terminal.close()


def test_once_prints_one_frame_of_all_that_answer_and_says_who_does_not(node: str) -> None:
    port, gone = free_port(), f"127.0.0.1:{free_port()}"
    options = ["--listen", f"127.0.0.1:{port}", "--backend", f"e0=http://{gone}"]
    command = [binary(), "--end-with", str(os.getpid()), "route", *options]
    router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert line_of(router)
        addresses = [f"127.0.0.1:{port}", node, gone]
        ended = subprocess.run(
            [binary(), "top", "--once", *addresses], capture_output=True, text=True, timeout=60
        )
    finally:
        kill(router)
    assert (ended.returncode, ended.stderr) == (0, "")
    shown = ended.stdout
    for text in (f"router 127.0.0.1:{port}", "  e0 ", f"node {node}", "  memory ", f"{gone}   no answer: "):
        assert f"\n{text}" in shown, shown
    assert "\x1b" not in shown


def test_without_a_terminal_it_says_what_to_do() -> None:
    ended = subprocess.run(
        [binary(), "top"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert ended.returncode == 1
    assert "--once prints one frame without one" in ended.stderr
