"""The processes of a run, seen from one of them: what process 0 says, and an end for all when one ends.

Process 0 decides and says it; the others wait for its word and do the same. No process looks at a file to choose what to do.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

MEET_SECONDS = 300.0
"""How long the first one waits for the last at a meeting. All have the same to do in between, so they are seconds apart."""
LOST_SECONDS = 60.0
"""Silence after which a process is taken to be gone."""
GRACE_SECONDS = 5.0
"""How long a process that is told to end may be in a call that does not return, as a collective with one that is gone."""
CLOSE_SECONDS = 60.0
"""How long it may then take to close what it opened."""
BEAT_SECONDS = 0.5
KEYS = "gspo_jax"


class TeamError(Exception):
    """The run of several processes cannot begin, or ended; the message names the process and the cause."""


class _Told(KeyboardInterrupt):
    """Another process ended: raised in the main thread wherever it is."""


class Team:
    """The processes of a run, seen from one of them. In its `with` block they watch each other; of one alone nothing is done.

    When one ends with an exception, all do: the others raise TeamError with its cause, or, where they cannot (a collective
    waits for one that is gone), print it and exit with status 1, at most `lost_after` + GRACE_SECONDS later.
    """

    def __init__(self, client: Any = None, process: int = 0, count: int = 1, lost_after: float = LOST_SECONDS) -> None:
        self.process, self.count, self.cause = process, count, ""
        self._client, self._lost_after, self._turn, self._met = client, lost_after, 0, ""
        self._stop, self._heard, self._noticed, self._ended = (threading.Event() for _ in range(4))
        self._watcher = threading.Thread(target=self._watch, name="team", daemon=True)
        self._beats: dict[str, tuple[str, float]] = {}

    @property
    def leads(self) -> bool:
        """Whether this is process 0: the one that rolls out, decides and writes."""
        return self.process == 0

    def note(self, text: str) -> None:
        """A line on standard error, of every process but the first."""
        if not self.leads:
            print(f"process {self.process} of {self.count}: {text}", file=sys.stderr, flush=True)

    # What all do

    def lead(self, what: str, payload: str = "", **words: Any) -> None:
        """Process 0: what all do next. Returns when all have heard it. TeamError naming who did not come to hear it."""
        if self.count == 1:
            return
        size = len(payload.encode())
        self._client.key_value_set(self._key("say", self._turn), json.dumps([what, size, words]))
        self._hear(size, payload)

    def next(self) -> tuple[str, str, dict[str, Any]]:
        """The others: what process 0 says, with its payload and words. Waits for it."""
        while True:
            with suppress(JaxRuntimeError):  # one second passed
                what, size, words = json.loads(self._client.blocking_key_value_get(self._key("say", self._turn), 1000))
                break
            if self._heard.is_set():
                self._noticed.set()
                raise _Told
        return what, self._hear(size, ""), words

    def _hear(self, size: int, payload: str) -> str:
        self.meet(f"turn {self._turn}")
        if self.leads and self._turn:
            self._client.key_value_delete(self._key("say", self._turn - 1))
        self._turn += 1
        return self._broadcast(payload, size) if size else ""

    def _broadcast(self, text: str, size: int) -> str:
        """The text of process 0. In an array of a power of two of bytes, so that few shapes are compiled."""
        array = np.zeros(1 << max(12, (size - 1).bit_length()), np.uint8)
        if self.leads:
            array[:size] = np.frombuffer(text.encode(), np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(array))[:size].tobytes().decode()

    def meet(self, name: str, value: str = "", seconds: float = MEET_SECONDS) -> list[str]:
        """Waits until all are here, and returns what each brought. TeamError naming who is not here `seconds` later."""
        if self.count == 1:
            return [value]
        key = self._key("meet", name)
        self._client.key_value_set(f"{key}/{self.process}", value)
        try:
            self._barrier(key, seconds)
            found = dict(self._client.key_value_dir_get(f"{key}/"))
            if self.leads and self._met:  # all have left the meeting before
                self._client.key_value_delete(self._met)
            self._met = key
            return [found[f"{key}/{process}"] for process in range(self.count)]
        except JaxRuntimeError as error:
            if "timed out" not in str(error):
                raise
            here = [name for name, _ in self._client.key_value_dir_get(f"{key}/")]
            missing = [str(process) for process in range(self.count) if f"{key}/{process}" not in here]
            late = f"process {', '.join(missing)} of {self.count} is" if missing else "some were"
            raise TeamError(f"{late} not at {name!r} within {seconds:g} s, while the others waited") from None

    def _barrier(self, key: str, seconds: float) -> None:
        """In a thread of its own, so that a signal gets through to this one."""
        failed: list[Exception] = []

        def wait() -> None:
            try:
                self._client.wait_at_barrier(key, int(seconds * 1000))
            except JaxRuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
        if failed:
            raise failed[0]

    # How all end

    def __enter__(self) -> "Team":
        if self.count > 1:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGUSR1, self._poked)
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.tell(error)
        self._stop.set()
        self._ended.set()
        if isinstance(error, _Told):
            raise TeamError(self.cause) from None

    def telling[T](self, work: Iterator[T]) -> Iterator[T]:
        """The items of `work`. The others hear of its exceptions before they are raised, so before anything is closed."""
        try:
            yield from work
        except BaseException as error:
            if isinstance(error, JaxRuntimeError) and self.count > 1:
                self._heard.wait(self._lost_after + 2 * BEAT_SECONDS)  # a collective failed: why is about to be known
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """All are to end, because of `error`; unless another cause was told before."""
        if self.count > 1 and not isinstance(error, _Told):
            ended = {KeyboardInterrupt: "was interrupted", GeneratorExit: "ended the run early"}
            text = ended.get(type(error)) or (str(error) or type(error).__name__)
            self._noticed.set()
            self._fail(text if isinstance(error, TeamError) else f"process {self.process} of {self.count}: {text}")

    def _fail(self, text: str) -> None:
        with suppress(JaxRuntimeError):  # another cause is there
            self._client.key_value_set(self._key("failed", 0), text)

    def leave(self, code: int) -> None:
        """The end of a process. With a `code` other than 0 the process ends here, the first one when the others have heard."""
        if self._client is None:
            return
        if code == 0:
            jax.distributed.shutdown()
            return
        self._ended.set()
        self._depart()
        end = time.monotonic() + GRACE_SECONDS + 2.0
        while self.leads and self.count > 1 and time.monotonic() < end and self._behind():
            time.sleep(0.1)
        os._exit(code)  # a shutdown would wait for those that are gone

    def _depart(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with suppress(JaxRuntimeError):
            self._client.key_value_set(self._key("ended", self.process), "", allow_overwrite=True)

    def _behind(self) -> bool:
        with suppress(JaxRuntimeError):
            return len(self._client.key_value_dir_get(self._key("ended", ""))) < self.count - len(self._lost())
        return False

    def _poked(self, *_: object) -> None:
        if not self._noticed.is_set() and not self._stop.is_set():
            self._noticed.set()
            raise _Told

    def _watch(self) -> None:
        beat, cause = 0, ""
        while not self._stop.wait(BEAT_SECONDS) and not cause:
            beat += 1
            try:
                self._client.key_value_set(self._key("alive", self.process), str(beat), allow_overwrite=True)
                cause = "".join(text for _, text in self._client.key_value_dir_get(self._key("failed", "")))
                lost = self._lost() if self.leads and not cause else []
            except JaxRuntimeError:
                cause, lost = f"process 0 of {self.count}, where the coordinator is, is gone", []
            if lost:
                cause = f"process {', '.join(lost)} of {self.count} is gone: not heard of for {self._lost_after:g} s"
                self._fail(cause)
        if cause and not self._stop.is_set():
            self._end(cause)

    def _lost(self) -> list[str]:
        """Those whose last sign of life is too old."""
        now = time.monotonic()
        for key, beat in self._client.key_value_dir_get(self._key("alive", "")):
            if self._beats.get(key, ("", 0.0))[0] != beat:
                self._beats[key] = beat, now
        return [key.rpartition("/")[2] for key, (_, since) in self._beats.items() if now - since > self._lost_after]

    def _end(self, cause: str) -> None:
        """Interrupts the main thread, unless it is ending already; where that does not help, ends the process."""
        if not self._noticed.is_set():
            self.cause = cause
        self._heard.set()
        if signal.getsignal(signal.SIGUSR1) == self._poked:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        if self._noticed.wait(GRACE_SECONDS) and self._ended.wait(CLOSE_SECONDS):
            return
        print(f"error: {cause}", file=sys.stderr, flush=True)
        self._depart()
        os._exit(1)

    @staticmethod
    def _key(*words: object) -> str:
        return "/".join((KEYS, *map(str, words)))


ALONE = Team()
