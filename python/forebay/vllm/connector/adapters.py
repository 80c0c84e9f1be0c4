"""Tells LoRA adapters apart by what their files hold.

A thread reads the files, so that no step of the engine waits for a disk. An adapter's name and
number do not say what it computes: both may be given to another one later. vLLM keeps loaded
adapters by number, and their KV in its own cache by name. So what a request computes is certain
only while its number, or name, has stood for one content.
"""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

# What vLLM reads of an adapter's folder.
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")

# Settings of vLLM for adapters that change no KV: how many and how large they may be.
SIZES = ("max_lora_rank", "max_loras", "max_cpu_loras", "specialize_active_lora", "default_mm_loras")

# Of each file: name, inode, size, time of the last change.
Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Adapter:
    """An adapter whose content is certain."""

    digest: bytes
    renamed: bool  # its name had other content before, of which vLLM's cache may still have KV


class Adapters:
    """Finds out what adapters hold."""

    def __init__(self, lora_config: Any) -> None:
        facts = {} if lora_config is None else vars(lora_config)
        self.computed = str(sorted((name, str(facts[name])) for name in facts if name not in SIZES))
        self.pool = ThreadPoolExecutor(1, "forebay-adapters")
        # Only the thread uses these. Empty bytes: several contents, or an unknown one.
        self.numbers: dict[int, bytes] = {}
        self.names: dict[str, bytes] = {}
        self.read: dict[Path, tuple[Stamp, bytes]] = {}

    def find(self, asked: Any) -> "Future[Adapter | None]":
        """The adapter that vLLM's request names; None if its content is not certain."""
        return self.pool.submit(self.adapter_of, asked)

    def look(self, asked: Any) -> None:
        """Reads the files before or after workers do. If they differ, the content is unknown."""
        self.find(asked).result()

    def adapter_of(self, asked: Any) -> Adapter | None:
        """The same, on the thread."""
        digest = self.digest_of(asked)
        if self.numbers.setdefault(asked.lora_int_id, digest) != digest:
            self.numbers[asked.lora_int_id] = b""
        if self.names.setdefault(asked.lora_name, digest) != digest:
            self.names[asked.lora_name] = b""
        if not self.numbers[asked.lora_int_id]:
            return None
        return Adapter(digest, renamed=not self.names[asked.lora_name])

    def digest_of(self, asked: Any) -> bytes:
        """What the adapter computes; empty if that cannot be told."""
        if asked.load_inplace or getattr(asked, "tensorizer_config_dict", None):  # Gone in 0.32.
            return b""  # What replaced it is not said, or its weights are elsewhere.
        try:
            content = self.content(Path(os.path.expanduser(asked.lora_path)))
        except (OSError, ValueError):
            return b""  # Not on this host.
        layout = asked.is_3d_lora_weight
        computed = f"forebay adapter 1 {self.computed} {layout} ".encode()
        return content and hashlib.sha256(computed + content).digest()

    def content(self, folder: Path) -> bytes:
        """The digest of an adapter's files; empty if they change meanwhile."""
        stamp = stamp_of(folder)
        have = self.read.get(folder)
        if have is not None and have[0] == stamp:
            return have[1]
        digest = hashlib.sha256()
        for name, *_ in stamp:
            with (folder / name).open("rb") as file:
                digest.update(name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
        if stamp_of(folder) != stamp:
            return b""
        self.read[folder] = stamp, digest.digest()
        return digest.digest()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def stamp_of(folder: Path) -> Stamp:
    """Changes when an adapter's files do. Raises `OSError` if there are no weights."""
    weights = [name for name in WEIGHTS if (folder / name).exists()]
    if not weights:
        raise FileNotFoundError(f"{folder} has none of {', '.join(WEIGHTS)}")
    found = [(name, (folder / name).stat()) for name in (CONFIG, *weights)]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in found)
