#!/usr/bin/env python3
"""How long it takes from a wheel to a warm hit, by the commands of docs/install.md.

    bench/install.py --vllm-python PYTHON --model FOLDER [--json FILE] [-- OPTIONS OF vllm serve]

A fresh environment that sees the vLLM of PYTHON gets the wheel of `make wheel`. The page's commands are run
in it with the model in place of MODEL, from `pip install` to the second answer, which has to come from the
node. vLLM's own installation and the model's download are not counted.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_engine import free_port, results, row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/install.md"
SECTION = re.compile(r"^## Three commands to a warm hit\n.*?^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What each figure may be at most.
MOST = {"install.wheel_mib": 12.0, "install.commands": 3.0, "install.seconds_to_warm_hit": 180.0}


def show_vllm(programs: Path, python: Path) -> None:
    """Puts the packages of vLLM's environment behind those of this one."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = [programs / "python", python]
    mine, theirs = (subprocess.check_output([each, "-c", ask], text=True).strip() for each in asked)
    (Path(mine) / "vllm.pth").write_text(theirs + "\n")


def warm_hit(commands: list[str], programs: Path, wheel: Path, args: argparse.Namespace) -> float:
    """Seconds from the first command to the second answer."""
    model = str(args.model)
    begun = time.monotonic()
    install = [programs / "pip", "install", "-q", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True)
    show_vllm(programs, args.vllm_python)
    port = free_port()
    program, *words = shlex.split(commands[1].replace("MODEL", model))
    serve = [programs / program, *words, "--port", str(port), *args.options]
    with subprocess.Popen(serve, stdout=sys.stderr) as served:
        try:
            asks = commands[2].replace("MODEL", model).replace("localhost:8000", f"localhost:{port}")
            said = subprocess.check_output(["bash", "-c", asks], text=True)
            seconds = time.monotonic() - begun
        finally:
            served.terminate()
    cached = [int(number) for number in re.findall(r'"cached_tokens":\s*(\d+)', said)]
    if not cached or not cached[-1]:
        sys.exit(f"the second answer has no cached tokens: {said}")
    print(f"{cached[-1]} tokens of the second prompt came from the node")
    return seconds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    (wheel,) = ROOT.glob("target/wheels/forebay-*.whl")
    commands = SECTION.findall(PAGE.read_text())[0].strip().split("\n\n")
    with TemporaryDirectory() as folder:
        subprocess.run([args.vllm_python, "-m", "venv", folder], check=True)
        seconds = warm_hit(commands, Path(folder) / "bin", wheel, args)
    rows = [
        row("install.wheel_mib", "MiB", [wheel.stat().st_size / (1 << 20)]),
        row("install.commands", "commands", [float(len(commands))]),
        row("install.seconds_to_warm_hit", "s", [seconds]),
    ]
    for each in rows:
        print(f"{each['name']}: {each['value']:.1f} {each['unit']}, at most {MOST[each['name']]:.0f}")
    if args.json:
        args.json.write_text(json.dumps(results("install", [], None, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
