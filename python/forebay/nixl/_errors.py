"""NIXL's exceptions, one for each status, and which of Forebay's errors becomes which.

A message starts with NIXL's name of the status, as programs expect, and goes on with the reason.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from forebay import errors

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _NixlError(errors.ForebayError):
    """An error with one of NIXL's statuses."""

    status: str

    def __init_subclass__(cls, status: str) -> None:
        cls.status = f"NIXL_ERR_{status}"


class nixlNotPostedError(_NixlError, status="NOT_POSTED"):
    """The transfer has not been posted."""


class nixlInvalidParamError(_NixlError, status="INVALID_PARAM"):
    """An argument is not acceptable."""


class nixlBackendError(_NixlError, status="BACKEND"):
    """The transfer or the connection failed."""


class nixlNotFoundError(_NixlError, status="NOT_FOUND"):
    """No such peer, backend or registered memory."""


class nixlMismatchError(_NixlError, status="MISMATCH"):
    """What another agent sent is not what it should be."""


class nixlNotAllowedError(_NixlError, status="NOT_ALLOWED"):
    """Not now: something else stands in the way."""


class nixlRepostActiveError(_NixlError, status="REPOST_ACTIVE"):
    """The transfer is under way; it can be posted again after its end."""


class nixlUnknownError(_NixlError, status="UNKNOWN"):
    """A failure without a name."""


class nixlNotSupportedError(_NixlError, status="NOT_SUPPORTED"):
    """NIXL has this, Forebay's agent does not."""


class nixlRemoteDisconnectError(_NixlError, status="REMOTE_DISCONNECT"):
    """The peer cannot be reached, has died, has restarted or does not move."""


class nixlCancelledError(_NixlError, status="CANCELED"):
    """The transfer was cancelled."""


class nixlNoTelemetryError(_NixlError, status="NO_TELEMETRY"):
    """Telemetry is off, or the transfer has not ended."""


# The first that fits decides: classes come before those that they derive from.
_OF_FOREBAY: list[tuple[type[Exception], type[_NixlError]]] = [
    (errors.InvalidError, nixlInvalidParamError),
    (errors.NotFoundError, nixlNotFoundError),
    (errors.PeerLostError, nixlRemoteDisconnectError),
    (errors.CancelledError, nixlCancelledError),
    (errors.ForkedError, nixlNotAllowedError),
    (errors.DeadlineError, nixlBackendError),
    (errors.TransferError, nixlBackendError),
    (errors.ForebayError, nixlUnknownError),
]


def failure(kind: type[_NixlError], reason: object) -> _NixlError:
    """An exception of this kind, with NIXL's name of the status before the reason."""
    return kind(f"{kind.status}: {reason}")


def translated(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same method, but it raises NIXL's errors instead of Forebay's."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except _NixlError:
            raise
        except errors.ForebayError as error:
            kind = next(nixl for ours, nixl in _OF_FOREBAY if isinstance(error, ours))
            raise failure(kind, error) from error

    return call
