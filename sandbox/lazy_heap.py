"""A heap whose entries can change and go: keys in, the key of least priority out."""

import heapq
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")


class LazyHeap(Generic[Key]):
    """Keys with priorities, least first.

    What was changed or discarded stays in the heap until it surfaces, or until it
    outnumbers the living: every call costs a logarithm of their number, amortized.
    """

    def __init__(self):
        self._priorities: dict[Key, Any] = {}
        self._entries: list[tuple[Any, Key]] = []

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, key: Key) -> bool:
        return key in self._priorities

    def items(self) -> Iterable[tuple[Key, Any]]:
        """(key, priority) of all, in no order."""
        return self._priorities.items()

    def set(self, key: Key, priority: Any) -> None:
        if self._priorities.get(key) == priority:
            return
        self._priorities[key] = priority
        heapq.heappush(self._entries, (priority, key))
        if len(self._entries) > 2 * len(self._priorities) + 64:
            self._entries = [(value, name) for name, value in self._priorities.items()]
            heapq.heapify(self._entries)

    def discard(self, key: Key) -> None:
        self._priorities.pop(key, None)

    def first(self) -> tuple[Any, Key] | None:
        """(priority, key) of the least, which stays."""
        entries, priorities = self._entries, self._priorities
        while entries:
            entry = entries[0]
            if priorities.get(entry[1]) == entry[0]:
                return entry
            heapq.heappop(entries)
        return None
