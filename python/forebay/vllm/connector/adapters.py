"""Which LoRA adapter a request has, told apart by what its files hold.

Knows the files of adapters, and the thread that reads them: no step of the engine waits for a disk. Must
never know tokens, or where KV is. An adapter's name and number say which one is meant, not what it computes:
both are given to others when an adapter is loaded anew.

vLLM keeps adapters that it has loaded by their numbers, and its own cache has their KV by their names. What
they hold is certain only as long as a number, or a name, has stood for one content.
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

# Of vLLM's settings for adapters: how many and how large they may be, which changes no KV.
SIZES = ("max_lora_rank", "max_loras", "max_cpu_loras", "specialize_active_lora", "default_mm_loras")

# Of each file: name, inode, size, time of the last change.
Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Adapter:
    """What is known of an adapter."""

    digest: bytes
    renamed: bool  # its name had other content before: vLLM's own cache may still have KV of that


class Adapters:
    """Finds what adapters hold."""

    def __init__(self, lora_config: Any) -> None:
        """Of an engine whose adapters are computed as this says. It is None where there are none."""
        facts = {} if lora_config is None else vars(lora_config)
        self.computed = str(sorted((name, str(facts[name])) for name in facts if name not in SIZES))
        self.pool = ThreadPoolExecutor(1, "forebay-adapters")
        # All of these are the thread's. No bytes: it has stood for different contents, or for unknown ones.
        self.numbers: dict[int, bytes] = {}
        self.names: dict[str, bytes] = {}
        self.read: dict[Path, tuple[Stamp, bytes]] = {}

    def find(self, asked: Any) -> "Future[Adapter | None]":
        """What the adapter of vLLM's request for it is; None if that is not certain."""
        return self.pool.submit(self.adapter_of, asked)

    def look(self, asked: Any) -> None:
        """An adapter's files are about to be read by workers, or just were. If they were not the same all the
        time, its number stands for contents that are not known.
        """
        self.find(asked).result()

    def adapter_of(self, asked: Any) -> Adapter | None:
        """The same, at once."""
        digest = self.digest_of(asked)
        if self.numbers.setdefault(asked.lora_int_id, digest) != digest:
            self.numbers[asked.lora_int_id] = b""
        if self.names.setdefault(asked.lora_name, digest) != digest:
            self.names[asked.lora_name] = b""
        if not self.numbers[asked.lora_int_id]:
            return None
        return Adapter(digest, renamed=not self.names[asked.lora_name])

    def digest_of(self, asked: Any) -> bytes:
        """What the adapter computes; nothing if that cannot be told."""
        if asked.load_inplace or getattr(asked, "tensorizer_config_dict", None):  # Gone in 0.32.
            return b""  # What it has been replaced by is not said; or its weights are elsewhere.
        try:
            content = self.content(Path(os.path.expanduser(asked.lora_path)))
        except (OSError, ValueError):
            return b""  # Not on this host.
        layout = bool(getattr(asked, "is_3d_lora_weight", False))
        computed = f"forebay adapter 1 {self.computed} {layout} ".encode()
        return content and hashlib.sha256(computed + content).digest()

    def content(self, folder: Path) -> bytes:
        """The digest of an adapter's files; nothing if they change meanwhile."""
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
        """Nothing is read any more."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def stamp_of(folder: Path) -> Stamp:
    """Tells whether an adapter's files are still those that were read. Raises `OSError` without weights."""
    weights = [name for name in WEIGHTS if (folder / name).exists()]
    if not weights:
        raise FileNotFoundError(f"{folder} has none of {', '.join(WEIGHTS)}")
    found = [(name, (folder / name).stat()) for name in (CONFIG, *weights)]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in found)
