"""Waits for an agent with asyncio: its event descriptor wakes the loop, and nothing polls.

Make one `Waiter` for an agent and a loop.
"""

import asyncio
import contextlib
import os
from collections import deque
from types import TracebackType
from typing import Self

from forebay import Agent, Transfer
from forebay._fork_guard import ForkGuard
from forebay.errors import ForebayError, InvalidError


class Waiter:
    """Waits for transfers and notifications of one agent, for coroutines of one event loop.

    While it lives, take notifications from it, not from the agent. If the agent is closed first,
    coroutines that still wait get an error as soon as a transfer that moved has ended.
    """

    def __init__(self, agent: Agent) -> None:
        self._fork_guard = ForkGuard()
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[Transfer, asyncio.Future[None]] = {}
        self._messages: deque[tuple[str, bytes]] = deque()
        # In the order in which they came. Each stays until it is woken.
        self._listening: dict[asyncio.Future[None], None] = {}
        # A copy: when the agent is closed, another descriptor may get the number of its own.
        self._events: int | None = os.dup(agent.fileno())
        self._loop.add_reader(self._events, self._wake)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the agent. Coroutines that still wait are cancelled; their transfers are not."""
        if self._events is None:
            return
        if self._fork_guard.is_owner:
            for future in [*self._under_way.values(), *self._listening]:
                future.cancel()
            # A child shares the parent's epoll set, and leaves it as it is.
            self._loop.remove_reader(self._events)
        os.close(self._events)
        self._events = None

    async def run(self, transfer: Transfer, notification: bytes | None = None) -> None:
        """Posts a transfer and waits for its end. Cancelling this cancels the transfer."""
        before = self._under_way.get(transfer)
        if before is not None:
            # It may have ended unnoticed. Who waits for that end is told before it begins again.
            self._settle(transfer)
            if not before.done():
                raise InvalidError("the transfer is under way")
        future = self._future()
        if notification is None:
            transfer.post()
        else:
            transfer.post(notification)
        self._under_way[transfer] = future
        # It may have ended before it was on the list.
        self._settle(transfer)
        try:
            await future
        except asyncio.CancelledError:
            # Cancelled by the caller. `close` cancels only the future.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                await self._cancel(transfer)
            raise
        finally:
            if self._under_way.get(transfer) is future:
                del self._under_way[transfer]

    async def _cancel(self, transfer: Transfer) -> None:
        """Waits until nothing touches the memory, however often the caller is cancelled."""
        quiet = self._loop.run_in_executor(None, transfer.cancel)
        while not quiet.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(quiet)

    async def notification(self) -> tuple[str, bytes]:
        """The next notification: who sent it, and what."""
        while not self._messages and not self._take():
            future = self._future()
            self._listening[future] = None
            try:
                await future
            finally:
                self._listening.pop(future, None)
        return self._messages.popleft()

    def _future(self) -> asyncio.Future[None]:
        self._fork_guard.check()
        if self._events is None:
            raise InvalidError("the waiter is closed: nobody would be woken")
        return self._loop.create_future()

    def _wake(self) -> None:
        try:
            self._agent.clear_events()
            # If nobody listens, notifications stay with the agent, which bounds them.
            if self._listening and self._take():
                self._hear(None)
        except ForebayError as error:  # The agent is closed, and all of its transfers have ended.
            self._hear(error)
            self._settle_all()
            self.close()
        else:
            self._settle_all()

    def _take(self) -> bool:
        """Takes the agent's notifications. Returns whether there is one now."""
        self._messages.extend(self._agent.take_notifications())
        return bool(self._messages)

    def _hear(self, error: ForebayError | None) -> None:
        """Wakes all listeners. One that finds nothing listens again."""
        for future in self._listening:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)

    def _settle_all(self) -> None:
        for transfer in list(self._under_way):
            self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        future = self._under_way[transfer]
        if future.done():
            return
        if transfer.state == "done":
            future.set_result(None)
        elif transfer.state == "failed":
            future.set_exception(transfer.error or RuntimeError("a transfer failed without an error"))
