"""The settings of the connector, from `kv_connector_extra_config`: names, defaults, what is allowed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from forebay.errors import InvalidError
from forebay.pages import check_socket, read_secret

SETTINGS = "kv_connector_extra_config"
NODE = "/run/forebay/node.sock"
CHUNK_TOKENS = 64
HANDOVER_WAIT_S = 5.0
COPY_THREADS = 2
LAYOUTS = ("HND", "NHD")


@dataclass(frozen=True)
class Shape:
    """How an engine cuts KV: over tensor-parallel ranks, and into blocks of tokens.

    Where all ranks have the same KV, it is not cut over them (`Facts.cut`).
    """

    tp: int
    block_tokens: int


@dataclass(frozen=True)
class Settings:
    """Every field is a key of the extra configuration."""

    node: str = NODE
    token_file: str | None = None
    tenant: int = 0
    salt_file: str | None = None
    chunk_tokens: int | None = None  # CHUNK_TOKENS, or the next multiple of the engine's block size
    weights_digest: bytes | None = None
    handovers: bool = True  # False where another connector hands prompts over
    handover_wait_s: float = HANDOVER_WAIT_S
    also_read: tuple[Shape, ...] = ()
    copy_threads: int = COPY_THREADS
    profile: str | None = None
    gate: bool = True  # False: everything found is loaded, even if computing would be faster
    keep_on_reset: bool = False  # True where weights never change while the engine lives
    layout: str = "HND"  # heads before tokens in a block; NHD: tokens before heads

    @property
    def token(self) -> bytes:
        return read_secret("token_file", self.token_file)

    @property
    def salt(self) -> bytes:
        """The tenant's secret, which enters every chunk id."""
        return read_secret("salt_file", self.salt_file)


def refuse(name: str, value: object, allowed: str, where: str = SETTINGS) -> InvalidError:
    """The error of a value that is not allowed."""
    return InvalidError(f"{where}: {name} is {value!r}; allowed is {allowed}")


def settings_of(extra: Mapping[str, Any]) -> Settings:
    """Reads and checks the extra configuration of a connector."""
    names = [field.name for field in fields(Settings)]
    for name in sorted(set(extra) - set(names)):
        raise refuse(name, extra[name], "only " + ", ".join(names))
    digest = text(extra, "weights_digest", None)
    return Settings(
        node=check_socket(text(extra, "node", NODE) or NODE),
        token_file=text(extra, "token_file", None),
        tenant=number(extra, "tenant", 0, 0, 0xFFFF),
        salt_file=text(extra, "salt_file", None),
        chunk_tokens=number(extra, "chunk_tokens", 0, 1, 1 << 20) if "chunk_tokens" in extra else None,
        weights_digest=None if digest is None else digest_of(digest),
        handovers=flag(extra, "handovers", True),
        handover_wait_s=seconds(extra, "handover_wait_s", HANDOVER_WAIT_S, 3600.0),
        also_read=shapes(extra.get("also_read", ())),
        copy_threads=number(extra, "copy_threads", COPY_THREADS, 1, 64),
        profile=text(extra, "profile", None),
        gate=flag(extra, "gate", True),
        keep_on_reset=flag(extra, "keep_on_reset", False),
        layout=one_of(extra, "layout", LAYOUTS),
    )


def text(extra: Mapping[str, Any], name: str, default: str | None) -> str | None:
    """A setting that is text, or is left out."""
    value = extra.get(name, default)
    if value is not None and (not isinstance(value, str) or not value):
        raise refuse(name, value, "text that is not empty")
    return value


def one_of(extra: Mapping[str, Any], name: str, allowed: Sequence[str]) -> str:
    """A setting that is one of some words. The first one is the default."""
    value = extra.get(name, allowed[0])
    if not isinstance(value, str) or value not in allowed:
        raise refuse(name, value, " or ".join(allowed))
    return value


def flag(extra: Mapping[str, Any], name: str, default: bool) -> bool:
    """A setting that is true or false."""
    value = extra.get(name, default)
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def number(
    extra: Mapping[str, Any], name: str, default: int, low: int, high: int, where: str = SETTINGS
) -> int:
    """A setting that is a whole number. Also a field of a ticket."""
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refuse(name, value, f"a whole number from {low} to {high}", where)
    return value


def seconds(extra: Mapping[str, Any], name: str, default: float, high: float) -> float:
    """A setting that is a time."""
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise refuse(name, value, f"a number of seconds from 0 to {high:g}")
    return float(value)


def digest_of(value: str) -> bytes:
    """A digest in hexadecimal digits."""
    try:
        digest = bytes.fromhex(value)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise refuse("weights_digest", value, "64 hexadecimal digits")
    return digest


def shapes(value: object) -> tuple[Shape, ...]:
    """The shapes of other engines whose chunks are read too."""
    if not isinstance(value, list | tuple) or len(value) > 8:
        raise refuse("also_read", value, 'a list of up to 8 entries like {"tp": 2, "block_tokens": 16}')
    return tuple(shape(entry) for entry in value)


def shape(entry: object, where: str = SETTINGS) -> Shape:
    """One shape. It may come from a ticket, so nothing in it is trusted."""
    if not isinstance(entry, Mapping) or set(entry) != {"tp", "block_tokens"}:
        raise refuse("also_read", entry, 'entries like {"tp": 2, "block_tokens": 16}', where)
    return Shape(
        tp=number(entry, "tp", 0, 1, 1024, where),
        block_tokens=number(entry, "block_tokens", 0, 1, 1 << 20, where),
    )
