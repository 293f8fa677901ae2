"""The order in which a phase of a step gathers parameters, learned once, and the prefetch that rests on it.

Every rank runs the same model, so every rank meets the same order. All that is decided here depends on the sequence of
gathers alone, never on time or on what memory is alive: so the ranks decide alike, and their collectives match."""

from __future__ import annotations

from typing import TYPE_CHECKING, List

from . import calls

if TYPE_CHECKING:
    from .root import Root


class Order:
    """One phase's order. begin(), advance() at each gather, end()."""

    def __init__(self, root: "Root") -> None:
        self.root = root
        self.depth = root.options.prefetch
        self.known: List[int] = []  # the last phase's gathers
        self.at = 0  # how many of them this phase has repeated
        self.asked = 0  # how many of them are gathered, or under way
        self.following = False
        self.seen: List[int] = []  # this phase's, once it left the known order

    def begin(self) -> None:
        self.at = self.asked = 0
        self.following = bool(self.known)
        self.seen = []

    def advance(self, id: int) -> None:
        """id is about to be gathered."""
        if self.following:
            at, known = self.at, self.known
            if at < len(known) and known[at] == id:
                self.at = at + 1
                end = min(at + 1 + self.depth, len(known))
                if end > self.asked:
                    self._fetch(known[max(self.asked, at) : end])
                    self.asked = end
                return
            self.following = False
            self.seen = known[:at]
        self.seen.append(id)

    def _fetch(self, ids: List[int]) -> None:
        root = self.root
        calls.prefetch(root.graph_id, root.entries, ids, root.options.param_dtype)

    def end(self) -> None:
        """The phase is over. What was fetched and not used goes back."""
        if not self.following:
            used = set(self.seen[self.at :])
            unused = [id for id in self.known[self.at : self.asked] if id not in used]
            self.known = self.seen
        else:
            unused = self.known[self.at : self.asked]
        for id in dict.fromkeys(unused):
            self.root.context.invalidate_gathered_param(id)
        self.at = self.asked = 0
        self.following = False
