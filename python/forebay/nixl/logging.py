"""Loggers below `forebay.nixl`; `NIXL_LOG_LEVEL` sets their level, as in NIXL. Adds no handlers."""

import logging
import os

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    top = logging.getLogger("forebay.nixl")
    asked = os.environ.get("NIXL_LOG_LEVEL", "")
    level = _LEVELS.get(asked.upper())
    if level is not None:
        top.setLevel(level)
    elif asked:
        top.warning("NIXL_LOG_LEVEL is %r, not one of %s: left out", asked, ", ".join(_LEVELS))
    return top.getChild(name.removeprefix("forebay.nixl.").lstrip("_"))
