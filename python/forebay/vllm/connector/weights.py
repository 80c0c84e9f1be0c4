"""The digest of a model's weights, from its files.

Reading all of a large model would take minutes at each start. So each file stands for its bytes by
the cheapest of these: the name of its blob in a Hugging Face cache, which is a digest; of
safetensors, all small tensors and samples of each large one; else samples of the whole. This does
not see a few changed elements of a large tensor, nor, in other formats, a changed small tensor, nor
changes within a blob. `weights_digest` in kv_connector_extra_config is for such cases.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from forebay.errors import InvalidError

ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES = 64
SAMPLE_BYTES = 4096
HEAD_BYTES = 1 << 20
# Scales and norms are smaller than this, and are few bytes beside the rest.
WHOLE_BYTES = 256 << 10
TENSOR_SAMPLES = 16
# The limit of safetensors itself.
HEADER_BYTES = 100_000_000
# What Hugging Face names large files in a cache by. Small ones have 40 digits, of Git's.
SHA256 = re.compile(r"[0-9a-f]{64}")

Span = tuple[int, int]  # of a file: from where, up to where


def digest_of_weights(model: str, revision: str | None, load_format: str, config: str, seed: int) -> bytes:
    """32 bytes that stand for the weights. Dummy weights follow from `config` and `seed`."""
    if load_format == "dummy":
        return hashlib.sha256(f"forebay dummy weights {seed} {config}".encode()).digest()
    folder = folder_of(model, revision)
    files = [folder]
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS)
    if not files:
        raise InvalidError(
            f"model is {model!r} and {folder} has no weights in files ending in {', '.join(ENDINGS)}; "
            "set weights_digest in kv_connector_extra_config"
        )
    digest = hashlib.sha256(b"forebay weights 2")
    for path in files:
        digest.update(path.name.encode() + b"\0")
        for part in parts(path):
            digest.update(part)
    return digest.digest()


def folder_of(model: str, revision: str | None) -> Path:
    """The folder of the model's files: the path itself, or what was downloaded under that name."""
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:  # Whichever library raises it, the files are not on this host.
        raise InvalidError(
            f"model is {model!r}, whose files were not found on this host ({error}); "
            "set weights_digest in kv_connector_extra_config"
        ) from error


def parts(path: Path) -> Iterator[bytes]:
    """What stands for a file's bytes, after a word for the way they were read."""
    blob = blob_of(path)
    if blob is not None:
        yield b"blob\0" + blob.encode()
        return
    spans = spans_of(path) if path.suffix == ".safetensors" else None
    if spans is None:
        yield b"samples\0"
        yield from samples(path)
    else:
        yield b"tensors\0"
        yield from tensors(path, spans)


def blob_of(path: Path) -> str | None:
    """The SHA-256 of all bytes, if the file is a link to a blob that is named by it."""
    target = path.resolve()
    return target.name if target.parent.name == "blobs" and SHA256.fullmatch(target.name) else None


def spans_of(path: Path) -> list[Span] | None:
    """The header and each tensor, in the order of the file; None if the header is invalid."""
    size = path.stat().st_size
    with path.open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        if data > min(size, 8 + HEADER_BYTES):
            return None
        try:
            header = json.loads(file.read(data - 8).decode())
        except (ValueError, RecursionError):
            return None
    if not isinstance(header, dict):
        return None
    found = []
    for name, tensor in header.items():
        match tensor:
            case {"data_offsets": [int(first), int(end)]} if 0 <= first <= end <= size - data:
                found.append((data + first, data + end))
            case _ if name != "__metadata__":
                return None
    return [(0, data), *sorted(found)]


def tensors(path: Path, spans: list[Span]) -> Iterator[bytes]:
    """The header, then all of each small tensor and samples of each large one."""
    with path.open("rb") as file:
        yield read(file, *spans[0])
        for first, end in spans[1:]:
            if end - first <= WHOLE_BYTES:
                yield read(file, first, end)
                continue
            for sample in range(TENSOR_SAMPLES):
                # The first is at the beginning of the tensor, and the last at its end.
                at = first + (end - first - SAMPLE_BYTES) * sample // (TENSOR_SAMPLES - 1)
                yield read(file, at, at + SAMPLE_BYTES)


def read(file: BinaryIO, first: int, end: int) -> bytes:
    """The bytes of a span."""
    file.seek(first)
    return file.read(end - first)


def samples(path: Path) -> Iterator[bytes]:
    """The size, the beginning, and samples at even distances up to the end."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        yield file.read(HEAD_BYTES)
        for sample in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * (sample + 1) // SAMPLES)
            yield file.read(SAMPLE_BYTES)
