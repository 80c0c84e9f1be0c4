"""Log lines that may come in storms, such as one for each request while a node is gone.

A `LimitedLog` writes a few lines of each kind per minute and counts the others.
"""

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """Writes at most `lines` lines of each kind per interval. The message tells the kind."""

    def __init__(
        self,
        logger: logging.Logger,
        lines: int = 5,
        interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._lines, self._interval_s, self._clock = logger, lines, interval_s, clock
        self._seen: dict[str, tuple[float, int]] = {}  # by message: the interval's start, and its count

    def info(self, message: str, *args: object) -> None:
        self._log(logging.INFO, message, *args)

    def warning(self, message: str, *args: object) -> None:
        self._log(logging.WARNING, message, *args)

    def _log(self, level: int, message: str, *args: object) -> None:
        now = self._clock()
        start, count = self._seen.get(message, (now, 0))
        left_out = 0
        if now - start >= self._interval_s:
            left_out, start, count = max(0, count - self._lines), now, 0
        self._seen[message] = start, count + 1
        if left_out:
            self._logger.log(level, f"{message} (%d more like this were left out)", *args, left_out)
        elif count < self._lines:
            self._logger.log(level, message, *args)
