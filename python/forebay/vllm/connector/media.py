"""Images, audio and video in a prompt: where they are, and a name for what they show.

A prompt's tokens do not tell two images apart, so their names enter the chunk ids. Only vLLM's own
hash of a content is trusted as its name.
"""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from forebay.errors import InvalidError
from forebay.vllm.connector.weights import folder_of

# vLLM's hashes of contents. Other names may mean something else when the engine is restarted.
HASH = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
# Settings that change a content before the model sees it. vLLM's hashes leave them out.
SETTINGS = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
)


@dataclass(frozen=True)
class Item:
    """One image, sound or video."""

    content: str
    first: int  # of its tokens
    tokens: int


@dataclass(frozen=True)
class Media:
    """The media of a request."""

    processing: bytes  # a digest of how the engine processes contents (`processing_of`)
    items: tuple[Item, ...]  # in the order in which they begin

    @cached_property
    def firsts(self) -> list[int]:
        return [item.first for item in self.items]

    @cached_property
    def reached(self) -> list[int]:
        """The end of each item and of those before it: sound may lie within its video."""
        return list(accumulate((item.first + item.tokens for item in self.items), max))

    def within(self, start: int, end: int) -> bytes:
        """32 bytes for what the tokens from `start` to `end` show; empty if they are all text."""
        digest, found = hashlib.sha256(self.processing), False
        # A prompt may have thousands of items, and a chunk touches a few.
        near = slice(bisect_right(self.reached, start), bisect_left(self.firsts, end))
        for item in self.items[near]:
            if start < item.first + item.tokens:
                digest.update(f"{item.content} {item.first - start} {item.tokens};".encode())
                found = True
        return digest.digest() if found else b""


TEXT = Media(b"", ())


def media_of(request: Any, processing: bytes | None) -> Media | None:
    """The media of a request. None: some of it has no name that can be trusted."""
    if not request.mm_features:
        return TEXT
    named = all(HASH.fullmatch(feature.identifier or "") for feature in request.mm_features)
    if processing is None or not named:
        return None
    items = (
        Item(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    )
    return Media(processing, tuple(sorted(items, key=lambda item: item.first)))


def processing_of(model: Any) -> bytes | None:
    """32 bytes for all that a model's view of a content depends on, beside weights.

    None: it takes no contents, how is not known, or tokens of a content see later ones, so that a
    chunk would depend on what follows it.
    """
    settings = model.multimodal_config
    if settings is None or model.is_mm_prefix_lm:
        return None
    try:
        folder = folder_of(str(model.model), model.revision)
    except InvalidError:
        return None
    config = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    changed = {name: str(getattr(settings, name)) for name in SETTINGS}
    digest = hashlib.sha256(f"forebay media 1 {version('transformers')} {config} {changed}".encode())
    for path in sorted(folder.glob("*processor*.json")):  # How contents are cut and scaled.
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
