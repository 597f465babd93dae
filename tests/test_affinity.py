"""Which of several servers gets a request."""

from collections import Counter

import numpy as np
import pytest

from serving_bridge.routing import BLOCK, REMEMBERED, SLACK, Affinity


def test_members_of_a_group_and_turns_of_an_episode_stay_together():
    affinity, load = Affinity(), Counter(a=0, b=0, c=0)
    prompts = [tuple(range(100 * group, 100 * group + 50)) for group in range(3)]
    places = []
    for prompt in prompts:
        chosen = [affinity.choose(prompt, load) for _ in range(4)]
        load.update(chosen)
        assert len(set(chosen)) == 1
        places.append(chosen[0])
    assert sorted(places) == ["a", "b", "c"]  # groups are spread
    for turn in range(1, 4):
        for prompt, place in zip(prompts, places, strict=True):
            longer = (*prompt, *range(1000, 1000 + 37 * turn))
            assert affinity.choose(longer, load) == place
            assert affinity.choose((*prompt[:-1], 7), load) == place  # most of it is there
    assert affinity.choose(prompts[0][:BLOCK], load) == places[0]


def test_a_prefix_does_not_outweigh_a_queue():
    affinity = Affinity()
    prompt = tuple(range(64))
    assert affinity.choose(prompt, {"a": 0, "b": 1}) == "a"
    assert affinity.choose(prompt, {"a": SLACK, "b": 0}) == "a"
    assert affinity.choose(prompt, {"a": SLACK + 1, "b": 0}) == "b"
    assert affinity.choose(prompt, {"a": 0, "b": 0}) == "b"  # where it was computed last


def test_load_is_balanced_within_the_slack():
    """500 requests that end in random order, half of them of one group."""
    draw, affinity, load = np.random.default_rng(0), Affinity(), Counter(a=0, b=0, c=0, d=0)
    running = []
    for i in range(500):
        prompt = tuple(range(32)) if i % 2 else (i, *range(31))
        chosen = affinity.choose(prompt, load)
        running.append(chosen)
        load[chosen] += 1
        assert max(load.values()) - min(load.values()) <= SLACK + 1
        if len(running) > 64:
            load[running.pop(int(draw.integers(len(running))))] -= 1
            if max(load.values()) - min(load.values()) > SLACK:
                break
    assert sum(load.values()) >= 60


def test_what_a_server_lost_is_forgotten():
    affinity = Affinity()
    for group in range(10):
        affinity.choose((group, *range(40)), {"a": 0} if group % 2 else {"b": 0})
    affinity.forget("a")
    for group in range(10):
        load = {"a": 1, "b": 0} if group % 2 else {"a": 0, "b": 1}
        assert affinity.choose((group, *range(40)), load) == "b"  # the idle one, or the one that has it still
    assert affinity.choose((0, *range(40)), {"a": 5}) == "a"  # the one that has it is not there
    with pytest.raises(ValueError, match="no server"):
        affinity.choose((1,), {})
    assert affinity.choose((), {"a": 0}) == "a"


def test_memory_of_prefixes_is_bounded():
    affinity = Affinity()
    for i in range(REMEMBERED // 100 + 50):
        affinity.choose((i, *range(BLOCK * 100 - 1)), {"a": 0})
    assert len(affinity._places) == REMEMBERED
