"""Log lines that may come in storms, such as one for each request while a node is gone.

A `LimitedLog` writes one line of each kind per minute and counts the others (`repeated`).
"""

import logging
import math
import time
from collections.abc import Callable


class LimitedLog:
    """Writes one line of each kind per interval. The message tells the kind."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._interval_s, self._clock = logger, interval_s, clock
        self._seen: dict[str, tuple[float, int]] = {}  # by message: when written, left out since

    def info(self, message: str, *args: object) -> None:
        self._log(logging.INFO, message, *args)

    def warning(self, message: str, *args: object) -> None:
        self._log(logging.WARNING, message, *args)

    def _log(self, level: int, message: str, *args: object) -> None:
        now = self._clock()
        written_s, repeated = self._seen.get(message, (-math.inf, 0))
        if now - written_s < self._interval_s:
            self._seen[message] = written_s, repeated + 1
            return
        self._seen[message] = now, 0
        if repeated:
            message, args = f"{message} repeated=%d", (*args, repeated)
        self._logger.log(level, message, *args, stacklevel=3)
