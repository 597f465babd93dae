"""An event loop in a thread of its own, so that a plain script, a Jupyter cell and a command drive the same coroutines."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

CLOSE_SECONDS = 10.0


class Background:
    """Runs coroutines to their end from synchronous code. `close` cancels what is left and joins the thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Interrupted (Ctrl-C), it is cancelled and given time to clean up before this raises."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                with suppress(Exception):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(CLOSE_SECONDS)
            raise

    def enter[T](self, manager: AbstractAsyncContextManager[T]) -> T:
        """What the context manager yields; leave it with `leave`."""
        return self.run(manager.__aenter__())

    def leave(self, manager: AbstractAsyncContextManager[Any]) -> None:
        """Close the context manager, without passing on an exception."""
        self.run(manager.__aexit__(None, None, None))

    def close(self) -> None:
        """Cancel every task, stop the loop, join the thread; bounded by CLOSE_SECONDS."""

        async def drain() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_asyncgens()

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(drain(), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
