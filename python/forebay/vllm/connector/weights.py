"""The digest of a model's weights, from its files.

Knows files: each one's size, header and samples of its bytes. Weights of the same shape that differ
anywhere differ nearly everywhere, so samples tell them apart; reading all of a large model would take
minutes at each start. Must never know the served name, which says nothing about weights.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import InvalidError

ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES = 64
SAMPLE_BYTES = 4096
HEAD_BYTES = 1 << 20


def digest_of_weights(model: str, revision: str | None, load_format: str, config: str, seed: int) -> bytes:
    """32 bytes that stand for the weights. `config` stands for weights that vLLM makes up itself."""
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
    digest = hashlib.sha256(b"forebay weights 1")
    for path in files:
        digest.update(path.name.encode() + b"\0")
        for part in samples(path):
            digest.update(part)
    return digest.digest()


def folder_of(model: str, revision: str | None) -> Path:
    """Where the model's files are: the path itself, or what was downloaded under that name."""
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:  # Any of several libraries' errors: all mean that it is not on this host.
        raise InvalidError(
            f"model is {model!r}, whose files were not found on this host ({error}); "
            "set weights_digest in kv_connector_extra_config"
        ) from error


def samples(path: Path) -> Iterator[bytes]:
    """The size, the beginning, and bytes at even distances up to the end."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        yield file.read(HEAD_BYTES)
        for sample in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * (sample + 1) // SAMPLES)
            yield file.read(SAMPLE_BYTES)
