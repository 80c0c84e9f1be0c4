"""Which tenant a request is for: whom its salt or a hint names, as a number that the node knows."""

from collections.abc import Mapping

import forebay
from forebay.errors import InvalidError
from forebay.vllm.connector.config import SETTINGS

# In a salt, what is behind this tells requests of one tenant apart.
BEHIND_THE_NAME = ":"


class Tenants:
    """The tenants of an engine's requests, by name."""

    def __init__(self, own: int, numbers: Mapping[str, int]) -> None:
        """`own`: that of requests that name none."""
        self.own, self.numbers = own, numbers

    def of(self, salt: str | None, hinted: str | None) -> int | None:
        """The tenant of a request; None: the engine's own. A salt may be any text, a hint may not."""
        name = (salt or "").partition(BEHIND_THE_NAME)[0] if hinted is None else hinted
        number = self.numbers.get(name)
        if number is None and hinted is not None:
            raise InvalidError(f"tenant is {hinted!r}; allowed are the names in tenants of {SETTINGS}")
        return None if number == self.own else number


def seen_by(node: forebay.Node, tenant: int | None) -> forebay.Node:
    """The node as a tenant sees it; None: the engine's own."""
    return node if tenant is None else node.for_tenant(tenant)
