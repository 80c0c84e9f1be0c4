"""What a program written for NIXL has no way to say: where to listen, the token, certificates.

Environment variables say it, so that changing an import is enough.
"""

import os
from pathlib import Path
from typing import NamedTuple

LISTEN = "FOREBAY_LISTEN"
ADVERTISE = "FOREBAY_ADVERTISE"
PLAIN = "FOREBAY_PLAIN_BEYOND_LOOPBACK"
TLS_FILES = ("FOREBAY_TLS_CERT", "FOREBAY_TLS_KEY", "FOREBAY_TLS_CA")
TOKEN_FILE = "FOREBAY_TOKEN_FILE"


class Settings(NamedTuple):
    """Settings of this process's agents."""

    listen: str
    token: bytes
    advertise: str | None
    tls: tuple[bytes, bytes, bytes] | None
    plain_beyond_loopback: bool

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")


def read() -> Settings:
    """The settings as the environment has them now."""
    token = os.environ.get(TOKEN_FILE)
    tls = [os.environ.get(name) for name in TLS_FILES]
    if any(tls) and not all(tls):
        raise ValueError(f"{', '.join(TLS_FILES)} belong together: all three, or none")
    certificate, key, authorities = (Path(name).read_bytes() if name else b"" for name in tls)
    return Settings(
        listen=os.environ.get(LISTEN, "127.0.0.1:0"),
        token=Path(token).read_bytes().strip() if token else b"",
        advertise=os.environ.get(ADVERTISE),
        tls=(certificate, key, authorities) if all(tls) else None,
        plain_beyond_loopback=os.environ.get(PLAIN) == "1",
    )
