"""NIXL's exceptions, one for each status, and which of Forebay's errors is which.

A message starts with NIXL's name of the status, as programs expect it, and goes on with Forebay's reason.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from forebay import errors

_P = ParamSpec("_P")
_R = TypeVar("_R")


class nixlNotPostedError(errors.ForebayError):
    """The transfer has not been posted."""


class nixlInvalidParamError(errors.ForebayError):
    """An argument is not acceptable."""


class nixlBackendError(errors.ForebayError):
    """The transfer or the connection failed."""


class nixlNotFoundError(errors.ForebayError):
    """No such peer, backend or registered memory."""


class nixlMismatchError(errors.ForebayError):
    """What another agent sent is not what it should be."""


class nixlNotAllowedError(errors.ForebayError):
    """Not now: something else stands in the way."""


class nixlRepostActiveError(errors.ForebayError):
    """The transfer is under way; it can be posted again after its end."""


class nixlUnknownError(errors.ForebayError):
    """A failure without a name."""


class nixlNotSupportedError(errors.ForebayError):
    """NIXL has this, Forebay's agent does not."""


class nixlRemoteDisconnectError(errors.ForebayError):
    """The peer cannot be reached, has died, has restarted or does not move."""


class nixlCancelledError(errors.ForebayError):
    """The transfer was cancelled."""


class nixlNoTelemetryError(errors.ForebayError):
    """Telemetry is off, or the transfer has not ended."""


_NAMES: dict[type[errors.ForebayError], str] = {
    nixlNotPostedError: "NIXL_ERR_NOT_POSTED",
    nixlInvalidParamError: "NIXL_ERR_INVALID_PARAM",
    nixlBackendError: "NIXL_ERR_BACKEND",
    nixlNotFoundError: "NIXL_ERR_NOT_FOUND",
    nixlMismatchError: "NIXL_ERR_MISMATCH",
    nixlNotAllowedError: "NIXL_ERR_NOT_ALLOWED",
    nixlRepostActiveError: "NIXL_ERR_REPOST_ACTIVE",
    nixlUnknownError: "NIXL_ERR_UNKNOWN",
    nixlNotSupportedError: "NIXL_ERR_NOT_SUPPORTED",
    nixlRemoteDisconnectError: "NIXL_ERR_REMOTE_DISCONNECT",
    nixlCancelledError: "NIXL_ERR_CANCELED",
    nixlNoTelemetryError: "NIXL_ERR_NO_TELEMETRY",
}

# The first that fits decides: classes before those that they derive from.
_OF_FOREBAY: list[tuple[type[Exception], type[errors.ForebayError]]] = [
    (errors.InvalidError, nixlInvalidParamError),
    (errors.NotFoundError, nixlNotFoundError),
    (errors.PeerLostError, nixlRemoteDisconnectError),
    (errors.CancelledError, nixlCancelledError),
    (errors.ForkedError, nixlNotAllowedError),
    (errors.DeadlineError, nixlBackendError),
    (errors.TransferError, nixlBackendError),
    (errors.ForebayError, nixlUnknownError),
]


def failure(kind: type[errors.ForebayError], reason: object) -> errors.ForebayError:
    """An exception of this kind, with NIXL's name of the status before the reason."""
    return kind(f"{_NAMES[kind]}: {reason}")


def translated(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same method, raising NIXL's errors in the place of Forebay's."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except errors.ForebayError as error:
            if type(error) in _NAMES:
                raise
            kind = next(nixl for ours, nixl in _OF_FOREBAY if isinstance(error, ours))
            raise failure(kind, error) from error

    return call
