"""Transfers, notifications and messages in asyncio: event loops watch the descriptor of the agent
or communicator."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from ._notification import Notification
from ._warpwire import Agent, Comm, Request, Transfer


class _Watch:
    """Those that wait for one agent or communicator in one event loop. It watches a duplicate of
    the descriptor, so that the owner may be closed meanwhile."""

    def __init__(self, owner: Agent | Comm, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self.loop = loop
        self.descriptor: int | None = None
        # What each waits for; a check that raises ends the wait, too.
        self.checks: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def add(self, check: Callable[[], bool]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self.loop.create_future()
        if self.descriptor is None:
            self.descriptor = os.dup(self.owner.fileno())
            self.loop.add_reader(self.descriptor, self.readable, self.descriptor)
            self.owner._watches[self.loop] = self
        self.checks[future] = check
        # A task that is cancelled cancels the future.
        future.add_done_callback(self.remove)
        return future

    def remove(self, future: asyncio.Future[None]) -> None:
        self.checks.pop(future, None)
        if not self.checks and self.descriptor is not None:
            self.loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = None
            self.owner._watches.pop(self.loop, None)

    def readable(self, descriptor: int) -> None:
        if self.owner.closed:
            # All that was in progress has ended, and nothing raises the descriptor again. That of
            # a communicator cannot be read; nothing waits for it after this.
            with contextlib.suppress(OSError):
                os.eventfd_read(descriptor)
        else:
            self.owner.clear_events()
        # The event may be another loop's.
        wake(self.owner._watches, besides=self)
        self.look()

    def look(self) -> None:
        for future, check in list(self.checks.items()):
            if future.done():
                continue
            try:
                if check():
                    future.set_result(None)
            except Exception as error:
                future.set_exception(error)


def wake(
    watches: dict[asyncio.AbstractEventLoop, _Watch], besides: _Watch | None = None
) -> None:
    """Lets event loops look at what they wait for; from any thread."""
    for loop, watch in list(watches.items()):
        if watch is not besides:
            try:
                loop.call_soon_threadsafe(watch.look)
            except RuntimeError:  # that loop is closed
                watches.pop(loop, None)


async def _wait(owner: Agent | Comm, check: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    watch = owner._watches.get(loop) or _Watch(owner, loop)
    await watch.add(check)


async def wait_transfer(transfer: Transfer) -> None:
    """Waits until a transfer is done; raises the cause if it fails."""
    while not transfer._poll():
        await _wait(transfer._agent, transfer._poll)


async def wait_request(request: Request) -> int:
    """Waits until a request has completed; returns the bytes of its message."""
    while not request._poll():
        await _wait(request._comm, request._poll)
    return request.wait(0)


async def wait_notification(agent: Agent) -> Notification:
    """Takes the oldest notification. A task that is cancelled takes none."""
    while (arrived := agent.wait_notification(0)) is None:
        # It is taken by the task that is woken, so that none is lost with a cancelled one.
        await _wait(agent, lambda: True)
    return arrived
