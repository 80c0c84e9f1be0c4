#!/usr/bin/env python3
"""Gathers what is given to others: `dist.py --out DIR`, after `make wheel`.

In DIR are the wheel, a tarball with the program, its libraries and the service's files, what both are made
of as a CycloneDX document, and the SHA-256 sums of all. The same inputs give the same bytes. It knows what
`make wheel` leaves where, and `cargo tree`; it builds nothing.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[1]
# What the wheel and the tarball are built from.
BUILT = ("forebay-cli", "forebay-preload", "forebay-cuda", "forebay-py")
# A line of `cargo tree`; of a crate of ours the version is followed by its folder.
LINE = re.compile(r"^(\d+)(\S+) v([^\s|]+)[^|]*\|([^|]*?)(?: \(\*\))?$")
PACKAGE = ROOT / "python/forebay"
TARBALL = {
    "bin/forebay": PACKAGE / "bin/forebay",
    "lib/libforebay_preload.so": PACKAGE / "lib/libforebay_preload.so",
    "lib/libforebay_cuda.so": PACKAGE / "lib/libforebay_cuda.so",
    "share/forebay-node.service": ROOT / "deploy/forebay-node.service",
    "share/forebay.sysusers": ROOT / "deploy/forebay.sysusers",
    "LICENSE": ROOT / "LICENSE",
}


def said(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Crate:
    """A crate that is in what is built."""

    name: str
    version: str
    licence: str

    def component(self) -> Component:
        """The same in CycloneDX's words."""
        purl = PackageURL("cargo", name=self.name, version=self.version)
        licence = LicenseFactory().make_from_string(self.licence.replace("/", " OR "))
        named = {"name": self.name, "version": self.version}
        return Component(**named, purl=purl, bom_ref=str(purl), licenses=[licence])


def crates() -> dict[Crate, set[Crate]]:
    """All crates that are in what is built, each with those that it uses."""
    command = ["cargo", "tree", "--locked", "--edges", "normal", "--prefix", "depth", "--format", "{p}|{l}"]
    lines = said(*command, *(word for crate in BUILT for word in ("--package", crate))).splitlines()
    found: dict[Crate, set[Crate]] = {}
    above: list[Crate] = []
    for depth, name, version, licence in (LINE.findall(line)[0] for line in lines if line):
        crate = Crate(name, version, licence)
        found.setdefault(crate, set())
        above = [*above[: int(depth)], crate]
        if int(depth):
            found[above[-2]].add(crate)
    return found


def bill_of_materials(version: str) -> str:
    """All crates that are linked, and which uses which. Without times and random numbers."""
    found = crates()
    components = {crate: crate.component() for crate in found}
    purl = PackageURL("pypi", name="forebay", version=version)
    kind = ComponentType.APPLICATION
    whole = Component(name="forebay", version=version, purl=purl, bom_ref=str(purl), type=kind)
    bom = Bom(components=components.values())
    bom.metadata.component = whole
    bom.register_dependency(whole, [components[crate] for crate in found if crate.name in BUILT])
    for crate, uses in found.items():
        bom.register_dependency(components[crate], [components[used] for used in uses])
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    document.pop("serialNumber", None)
    document["metadata"].pop("timestamp", None)
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def tarball(name: str, seconds: int) -> bytes:
    """The files of `TARBALL` in a folder of this name, owned by root, with one time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for place, file in TARBALL.items():
            member = tarfile.TarInfo(f"{name}/{place}")
            member.size, member.mtime = file.stat().st_size, seconds
            member.mode = 0o755 if os.access(file, os.X_OK) else 0o644
            with file.open("rb") as contents:
                archive.addfile(member, contents)
    return buffer.getvalue()


def gather(out: Path) -> None:
    """Writes all of it to a new folder."""
    wheels = sorted(ROOT.glob("target/wheels/forebay-*.whl"))
    missing = [str(file) for file in TARBALL.values() if not file.exists()]
    if len(wheels) != 1 or missing:
        sys.exit(f"one wheel is needed and {len(wheels)} are there, missing are {missing}: `make wheel`")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(wheels[0], out)
    version = wheels[0].name.split("-")[1]
    # As reproducible builds have it; otherwise the time of the commit.
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or said("git", "log", "-1", "--format=%ct"))
    name = f"forebay-{version}-linux-{platform.machine()}"
    (out / f"{name}.tar.xz").write_bytes(tarball(name, seconds))
    (out / f"forebay-{version}.cdx.json").write_text(bill_of_materials(version))
    files = sorted(out.iterdir())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (out / "SHA256SUMS").write_text("".join(sums))
    for file in files:
        print(f"{file.name}: {file.stat().st_size / (1 << 20):.1f} MiB")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    gather(parser.parse_args().out)


if __name__ == "__main__":
    main()
