"""The order in which a phase of a step gathers parameters, learned once, and the prefetch that rests on it.

Neighbours in that order are gathered in groups, one handshake a group, and so many groups ahead of their use as
shard(prefetch=...) says. Every rank runs the same model, so every rank meets the same order. All that is decided here
depends on the sequence of gathers alone, never on time or on what memory is alive: so the ranks decide alike, and their
collectives match."""

from __future__ import annotations

from typing import Callable, List, Sequence, Tuple


def groups_of(sizes: Sequence[int], full: int) -> List[Tuple[int, int]]:
    """Cuts a sequence of parameters, by their numbers of elements, into [begin, end) of groups. A group with `full`
    elements is full: a small parameter alone would cost its handshake and no more."""
    groups, begin, elements = [], 0, 0
    for k, size in enumerate(sizes):
        elements += size
        if elements >= full or k + 1 == len(sizes):
            groups.append((begin, k + 1))
            begin, elements = k + 1, 0
    return groups


class Order:
    """One phase's order. begin(), advance() at each gather, end().

    ahead, full      how many groups are under way, and when one is full (groups_of)
    sizes            of the parameters, by their numbers
    prefetch, drop   start to gather some parameters, in one handshake; free one that was not used"""

    def __init__(self, ahead: int, full: int, sizes: Sequence[int], prefetch: Callable[[List[int]], None],
                 drop: Callable[[int], None]) -> None:
        self.ahead, self.full, self.sizes, self.prefetch, self.drop = ahead, full, sizes, prefetch, drop
        self.known: List[int] = []  # the last phase's gathers
        self.groups: List[Tuple[int, int]] = []  # of them
        self.at = 0  # how many of them this phase has repeated
        self.group = 0  # the one that begins next
        self.asked = 0  # groups that are gathered, or under way
        self.ask_at = -1  # where the next group begins
        self.following = False
        self.seen: List[int] = []  # this phase's, once it left the known order

    def begin(self) -> None:
        self.at = self.asked = self.group = self.ask_at = 0
        self.following = bool(self.known)
        self.seen = []

    def advance(self, id: int) -> None:
        """id is about to be gathered."""
        if self.following:
            at, known = self.at, self.known
            if at < len(known) and known[at] == id:
                if at == self.ask_at:
                    self._ask()
                self.at = at + 1
                return
            self.following = False
            self.seen = known[:at]
        self.seen.append(id)

    def _ask(self) -> None:
        """The first parameter of a group is needed: from here on the groups behind it are under way too."""
        groups = self.groups
        self.group += 1
        until = min(self.group + self.ahead, len(groups))
        for k in range(self.asked, until):
            begin, end = groups[k]
            self.prefetch(self.known[begin:end])
        self.asked = until
        self.ask_at = groups[self.group][0] if self.group < len(groups) else -1

    def end(self) -> None:
        """The phase is over. What was fetched and not used goes back."""
        fetched = self.known[self.at : self.groups[self.asked - 1][1]] if self.asked else []
        if self.following:
            unused = fetched
        else:
            used = set(self.seen[self.at :])
            unused = [id for id in fetched if id not in used]
            self.known = self.seen
            self.groups = groups_of([self.sizes[id] for id in self.known], self.full)
        for id in dict.fromkeys(unused):
            self.drop(id)
        self.at = self.asked = 0
        self.following = False
        self.seen = []
