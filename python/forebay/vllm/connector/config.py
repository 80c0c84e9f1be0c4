"""The settings in `kv_connector_extra_config`: names, defaults, and what is allowed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from forebay.errors import InvalidError
from forebay.pages import check_socket, read_secret

SETTINGS = "kv_connector_extra_config"
NODE = "/run/forebay/node.sock"
CHUNK_TOKENS = 64

# Gives back the value of a setting of this name, or raises.
Check: TypeAlias = Callable[[str, Any], Any]


def refuse(name: str, value: object, allowed: str, where: str = SETTINGS) -> InvalidError:
    """The error of a value that is not allowed."""
    return InvalidError(f"{where}: {name} is {value!r}; allowed is {allowed}")


def text(name: str, value: Any) -> str | None:
    """Text, or None."""
    if value is not None and (not isinstance(value, str) or not value):
        raise refuse(name, value, "text that is not empty")
    return value


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def flag_or_none(name: str, value: Any) -> bool | None:
    """True, false or None."""
    return None if value is None else flag(name, value)


def number(name: str, value: Any, low: int, high: int, where: str = SETTINGS) -> int:
    """A whole number. Also a field of a ticket."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refuse(name, value, f"a whole number from {low} to {high}", where)
    return value


def seconds(name: str, value: Any) -> float:
    """A time of up to an hour."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise refuse(name, value, "a number of seconds from 0 to 3600")
    return float(value)


def layout(name: str, value: Any) -> Any:
    """Heads before tokens (HND), or behind them."""
    if value not in ("HND", "NHD"):
        raise refuse(name, value, "HND or NHD")
    return value


def verifier(name: str, value: Any) -> Any:
    """Who compares loaded bytes with their checksums, or None."""
    if value is not None and value not in ("gpu", "host", "both"):
        raise refuse(name, value, "gpu, host or both")
    return value


def hints(name: str, value: Any) -> Any:
    """Whose hints are obeyed."""
    if value not in ("off", "typed", "any"):
        raise refuse(name, value, "off, typed or any")
    return value


def tenants(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    """Tenants by name, each with the number that the node knows."""
    named = value.items() if isinstance(value, Mapping) else ()
    if not isinstance(value, Mapping) or not all(isinstance(one, str) and one for one, _ in named):
        raise refuse(name, value, 'names and numbers, like {"acme": 3}')
    return tuple((one, number(f"{name}[{one!r}]", given, 0, 0xFFFE)) for one, given in named)


def digest(name: str, value: Any) -> bytes | None:
    """A digest in hexadecimal digits, or None."""
    given = text(name, value)
    try:
        found = None if given is None else bytes.fromhex(given)
    except ValueError:
        found = b""
    if found is not None and len(found) != 32:
        raise refuse(name, value, "64 hexadecimal digits")
    return found


@dataclass(frozen=True)
class Shape:
    """How an engine cuts KV: over tensor-parallel ranks, and into blocks of tokens.

    Where all ranks have the same KV, it is not cut over them (`Facts.cut`).
    """

    tp: int
    block_tokens: int


def shape(entry: object, where: str = SETTINGS) -> Shape:
    """One shape. It may come from a ticket, so nothing in it is trusted."""
    if not isinstance(entry, Mapping) or set(entry) != {"tp", "block_tokens"}:
        raise refuse("also_read", entry, 'entries like {"tp": 2, "block_tokens": 16}', where)
    block_tokens = number("block_tokens", entry["block_tokens"], 1, 1 << 20, where)
    return Shape(number("tp", entry["tp"], 1, 1024, where), block_tokens)


def shapes(name: str, value: Any) -> tuple[Shape, ...]:
    """The shapes of other engines whose chunks are read too."""
    if not isinstance(value, list | tuple) or len(value) > 8:
        raise refuse(name, value, 'a list of up to 8 entries like {"tp": 2, "block_tokens": 16}')
    return tuple(shape(entry) for entry in value)


def setting(default: Any, check: Check) -> Any:
    """A field of `Settings`."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Settings:
    """Every field is a key of the extra configuration."""

    node: str = setting(NODE, lambda name, value: check_socket(text(name, value) or NODE))
    token_file: str | None = setting(None, text)
    tenant: int = setting(0, lambda name, value: number(name, value, 0, 0xFFFE))
    # Tenants that a request's salt or a hint may name; all others are `tenant`.
    tenants: tuple[tuple[str, int], ...] = setting((), tenants)
    salt_file: str | None = setting(None, text)
    # None: CHUNK_TOKENS, or the next multiple of the engine's block size.
    chunk_tokens: int | None = setting(None, lambda name, value: number(name, value, 1, 1 << 20))
    weights_digest: bytes | None = setting(None, digest)
    handovers: bool = setting(True, flag)  # False where another connector does hand-overs
    handover_wait_s: float = setting(5.0, seconds)
    # Decoders of the same host read a prefiller's blocks. None: on GPUs.
    direct_handover: bool | None = setting(None, flag_or_none)
    also_read: tuple[Shape, ...] = setting((), shapes)
    copy_threads: int = setting(2, lambda name, value: number(name, value, 1, 64))
    # None: the GPU, or the host on CPUs.
    verify: Any = setting(None, verifier)
    profile: str | None = setting(None, text)
    gate: bool = setting(True, flag)  # False: load all that is found, even if computing is faster
    # "typed": vLLM's field, which no client can set. "any": also kv_transfer_params, which clients
    # can.
    kv_hints: str = setting("typed", hints)
    keep_on_reset: bool = setting(False, flag)  # True where weights never change
    layout: str = setting("HND", layout)
    one_copy: bool = setting(False, flag)  # a chunk for each KV head, which any TP size reads

    @property
    def token(self) -> bytes:
        return read_secret("token_file", self.token_file)

    @property
    def salt(self) -> bytes:
        """The tenant's secret, which enters every chunk id."""
        return read_secret("salt_file", self.salt_file)


def settings_of(extra: Mapping[str, Any]) -> Settings:
    """Reads and checks the extra configuration of a connector."""
    checks = {each.name: each.metadata["check"] for each in fields(Settings)}
    for name in sorted(set(extra) - set(checks)):
        raise refuse(name, extra[name], "only " + ", ".join(checks))
    return Settings(**{name: checks[name](name, value) for name, value in extra.items()})
