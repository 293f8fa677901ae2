"""shard(..., unused="zero"): ranks that take different paths through a model.

Gathers and reductions are collectives. So a rank that does not run a module must still send its part of the weights,
and zeros for the gradient. In each phase all ranks go through one sequence of operations. Each rank's own operations
are a subsequence of it: before an operation, a rank fills in those that it skips. An operation waits only for earlier
ones of the sequence on other ranks, which do not wait for later ones. So there is no deadlock. A backward's gathers and
reductions are in the same sequence, since each can wait.

In the first step, or on a new path, a phase can need an operation that is not ahead in the sequence. Then the rank
fills in the rest of the sequence, and continues by rounds. In a round each rank names the operation that it needs next,
or says that its phase is over, and all ranks perform every named operation. At the phase's end the ranks merge their
operations into a new sequence. If all ranks follow the recorded sequence, there is one round, in which each says that
its phase is over."""

from __future__ import annotations

import collections
import difflib
import json
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set

import libdc
import torch
from torch import Tensor

from .exec_order import ExecOrder

_END = -1 << 60  # in a round: the rank's phase is over
_WORD = 62  # bits (parameters) used in each integer of a round's set


def reduction_of(id: int) -> int:
    """The operation that reduces a parameter's gradient. The operation that gathers the parameter is its number."""
    return ~id


class Fills(NamedTuple):
    """Functions of the model that an order calls."""

    gather: Callable[[Sequence[int]], None]  # starts to gather parameters, with one handshake
    drop: Callable[[int], None]  # drops one that this rank does not use
    reduce: Callable[[int, Optional[Tensor]], bool]  # reduces a gradient; None: zeros, or what no_sync() has left. Says
    # whether this rank had a gradient
    all_gather_bytes: Callable[[bytes], List[bytes]]


class AgreedOrder:
    """One phase's sequence of operations, equal on all ranks. Call begin(), advance() at each gather, reduce() at each
    gradient, then end(), or abort() after an error.

    gathers   prefetches those of the recorded sequence; its ids are this sequence's gathers
    comm      all ranks
    count     parameters of the model"""

    def __init__(self, gathers: ExecOrder, comm: libdc.Comm, count: int, fills: Fills) -> None:
        self.gathers, self.comm, self.count, self.fills = gathers, comm, count, fills
        self.recorded: List[int] = []
        self.repeated: Set[int] = set()  # gathered more than once, which prefetches cannot be
        self.position = 0
        self.own: List[int] = []  # this rank's operations in this phase
        self.left = True  # the recorded sequence was left or is over, or there is none
        self.differs = False  # whether a rank has left it
        self.reduced: Set[int] = set()  # parameters with a gradient on this rank, and after end() on any

    def begin(self) -> None:
        self.position, self.own, self.reduced, self.differs = 0, [], set(), False
        self.left = not self.recorded
        self.gathers.begin()

    def advance(self, id: int) -> None:
        """Called before this rank gathers a parameter."""
        self.own.append(id)
        if self._is_ahead(id):
            self._fill_before(id)
            self._pass(id)
            if id in self.repeated:
                self.fills.gather([id])  # as on ranks that fill it in
        else:
            self._round(id, None)

    def reduce(self, id: int, grad: Tensor) -> None:
        """Called when this rank has a gradient."""
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
        """Fills in the remaining operations, until all ranks' phases are over."""
        self._fill_rest()
        while not self._round(_END, None):
            pass
        self.gathers.end()
        if self.differs:
            self._merge()

    def abort(self) -> None:
        """Called when the phase has failed on this rank. Nothing is exchanged any more."""
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
        """Fills in the next operation, which this rank does not need."""
        operation = self.recorded[self.position]
        self._pass(operation)
        if operation >= 0:
            self.fills.gather([operation])  # does nothing if it is prefetched
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
        """Performs the operations that ranks need next. Returns whether all ranks' phases are over."""
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
        """Exchanges every rank's operation, and the set of its gradients."""
        words = [operation] + [0] * (1 + self.count // _WORD)
        for id in self.reduced:
            words[1 + id // _WORD] |= 1 << id % _WORD
        table = torch.empty(self.comm.size * len(words), dtype=torch.int64)
        self.comm.all_gather(torch.tensor(words), table)
        rows: List[List[int]] = table.view(self.comm.size, len(words)).tolist()
        return rows

    def _merge(self) -> None:
        """Records a new sequence that contains every rank's, and the old one unless that makes it too long."""
        texts = dict.fromkeys(self.fills.all_gather_bytes(json.dumps(self.own).encode()))
        sequences: List[List[int]] = [json.loads(text) for text in texts]
        merged = supersequence(sequences)
        with_old = supersequence([self.recorded, merged])
        self.recorded = with_old if len(with_old) <= 2 * len(merged) else merged
        gathers = [operation for operation in self.recorded if operation >= 0]
        self.repeated = {id for id, times in collections.Counter(gathers).items() if times > 1}
        self.gathers.record(gathers)


def supersequence(sequences: Sequence[List[int]]) -> List[int]:
    """A sequence of which each of these is a subsequence. It is short if they are similar."""
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
    """The gathers of a forward at stages 1 and 2, where weights stay whole: all parameters in the order of their
    numbers, whether or not this rank uses them."""

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
