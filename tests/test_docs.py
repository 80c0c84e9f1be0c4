"""The documents: what their links and tables name is there, and what they say to paste works.

A block that begins with ```sh run is pasted here, block after block of a page into one shell, in an
empty folder. A command that serves (`forebay node`, `engine`, `route`, `epp`) is one that a reader gives a
terminal of its own: it is started in the background, and ends with the page.
"""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from processes import binary

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("*.md"))
FENCE = re.compile(r"^```(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SECTION = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COLUMNS = 100
SERVER = re.compile(r"^forebay (node|engine|route|epp)\b(?!.*--check-config)(?!.*&\s*$)", re.DOTALL)
PASTE_S = 240
# SIOCSIFFLAGS with IFF_UP: a new network namespace has its loopback down.
LOOPBACK = (
    "python3 -c 'import fcntl, socket, struct;"
    ' fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))\''
)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = [link for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


def sections(page: Path) -> set[str]:
    """What links call the sections of a page."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_a_section_that_a_page_links_to_is_there(page: Path) -> None:
    links = SECTION.findall(FENCE.sub("", page.read_text()))
    missing = [
        (file, name) for file, name in links if name not in sections(page.parent / file if file else page)
    ]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_lines_of_prose_end_at_100_columns(page: Path) -> None:
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text()).split("\n")
    long = [
        number
        for number, line in enumerate(prose, 1)
        # Tables cannot be broken, nor can a link or a path without a space.
        if len(line) > COLUMNS
        and not line.lstrip().startswith("|")
        and not line.startswith("    ")
        and " " in line[:COLUMNS].strip()
    ]
    assert not long, f"{page.name}: lines {long}"


def test_the_readme_and_the_glossary_stay_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 120
    words = re.findall(r"^\| (?!word )", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(words) <= 30


def commands(block: str) -> list[str]:
    """The commands of a block: lines that end with a backslash, and here-documents, go on."""
    found, lines = [], iter(block.splitlines())
    for line in lines:
        while line.endswith("\\"):
            line += "\n" + next(lines)
        if here := re.search(r"<<'?(\w+)'?", line):
            for more in lines:
                line += "\n" + more
                if more == here[1]:
                    break
        if line.strip() and not line.startswith("#"):
            found.append(line)
    return found


def script(blocks: list[str]) -> str:
    """A script of bash that does what a reader of the blocks would do."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    for number, command in enumerate(one for block in blocks for one in commands(block)):
        if SERVER.match(command):
            said = f"said.{number}"
            # It says its first line when it can be used.
            lines += [
                f"( exec {command.split(' #')[0]} ) > {said} 2>&1 &",
                f"until [ -s {said} ]; do sleep 0.1; done",
            ]
            lines += [f"sleep 0.5; kill -0 $! || {{ cat {said}; exit 1; }}"]
        else:
            lines.append(command)
    return "\n".join(lines)


RUN = [
    (page, blocks)
    for page in PAGES
    if (
        blocks := [
            fence[2] for fence in FENCE.finditer(page.read_text()) if fence[1].split() == ["sh", "run"]
        ]
    )
]


@pytest.mark.parametrize(("page", "blocks"), RUN, ids=[ids(page) for page, _ in RUN])
def test_what_a_page_says_to_paste_works(page: Path, blocks: list[str], tmp_path: Path) -> None:
    for folder in ("bin", "mnt/nvme0", "here"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bin/forebay").symlink_to(Path(binary()).absolute())
    page_script, disk = tmp_path / "page.sh", shlex.quote(str(tmp_path / "mnt"))
    page_script.write_text(script(blocks))
    # Where the reader has a disk, and ports that nobody else uses.
    inner = f"mount --bind {disk} /mnt && {LOOPBACK} && exec bash {shlex.quote(str(page_script))}"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    spaces = ["unshare", "--mount", "--net", *user]
    command = [*spaces, "--pid", "--fork", "--kill-child", "bash", "-c", inner]
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    if subprocess.run([*spaces, "true"], capture_output=True).returncode:
        pytest.skip("SKIPPED: no namespaces may be made here")
    process = subprocess.Popen(
        command, cwd=tmp_path / "here", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=PASTE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
        pytest.fail(f"{page.name} did not end within {PASTE_S} s:\n{said}")
    assert process.returncode == 0, f"{page.name}:\n{said}"


def test_there_are_pages_that_are_pasted() -> None:
    assert len(RUN) >= 4


def test_the_code_map_names_files_that_are_there() -> None:
    text = (ROOT / "docs/code-map.md").read_text()
    named = set(re.findall(r"`((?:crates|python|tools|docs)/[\w./-]+)`", text))
    assert len(named) > 30
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"the code map names {missing}"
