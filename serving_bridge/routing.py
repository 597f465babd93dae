"""Which of several servers gets a request: the one that has computed the longest part of its prompt, unless it is busier."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 16
"""Tokens after which a prefix is remembered; vLLM caches prefixes in blocks of this many."""
REMEMBERED = 100_000
SLACK = 8
"""Requests that a server may have in flight beyond the least busy one before a known prefix no longer counts."""


class Affinity:
    """Remembers which server last computed which prefixes. Members of a group, and the turns of an episode, stay together."""

    def __init__(self) -> None:
        self._places: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, prompt_ids: Sequence[int], load: Mapping[str, int]) -> str:
        """One of the servers in `load`, which says how many requests each has in flight. ValueError when there is none."""
        if not load:
            raise ValueError("no server to choose from")
        keys = _prefixes(prompt_ids)
        least = min(load.values())
        known = (self._places[key] for key in reversed(keys) if key in self._places)
        found = next((place for place in known if place in load and load[place] <= least + SLACK), None)
        chosen = found or min(load, key=lambda place: (load[place], place))
        for key in keys:
            self._places[key] = chosen
            self._places.move_to_end(key)
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        return chosen

    def forget(self, place: str) -> None:
        """A server lost what it had computed."""
        for key in [key for key, held in self._places.items() if held == place]:
            del self._places[key]


def _prefixes(ids: Sequence[int]) -> list[bytes]:
    """A key for each prefix of whole blocks, and for the whole prompt, shortest first."""
    running, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(ids), BLOCK):
        running.update(b"".join(int(token).to_bytes(4, "little") for token in ids[start : start + BLOCK]))
        keys.append(running.copy().digest())
    return keys
