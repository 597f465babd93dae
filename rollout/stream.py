"""Steps of work begun ahead of the one that is asked for, and episodes in flight across them: both bounded, oldest first."""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

CLOSE_SECONDS = 10.0


class Stream[T]:
    """The results of `produce(step)` for `first <= step < end`, handed out in order while later steps are being produced.

    At most `1 + ahead` steps are begun and not yet handed out, and step n is begun by the call of `next` that asks for step
    `n - ahead` (or the first). A caller who publishes version s of the policy before it asks for step s thus gets nothing at
    step s that was sampled from a version below `s - ahead`, whatever takes how long. It waits; nothing is dropped.
    Use it from one event loop and one task; close it with `aclose`.
    """

    def __init__(self, produce: Callable[[int], Coroutine[Any, Any, T]], first: int, end: int, ahead: int) -> None:
        if ahead < 0:
            raise ValueError(f"ahead={ahead} must be >= 0 steps")
        self._produce, self._begun, self._end, self._ahead = produce, first, end, ahead
        self._tasks: dict[int, asyncio.Task[T]] = {}
        self._closed = False
        self.step = first
        """The step that `next` gives."""

    async def next(self) -> T:
        """The result of `step`, which then is one more.

        Raises what its production raised, after cancelling all others; ValueError when there is no further step and
        RuntimeError when the stream is closed. Cancelled, it leaves everything as it is and may be called again.
        """
        step = self.step
        if self._closed:
            raise RuntimeError(f"step {step} was asked for after the stream was closed")
        self._begin(min(step + self._ahead + 1, self._end))
        if step not in self._tasks:
            raise ValueError(f"there is no step {step}; the last one is {self._end - 1}")
        task = self._tasks[step]
        await asyncio.wait([task])
        if task.cancelled() or task.exception() is not None:
            await self.aclose()
        if task.cancelled():
            raise RuntimeError(f"the production of step {step} was cancelled")
        del self._tasks[step]
        self.step += 1
        return task.result()

    async def aclose(self) -> None:
        """Cancel what is being produced and wait for its end, at most CLOSE_SECONDS. Closing twice is closing once."""
        self._closed = True
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    def _begin(self, end: int) -> None:
        for step in range(self._begun, end):
            task = self._tasks[step] = asyncio.create_task(self._produce(step), name=f"step {step}")
            task.add_done_callback(lambda task, step=step: self._ended(step, task))
        self._begun = max(self._begun, end)

    def _ended(self, step: int, task: asyncio.Task[T]) -> None:
        """Nothing beyond a step that failed will be handed out, so nothing beyond it goes on or is begun."""
        if task.cancelled() or task.exception() is None:
            return
        self._end = min(self._end, step + 1)
        for later, running in self._tasks.items():
            if later > step:
                running.cancel()


class Slots:
    """Room for `count` holders at once. Of those who wait, the lowest order goes first, then the one who waits longest."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"count={count} must be >= 1")
        self._free, self._arrivals = count, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def at(self, order: int) -> AbstractAsyncContextManager[None]:
        """`async with` it, any number of times and at once, to wait for room and hold it."""
        return _At(self, order)

    async def acquire(self, order: int) -> None:
        """Return when there is room, which is the caller's until `release`. Cancelled, it holds nothing."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, self._arrivals, turn))
        self._arrivals += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # room was given in the very moment
                self.release()
            raise

    def release(self) -> None:
        """Give the room to the next who waits."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class _At(AbstractAsyncContextManager[None]):
    def __init__(self, slots: Slots, order: int) -> None:
        self._slots, self._order = slots, order

    async def __aenter__(self) -> None:
        await self._slots.acquire(self._order)

    async def __aexit__(self, *error: object) -> None:
        self._slots.release()
