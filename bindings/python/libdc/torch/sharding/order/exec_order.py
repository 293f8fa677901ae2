"""The order in which a phase of a step gathers parameters: recorded once, then used to prefetch.

Neighbours in that order are gathered in groups, with one handshake each, and shard(prefetch=...) says how many groups
ahead of their use. Every rank runs the same model, so every rank has the same order. Decisions depend only on the
sequence of gathers, never on time or free memory. So all ranks decide alike, and their collectives match."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Sequence, Tuple


class Size(NamedTuple):
    """A parameter's elements, and the number of the group in which the program put it; 0: none."""

    elements: int
    group: int


def split_into_groups(sizes: Sequence[Size], group_size: int) -> List[Tuple[int, int]]:
    """Splits a sequence of parameters into groups, as [begin, end). A group is full with `group_size` elements, so that
    small parameters share a handshake. A group that the program made stays together, without others."""
    groups, begin, elements = [], 0, 0
    for k, size in enumerate(sizes):
        elements += size.elements
        last = k + 1 == len(sizes) or sizes[k + 1].group != size.group
        if last or (elements >= group_size and not size.group):
            groups.append((begin, k + 1))
            begin, elements = k + 1, 0
    return groups


class ExecOrder:
    """One phase's order. Call begin(), advance() at each gather, then end().

    lookahead        number of groups to gather ahead of use
    group_size       elements of a full group, see split_into_groups()
    sizes            of the parameters, by id
    prefetch, drop   start to gather some parameters, with one handshake; drop one that was not used
    take             takes the parameters of the group whose use begins"""

    def __init__(self, lookahead: int, group_size: int, sizes: Sequence[Size], prefetch: Callable[[List[int]], None],
                 drop: Callable[[int], None], take: Callable[[List[int]], None]) -> None:
        self.lookahead, self.group_size, self.sizes = lookahead, group_size, sizes
        self.prefetch, self.drop, self.take = prefetch, drop, take
        self.recorded: List[int] = []  # the gathers of the last phase
        self.groups: List[Tuple[int, int]] = []  # the groups of recorded gathers
        self.position = 0  # number of recorded gathers that this phase has repeated
        self.group = 0  # index of the group that begins next
        self.num_prefetched = 0  # groups that are gathered or being gathered
        self.next_trigger = -1  # position at which the next group begins
        self.matches_recorded = False
        self.current: List[int] = []  # this phase's gathers, once they differ from the recorded ones

    def begin(self) -> None:
        self.position = self.num_prefetched = self.group = self.next_trigger = 0
        self.matches_recorded = bool(self.recorded)
        self.current = []

    def advance(self, id: int) -> None:
        """Called before parameter id is gathered."""
        if self.matches_recorded:
            at, recorded = self.position, self.recorded
            if at < len(recorded) and recorded[at] == id:
                if at == self.next_trigger:
                    self._prefetch_next()
                self.position = at + 1
                return
            self.matches_recorded = False
            self.current = recorded[:at]
        self.current.append(id)

    def _prefetch_next(self) -> None:
        """Called at the first parameter of a group. Starts to gather this group and the next `lookahead` ones, unless
        they are started already, and takes this group."""
        groups = self.groups
        begins, ends = groups[self.group]
        self.group += 1
        until = min(self.group + self.lookahead, len(groups))
        for k in range(self.num_prefetched, until):
            begin, end = groups[k]
            self.prefetch(self.recorded[begin:end])
        self.num_prefetched = until
        self.next_trigger = groups[self.group][0] if self.group < len(groups) else -1
        self.take(self.recorded[begins:ends])

    def record(self, ids: List[int]) -> None:
        """Records the gathers of the next phases."""
        self.recorded = ids
        self.groups = split_into_groups([self.sizes[id] for id in ids], self.group_size)

    def end(self) -> None:
        """Ends the phase. Drops weights that were prefetched and not used."""
        fetched = self.recorded[self.position : self.groups[self.num_prefetched - 1][1]] if self.num_prefetched else []
        if self.matches_recorded:
            unused = fetched
        else:
            used = set(self.current[self.position :])
            unused = [id for id in fetched if id not in used]
            self.record(self.current)
        for id in dict.fromkeys(unused):
            self.drop(id)
        self.position = self.num_prefetched = 0
        self.matches_recorded = False
        self.current = []

    abort = end
