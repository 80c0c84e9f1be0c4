"""The wheel in a fresh environment, without a network: what is in it, and that all of it runs.

Knows where `make wheel` leaves it. What its Python does is tested elsewhere.
"""

import json
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import TIMEOUT_S, kill, line_of

ROOT = Path(__file__).parents[1]
WHEELS = sorted(ROOT.glob("target/wheels/forebay-*.whl"))
# As CI builds it; linking it in whole takes minutes, and makes it a tenth smaller. Decision 042
# says of what.
LARGEST_BYTES = 19 << 20
# What every glibc has, beside the unwinder of GCC, which programs of C++ bring too.
SYSTEM = {"libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1"}
LINKER = re.compile(r"ld-linux-(x86-64|aarch64)\.so\.[12]")

pytestmark = pytest.mark.skipif(not WHEELS, reason="SKIPPED: no wheel: `make wheel`")


@dataclass
class Installed:
    """An environment that has the wheel and nothing else."""

    folder: Path

    @property
    def program(self) -> str:
        return str(self.folder / "bin/forebay")

    @property
    def library(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages/forebay/lib/libforebay_preload.so")
        return found

    def run(self, *arguments: str) -> tuple[int, str, str]:
        command = [self.program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*pip, WHEELS[-1]], check=True)
    return Installed(folder)


def test_the_wheel_is_small() -> None:
    size = WHEELS[-1].stat().st_size
    print(f"{WHEELS[-1].name}: {size / (1 << 20):.1f} MiB")
    assert size <= LARGEST_BYTES


def needs(file: Path) -> tuple[set[str], set[str]]:
    """The libraries and the versions of glibc's symbols that an ELF file needs."""
    said = subprocess.run(["objdump", "-p", file], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"^\s*NEEDED\s+(\S+)$", said, re.MULTILINE)
    return set(libraries), set(re.findall(r"\bGLIBC_([\d.]+)$", said, re.MULTILINE))


def version(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


def test_what_the_wheel_carries_runs_with_the_glibc_of_its_name_and_of_the_docs(tmp_path: Path) -> None:
    tagged = re.search(r"[-.]manylinux_(\d+)_(\d+)_", WHEELS[-1].name)
    if tagged is None:
        pytest.skip(
            "SKIPPED: without zig the wheel needs the glibc of this machine; tests/requirements-zig.txt"
        )
    least = f"{tagged[1]}.{tagged[2]}"
    page = (ROOT / "docs/install.md").read_text()
    assert f"glibc {least} or later" in page and WHEELS[-1].name in page
    with zipfile.ZipFile(WHEELS[-1]) as wheel:
        names = [name for name in wheel.namelist() if wheel.open(name).read(4) == b"\x7fELF"]
        files = {Path(name).name: Path(wheel.extract(name, tmp_path)) for name in names}
    assert {"forebay", "libforebay_preload.so", "libforebay_cuda.so", "_forebay.abi3.so"} == files.keys()
    for name, file in files.items():
        libraries, versions = needs(file)
        others = {library for library in libraries - SYSTEM if not LINKER.fullmatch(library)}
        assert not others and versions, f"{name} needs {others}"
        late = [needed for needed in versions if version(needed) > version(least)]
        assert not late, f"{name} needs glibc {late}"


def test_the_program_says_the_version_of_the_package(installed: Installed) -> None:
    named = WHEELS[-1].name.split("-")[1]
    assert installed.run("--version") == (0, f"forebay {named}\n", "")
    module = [installed.folder / "bin/python", "-m", "forebay", "--version"]
    assert subprocess.run(module, capture_output=True, text=True).stdout == f"forebay {named}\n"


def test_a_program_that_is_not_there_is_said(installed: Installed) -> None:
    script = "import forebay.__main__ as m; m.PROGRAM = m.PROGRAM.with_name('none'); m.main()"
    command = [installed.folder / "bin/python", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and re.fullmatch(r"forebay: \S+/none: No such file.*\n", done.stderr)


def test_the_doctor_finds_no_fault_in_it(installed: Installed, tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    code, told, error = installed.run("doctor", "--node", str(tmp_path / "node.sock"), "--json", str(seen))
    found = {each["check"]: each["severity"] for each in json.loads(seen.read_text())["findings"]}
    assert (found["package"], found["glibc"], found["node"]) == ("ok", "ok", "note"), told + error
    assert found["vllm"] == "warning" and code in (1, 2), "this environment has no vLLM"


CLIENT = """
import sys, forebay
node = forebay.Node(sys.argv[1])
data = bytearray(range(256)) * 64
memory, copy = node.register_memory(data), node.register_memory(target := bytearray(len(data)))
(id,) = forebay.chunk_ids(bytes(32), list(range(64)), 64)
assert node.store(id, None, [[(memory.address, len(data), 0)]]).wait()
lease = node.lease([id])
assert node.load(lease, 0, [[(copy.address, len(data), 0)]]).wait() and target == data
"""


@pytest.fixture
def node(installed: Installed, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [installed.program, "node", "--memory", "64MiB", "--socket", str(tmp_path / "node.sock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "67108864 bytes behind" in line_of(process)
    yield process
    kill(process)


def test_a_node_without_a_file_keeps_what_a_client_stores_and_ends_as_it_is_told(
    installed: Installed, node: subprocess.Popen[str], tmp_path: Path
) -> None:
    command = [installed.folder / "bin/python", "-c", CLIENT, tmp_path / "node.sock"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    # The script has become the program: a signal to it reaches the node, whose code is the
    # script's.
    node.send_signal(signal.SIGTERM)
    assert "ending" in line_of(node) and "ended, 0 leases" in line_of(node)
    assert node.wait(TIMEOUT_S) == 0


def test_a_program_is_run_with_the_library_of_the_wheel(installed: Installed) -> None:
    code, said, error = installed.run(
        "run", "--stats", "--", "sh", "-c", "echo $LD_PRELOAD $FOREBAY_PRELOAD; exit 7"
    )
    assert (code, said.split(), error) == (7, [str(installed.library.resolve()), "stats"], "")


def test_the_copying_library_lies_beside_it(installed: Installed) -> None:
    library = installed.library.with_name("libforebay_cuda.so")
    script = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).forebay_copy_open(None, None, -1) or 0)"
    subprocess.run([installed.folder / "bin/python", "-c", script, library], check=True)


@pytest.mark.parametrize("size", ["8", "8388608"])
def test_a_thread_that_is_cancelled_within_a_copy_ends(
    installed: Installed, tmp_path: Path, size: str
) -> None:
    source = ROOT / "crates/preload/tests/c/cancelled.c"
    compiler = ["cc", "-fexceptions", "-fPIC", source, "-pthread", "-o"]
    driver, program = tmp_path / "libcuda.so.1", tmp_path / "cancelled"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run([*compiler, driver, "-DDRIVER", "-shared", soname], check=True)
    subprocess.run([*compiler, program, driver, f"-Wl,-rpath,{tmp_path}"], check=True)
    assert installed.run("run", str(program), size) == (0, "cleaned up\ncancelled\n", "")
