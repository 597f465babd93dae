"""Steps begun ahead: bounded in number and in age whatever the timing, in order, with clean failures; and shared slots."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import FakePolicy

from rollout import stream as streams
from rollout.runner import RolloutSettings, run_groups
from rollout.stream import Slots, Stream
from rollout.types import Problem, SamplingParams, Turn

STEPS = 8
pauses = st.lists(st.integers(0, 12), min_size=1, max_size=4)


async def pause(ticks: int) -> None:
    """Let everything else run `ticks` times."""
    for _ in range(ticks):
        await asyncio.sleep(0)


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; it must leave no task behind."""

    async def bounded() -> T:
        async with asyncio.timeout(20):
            result = await coroutine
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(bounded())


def counting(log: list[str], ticks: int = 3) -> Callable[[int], Coroutine[Any, Any, int]]:
    """A production that gives its step after a while, and says when it begins, ends and is cancelled."""

    async def produce(step: int) -> int:
        log.append(f"begin {step}")
        try:
            await pause(ticks)
        except asyncio.CancelledError:
            log.append(f"cancel {step}")
            raise
        log.append(f"end {step}")
        return step

    return produce


# Staleness


@given(
    st.integers(0, 3),
    st.integers(0, 5),
    st.lists(pauses, min_size=STEPS, max_size=STEPS),
    st.lists(st.tuples(*[st.integers(0, 12)] * 3), min_size=STEPS, max_size=STEPS),
)
def test_no_token_is_older_than_ahead_and_that_bound_is_reached(ahead, first, plays, trains):
    """Tokens are drawn at any moment of a production, weights published at any moment of an update: the version of a step's
    oldest token is what was published when the step `ahead` before it was asked for, never less."""

    async def main() -> None:
        version, open_steps = first, set[int]()

        async def produce(step: int) -> list[int]:
            open_steps.add(step)
            assert len(open_steps) <= 1 + ahead
            drawn = []
            for ticks in plays[step - first]:
                drawn.append(version)
                await pause(ticks)
            return [step, *drawn, version]

        stream = Stream(produce, first, first + STEPS, ahead)
        for asked in range(first, first + STEPS):
            update, publish, evaluate = trains[asked - first]
            assert stream.step == asked == version
            step, *drawn = await stream.next()
            open_steps.remove(step)
            assert step == asked
            assert step - min(drawn) == min(ahead, step - first)
            assert max(drawn) <= step
            await pause(update)
            version += 1
            await pause(publish + evaluate)

    run(main())


def test_without_ahead_nothing_runs_between_the_steps():
    async def main() -> list[str]:
        stream = Stream(counting(log := []), 0, 3, 0)
        for step in range(3):
            assert await stream.next() == step
            log.append("train")
            await pause(20)
        return log

    assert run(main()) == [line for n in range(3) for line in (f"begin {n}", f"end {n}", "train")]


def test_the_last_step_is_the_last_that_is_begun():
    async def main() -> list[str]:
        stream = Stream(counting(log := []), 5, 7, 4)
        assert [await stream.next(), await stream.next()] == [5, 6]
        with pytest.raises(ValueError, match="no step 7; the last one is 6"):
            await stream.next()
        return log

    assert sorted(run(main())) == ["begin 5", "begin 6", "end 5", "end 6"]


# Failure


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9), pauses)
def test_a_failure_surfaces_at_its_own_step_and_cancels_what_comes_later(ahead, broken, ticks, trains):
    """Steps before it are still handed out, however early it fails; steps after it stop at once and no new one is begun."""

    async def main() -> None:
        begun, done = set[int](), set[int]()

        async def produce(step: int) -> int:
            begun.add(step)
            if step == broken:
                await pause(ticks)
                raise ZeroDivisionError(f"step {step}")
            await (pause(5) if step < broken else asyncio.sleep(30))
            done.add(step)
            return step

        stream = Stream(produce, 0, STEPS, ahead)
        for step in range(broken):
            assert await stream.next() == step
            await pause(trains[step % len(trains)])
        with pytest.raises(ZeroDivisionError, match=f"step {broken}"):
            await stream.next()
        assert done == set(range(broken))
        assert begun <= set(range(min(broken + ahead + 1, STEPS)))
        assert asyncio.all_tasks() == {asyncio.current_task()}  # even before it is closed
        with pytest.raises(RuntimeError, match="closed"):
            await stream.next()
        await stream.aclose()

    run(main())


def test_a_failure_ahead_stops_what_comes_after_it_while_the_learner_learns():
    async def main() -> list[str]:
        log: list[str] = []
        fine = counting(log, 40)

        async def produce(step: int) -> int:
            if step != 1:
                return await fine(step) if step else step
            raise ZeroDivisionError

        stream = Stream(produce, 0, STEPS, 3)
        assert await stream.next() == 0
        await pause(10)
        assert log == ["begin 2", "begin 3", "cancel 2", "cancel 3"]
        with pytest.raises(ZeroDivisionError):
            await stream.next()
        return log

    assert run(main())[4:] == []


def test_two_failures_are_one_and_nothing_is_said_about_an_unseen_one(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async def produce(step: int) -> int:
            await pause(5 - step)
            raise ZeroDivisionError(f"step {step}")

        stream = Stream(produce, 0, STEPS, 2)
        with pytest.raises(ZeroDivisionError, match="step 0"):
            await stream.next()

    run(main())
    assert caplog.records == []


def test_a_production_cancelled_by_others_is_an_error_not_a_cancellation():
    async def main() -> None:
        async def produce(step: int) -> int:
            raise asyncio.CancelledError

        with pytest.raises(RuntimeError, match="step 0 was cancelled"):
            await Stream(produce, 0, 1, 0).next()

    run(main())


def test_a_negative_number_of_steps_ahead_is_refused():
    with pytest.raises(ValueError, match="ahead=-1"):
        Stream(counting([]), 0, 1, -1)


# The end


def test_who_stops_waiting_loses_nothing():
    async def main() -> list[str]:
        stream = Stream(counting(log := [], 10), 0, 3, 1)
        waiting = asyncio.create_task(stream.next())
        await pause(5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert [await stream.next() for _ in range(3)] == [0, 1, 2]
        return log

    assert sorted(run(main())) == [f"{what} {n}" for what in ("begin", "end") for n in range(3)]


@pytest.mark.parametrize("ticks", [0, 1, 4, 30])
def test_closing_at_any_moment_cancels_all_and_waits_for_their_end(ticks: int):
    async def main() -> None:
        cleaned = []

        async def produce(step: int) -> int:
            try:
                await asyncio.sleep(0 if step == 0 else 30)
            finally:
                await pause(3)
                cleaned.append(step)
            return step

        stream = Stream(produce, 0, 9, 2)
        await stream.next()
        await pause(ticks)
        await stream.aclose()
        assert sorted(cleaned) == [0, 1, 2]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await stream.aclose()
        with pytest.raises(RuntimeError, match="step 1 was asked for after the stream was closed"):
            await stream.next()

    run(main())


def test_a_stream_that_was_never_asked_closes_and_never_begins():
    async def main() -> list[str]:
        stream = Stream(counting(log := []), 0, 3, 2)
        await stream.aclose()
        return log

    assert run(main()) == []


def test_a_production_deaf_to_cancellation_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "CLOSE_SECONDS", 0.1)

    async def main() -> None:
        free, heard = asyncio.Event(), []

        async def produce(step: int) -> int:
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    heard.append(step)
            return step

        stream = Stream(produce, 0, 3, 1)
        waiting = asyncio.create_task(stream.next())
        await pause(2)
        async with asyncio.timeout(5):
            await stream.aclose()
        assert heard == [0, 1]
        free.set()
        assert await waiting == 0

    run(main())


# Slots


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 2), st.integers(0, 9)), min_size=4, max_size=20),
)
def test_slots_are_never_exceeded_and_never_lost(count, visitors):
    """Visitors of an order come and stay, and some of the latest are cancelled: waiting, or just given room, or inside."""

    async def main() -> None:
        slots, inside = Slots(count), 0

        async def visit(order: int, stay: int) -> None:
            nonlocal inside
            async with slots.at(order):
                inside += 1
                assert inside <= count
                try:
                    await pause(stay)
                finally:
                    inside -= 1

        tasks = []
        for order, stay, wait, cancelled in visitors:
            tasks.append(asyncio.create_task(visit(order, stay)))
            await pause(wait)
            if cancelled < min(len(tasks), 5):
                tasks[-1 - cancelled].cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        async with asyncio.timeout(1):
            for _ in range(count):
                await slots.acquire(0)

    run(main())


def test_who_is_cancelled_in_the_moment_of_being_given_room_passes_it_on():
    async def main() -> None:
        slots = Slots(1)
        await slots.acquire(0)
        first, second = (asyncio.create_task(slots.acquire(order)) for order in (0, 1))
        await pause(2)
        slots.release()
        first.cancel()
        async with asyncio.timeout(1):
            await second
        assert first.cancelled()

    run(main())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_oldest_step_goes_first_and_then_the_one_who_waits_longest(orders):
    async def main() -> list[tuple[int, int]]:
        slots, entered = Slots(1), []

        async def visit(order: int, number: int) -> None:
            async with slots.at(order):
                entered.append((order, number))
                await pause(2)

        await slots.acquire(0)
        tasks = [asyncio.create_task(visit(order, number)) for number, order in enumerate(orders)]
        await pause(2)
        slots.release()
        await asyncio.gather(*tasks)
        return entered

    assert run(main()) == sorted((order, number) for number, order in enumerate(orders))


def test_room_is_at_least_one():
    with pytest.raises(ValueError, match="count=0"):
        Slots(0)


class Policy(FakePolicy):
    """Records a turn for every attempt without being called."""

    def open(self, sampling: SamplingParams) -> tuple[str, str]:
        trace_id, url = super().open(sampling)
        self.turns[trace_id].append(Turn((1,), (2,), (-0.5,), (0,), "stop"))
        return trace_id, url


def test_calls_that_share_slots_share_one_bound_and_waiting_is_no_part_of_an_attempt():
    """Two steps in flight doubled `max_concurrent`; what waited for a connection timed out. Three at once, 12 rounds of 0.1 s,
    each attempt within 0.8 s."""
    settings = RolloutSettings("e", "p", "m", SamplingParams(4), max_attempts=1, timeout_s=0.8, max_concurrent=3)
    playing, played = 0, list[int]()

    class App:
        async def rollout(self, request: Any) -> dict[str, float]:
            nonlocal playing
            playing += 1
            assert playing <= 3
            await asyncio.sleep(0.1)
            playing -= 1
            played.append(request["env"]["seed"])
            return {"reward": 1.0}

    async def main() -> None:
        slots, policy = Slots(3), Policy(lambda *_: "1")
        calls = [
            run_groups(App(), policy, [Problem(step)] * 3, 6, settings, step=step, slots=slots.at(step)) for step in (1, 0)
        ]
        for groups in await asyncio.gather(*calls):
            assert {t.status for group in groups for t in group.trajectories} == {"done"}

    run(main())
    assert played == [1] * 3 + [0] * 18 + [1] * 15
