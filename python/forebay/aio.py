"""Waiting for an agent with asyncio: its event descriptor wakes the loop, and nothing polls.

One `Waiter` for an agent and a loop. Knows states and futures; must never know how bytes move.
"""

import asyncio
from types import TracebackType
from typing import Self

from forebay import Agent, Transfer


class Waiter:
    """Ends of transfers and notifications of one agent, for coroutines of one event loop.

    While it lives it owns the agent's events: take notifications from here, not from the agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[Transfer, asyncio.Future[None]] = {}
        self._messages: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._loop.add_reader(agent.fileno(), self._wake)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the agent. Coroutines that still wait are cancelled; their transfers are not."""
        self._loop.remove_reader(self._agent.fileno())
        for future in self._under_way.values():
            future.cancel()
        self._under_way.clear()

    async def run(self, transfer: Transfer, notification: bytes | None = None) -> None:
        """Posts a transfer and returns at its end; raises its error. Cancelling it cancels the transfer."""
        if notification is None:
            transfer.post()
        else:
            transfer.post(notification)
        future = self._loop.create_future()
        self._under_way[transfer] = future
        # It may have ended before it was on the list.
        self._settle(transfer)
        try:
            await future
        except asyncio.CancelledError:
            await asyncio.to_thread(transfer.cancel)
            raise
        finally:
            self._under_way.pop(transfer, None)

    async def notification(self) -> tuple[str, bytes]:
        """The next notification: who sent it, and what."""
        self._take()
        return await self._messages.get()

    def _wake(self) -> None:
        self._agent.clear_events()
        self._take()
        for transfer in list(self._under_way):
            self._settle(transfer)

    def _take(self) -> None:
        for message in self._agent.take_notifications():
            self._messages.put_nowait(message)

    def _settle(self, transfer: Transfer) -> None:
        future = self._under_way[transfer]
        if future.done():
            return
        if transfer.state == "done":
            future.set_result(None)
        elif transfer.state == "failed":
            future.set_exception(transfer.error or RuntimeError("a transfer failed without an error"))
