"""shard(..., unused="zero"): ranks that take different paths through a model.

A gather or a reduction is a collective. So a rank that does not run a module must still send its part of the weights,
and zeros for the gradient. All ranks go through one sequence of operations in each phase. Each rank's own operations
are a subsequence of it: before an operation, a rank fills in those that it passes over. An operation waits for nothing
but earlier ones of the sequence on other ranks, which those come to without waiting for a later one. So no two ranks
wait for each other. Gathers and reductions of a backward are in one sequence, since each can wait.

A phase can need an operation that is not ahead in the sequence: in the first step, or on a new path. Then the rank
fills in all the rest and goes on by rounds. In a round each rank names the operation that it needs next, or that its
phase is over, and all do what any of them has named. At the phase's end the ranks merge what they did into a new
sequence. A phase that all ranks run as recorded has one round, in which each says that it is at its end."""

from __future__ import annotations

import collections
import difflib
import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set

import libdc
import torch
from torch import Tensor

from .exec_order import ExecOrder

_END = -1 << 60  # in a round: this rank's phase is over
_WORD = 62  # parameters in an integer of a round's set


def reduction_of(id: int) -> int:
    """The operation that reduces a parameter's gradient. The one that gathers it is its number."""
    return ~id


class Fills(NamedTuple):
    """Calls of the model that an order makes."""

    gather: Callable[[Sequence[int]], None]  # starts to gather parameters, in one handshake
    drop: Callable[[int], None]  # gives one back that this rank does not use
    reduce: Callable[[int, Optional[Tensor]], bool]  # reduces a gradient; None: zeros, or what no_sync() has left. Says
    # whether this rank had a gradient
    all_gather_bytes: Callable[[bytes], List[bytes]]


class AgreedOrder:
    """One phase's sequence of operations, the same on all ranks. begin(), advance() at each gather, reduce() at each
    gradient, end(), or abort() after an error.

    gathers   prefetches those of the recorded sequence; its ids are this sequence's gathers
    comm      all ranks
    count     parameters of the model"""

    def __init__(self, gathers: ExecOrder, comm: libdc.Comm, count: int, fills: Fills) -> None:
        self.gathers, self.comm, self.count, self.fills = gathers, comm, count, fills
        self.recorded: List[int] = []
        self.repeated: Set[int] = set()  # gathered more than once, which prefetching does not do
        self.position = 0
        self.own: List[int] = []  # this rank's operations in this phase
        self.left = True  # the recorded sequence is over, or there is none
        self.differs = False  # a rank has left it
        self.reduced: Set[int] = set()  # parameters with a gradient on this rank, and after end() on any

    def begin(self) -> None:
        self.position, self.own, self.reduced, self.differs = 0, [], set(), False
        self.left = not self.recorded
        self.gathers.begin()

    def advance(self, id: int) -> None:
        """This rank is about to gather a parameter."""
        self.own.append(id)
        if self._is_ahead(id):
            self._fill_before(id)
            self._pass(id)
            if id in self.repeated:
                self.fills.gather([id])  # as ranks that fill it in do
        else:
            self._round(id, None)

    def reduce(self, id: int, grad: Tensor) -> None:
        """This rank has a gradient."""
        operation = reduction_of(id)
        self.own.append(operation)
        self.reduced.add(id)
        if self._is_ahead(operation):
            self._fill_before(operation)
            self._pass(operation)
            self.fills.reduce(id, grad)
        else:
            self._round(operation, grad)

    def end(self) -> None:
        """Fills in what is left, until all ranks are at their ends."""
        self._fill_rest()
        while not self._round(_END, None):
            pass
        self.gathers.end()
        if self.differs:
            self._merge()

    def abort(self) -> None:
        """The phase has failed on this rank. Nothing is exchanged any more."""
        self.gathers.end()

    # The recorded sequence

    def _is_ahead(self, operation: int) -> bool:
        if self.left:
            return False
        if self.recorded[self.position : self.position + 1] == [operation]:
            return True
        if operation in self.recorded[self.position :]:
            return True
        self._fill_rest()
        self.left = True
        return False

    def _fill_before(self, operation: int) -> None:
        while self.recorded[self.position] != operation:
            self._fill()

    def _fill_rest(self) -> None:
        while self.position < len(self.recorded):
            self._fill()

    def _fill(self) -> None:
        """The next operation, of which this rank needs nothing."""
        operation = self.recorded[self.position]
        self._pass(operation)
        if operation >= 0:
            self.fills.gather([operation])  # unless it is prefetched
            self.fills.drop(operation)
        else:
            self._reduce_nothing(reduction_of(operation))

    def _pass(self, operation: int) -> None:
        self.position += 1
        if operation >= 0:
            self.gathers.advance(operation)

    def _reduce_nothing(self, id: int) -> None:
        if self.fills.reduce(id, None):
            self.reduced.add(id)

    # Rounds

    def _round(self, operation: int, grad: Optional[Tensor]) -> bool:
        """Does what the ranks need next. Says whether all are at their ends."""
        table = self._exchange(operation)
        wanted = sorted({words[0] for words in table} - {_END})
        self.differs = self.differs or bool(wanted)
        gathers = [id for id in wanted if id >= 0]
        if gathers:
            self.fills.gather(gathers)
        for other in wanted:
            if other < 0 and other == operation:
                self.fills.reduce(reduction_of(other), grad)
            elif other < 0:
                self._reduce_nothing(reduction_of(other))
            elif other != operation:
                self.fills.drop(other)
        if not wanted:
            self.reduced = {id for id in range(self.count)
                            if any(words[1 + id // _WORD] >> id % _WORD & 1 for words in table)}
        return not wanted

    def _exchange(self, operation: int) -> List[List[int]]:
        """Every rank's operation, and the set of its gradients."""
        words = [operation] + [0] * (1 + self.count // _WORD)
        for id in self.reduced:
            words[1 + id // _WORD] |= 1 << id % _WORD
        table = torch.empty(self.comm.size * len(words), dtype=torch.int64)
        self.comm.all_gather(torch.tensor(words), table)
        rows: List[List[int]] = table.view(self.comm.size, len(words)).tolist()
        return rows

    def _merge(self) -> None:
        """A new sequence, which has every rank's, and the old one unless that makes it long."""
        texts = dict.fromkeys(self.fills.all_gather_bytes(json.dumps(self.own).encode()))
        sequences: List[List[int]] = [json.loads(text) for text in texts]
        merged = supersequence(sequences)
        with_old = supersequence([self.recorded, merged])
        self.recorded = with_old if len(with_old) <= 2 * len(merged) else merged
        gathers = [operation for operation in self.recorded if operation >= 0]
        self.repeated = {id for id, times in collections.Counter(gathers).items() if times > 1}
        self.gathers.record(gathers)


def supersequence(sequences: Sequence[List[int]]) -> List[int]:
    """A sequence that each of these is a subsequence of; a short one where they are alike."""
    result = sequences[0]
    for other in sequences[1:]:
        merged: List[int] = []
        for _, begin, end, first, last in difflib.SequenceMatcher(None, result, other, autojunk=False).get_opcodes():
            merged += result[begin:end]
            if result[begin:end] != other[first:last]:
                merged += other[first:last]
        result = merged
    return result


class WholeModelOrder:
    """The gathers of a forward at stages 1 and 2, where weights stay whole: all of the model's, in the order of their
    numbers, whatever this rank uses."""

    def __init__(self, groups: Sequence[List[int]], gather: Callable[[List[int]], None]) -> None:
        self.groups, self.gather = groups, gather

    def begin(self) -> None:
        for ids in self.groups:
            self.gather(ids)

    def advance(self, id: int) -> None:
        pass

    def end(self) -> None:
        pass

    abort = end
