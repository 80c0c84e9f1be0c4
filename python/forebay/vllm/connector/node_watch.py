"""Says in the log when the connector finds its node, loses it and finds it again.

`look` is called in every step and asks at most once a second. It knows no vLLM but its logger.
"""

import time
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger("vllm.forebay.node")

LOOK_EVERY_S = 1.0
# A node that starts with the engine is usually there by then.
FIRST_WAIT_S = 10.0


class NodeWatch:
    """Watches the connection of one half of the connector."""

    def __init__(
        self,
        who: str,
        node: str,
        is_connected: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.who, self.node, self.is_connected, self.clock = who, node, is_connected, clock
        self.was_connected: bool | None = None  # None: neither found nor missed yet
        self.since_s = self.looked_s = clock()

    def look(self) -> None:
        now = self.clock()
        if now - self.looked_s < LOOK_EVERY_S:
            return
        self.looked_s = now
        is_connected = self.is_connected()
        if is_connected == self.was_connected:
            return
        after_s = now - self.since_s
        if is_connected and self.was_connected is None:
            logger.info("%s: found the node at %s", self.who, self.node)
        elif is_connected:
            logger.info("%s: found the node at %s again after %.0f s", self.who, self.node, after_s)
        elif self.was_connected:
            logger.warning(
                "%s: lost the node at %s: nothing is loaded or stored until it is back", self.who, self.node
            )
        elif after_s < FIRST_WAIT_S:
            return
        else:
            logger.warning("%s: no node at %s after %.0f s: all is computed", self.who, self.node, after_s)
        self.was_connected, self.since_s = is_connected, now
