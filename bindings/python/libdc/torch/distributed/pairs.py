"""Messages between two ranks. Each direction and tag has its own communicator, made at the first message. So messages
with the same direction and tag keep their order, and others never wait for each other."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, Set, Tuple

import libdc
import torch
import torch.distributed as dist

from .rendezvous import Rendezvous, poll
from .tensors import contiguous_output, flat_view
from .work import Lane, Work, check_process

_WATCH_SECONDS = 0.2


class _Channel:
    """Messages from one rank to another, in order."""

    def __init__(self, rendezvous: Rendezvous, check: Callable[[], None], what: str, first: int, second: int,
                 messages: str) -> None:
        """check: raises if the group was aborted or a rank has died."""
        self.rendezvous, self.check, self.what, self.first, self.second = rendezvous, check, what, first, second
        self.messages = messages
        self.lane = Lane()
        self.closing = False
        self._announced = False
        self._lock = threading.Lock()
        self._comm: Any = None

    def comm(self) -> libdc.Comm:
        if self._comm is None:
            self._comm = self.rendezvous.pair(self.what, self.first, self.second)
        return self._comm

    # A rendezvous can't be interrupted, and a group may end before the other rank comes. So the two ranks agree in the
    # store before their first message. Each has a key, which a call sets to "waits". The receiver changes the sender's
    # key to "met". A rank that times out withdraws its key, and one that leaves sets it to "left".

    def announce(self) -> None:
        """Runs in the caller's thread, so that the other rank sees the call before a barrier that follows it. A store
        on TCP does not acknowledge set(), and may apply it after the other rank asks. So this waits for the answer to
        check()."""
        with self._lock:
            if self._comm is None and not self._announced:
                self._announced = True
                store, key = self.rendezvous.store, self._key(self.rendezvous.rank)
                store.set(key, "waits")
                store.check([key])

    def send(self, tensor: torch.Tensor) -> None:
        if self._comm is None:
            self._agree(self._ask_receiver, "received")
        self.broadcast(tensor, self.first)

    def recv(self, tensor: torch.Tensor) -> None:
        if self._comm is None:
            self._agree(self._ask_sender, "sent")
        self.broadcast(tensor, self.first)

    def _key(self, rank: int) -> str:
        return f"first/{self.what}/{self.first}/{self.second}/{rank}"

    def _word(self, rank: int) -> bytes:
        store, key = self.rendezvous.store, self._key(rank)
        return bytes(store.get(key)) if store.check([key]) else b""

    def _ask_receiver(self) -> bytes:
        """b"met" if the two meet, b"left" if the rank must give up, else b""."""
        if self._word(self.first) == b"met":
            return b"met"
        word = self._word(self.second)
        return b"left" if word == b"left" or (self.closing and word != b"waits") else b""

    def _ask_sender(self) -> bytes:
        word = self._word(self.first)
        if word == b"waits":
            word = bytes(self.rendezvous.store.compare_set(self._key(self.first), "waits", "met"))
        return word if word == b"met" else b"left" if word == b"left" or self.closing else b""

    def _agree(self, ask: Callable[[], bytes], verb: str) -> None:
        def answer() -> bytes:
            try:
                self.check()
            except libdc.Error as error:
                raise libdc.Error(error.status, f"{self.messages} rank {self.first} to rank {self.second}: "
                                                f"{error.text}") from None
            found = ask()
            if not found and self.rendezvous.has_ended(peer):
                raise libdc.Error(libdc.Status.E_PEER_DEAD, f"{self.messages} rank {self.first} to rank {self.second}: "
                                                            f"rank {peer} died (its process ended)")
            return found

        self.announce()
        timeout, rank = self.rendezvous.timeout, self.rendezvous.rank
        peer = self.second if rank == self.first else self.first
        found = poll(answer, timeout)
        if found == b"met":
            return
        with self._lock:
            self._announced = False
        word = self.rendezvous.store.compare_set(self._key(rank), "waits", "left" if found else "withdrawn")
        if bytes(word) != b"met":
            how = (f"the process group was destroyed before anything was {verb}" if found else
                   f"nothing was {verb} within {timeout.total_seconds():g} s")
            raise dist.DistError(f"libdc: {self.messages} rank {self.first} to rank {self.second}: {how}")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if root == self.rendezvous.rank:
            self.move(flat_view(tensor.contiguous()), root)
        else:
            with contiguous_output(tensor, keep=False) as data:
                self.move(flat_view(data), root)

    def move(self, data: libdc.Tensor, root: int) -> None:
        """Sends data, or receives it, from rank root of the group, which is one of the two."""
        try:
            self.comm().broadcast(data, 0 if root == self.first else 1)
        except libdc.Error as error:  # its text calls the two ranks 0 and 1
            raise libdc.Error(error.status, f"{self.messages} rank {self.first} to rank {self.second} (below they are "
                                            f"ranks 0 and 1): {error.text}") from None

    def abort(self, reason: str) -> None:
        if self._comm is not None:
            with contextlib.suppress(libdc.Error):  # end() may have closed it
                self._comm.abort(reason)

    def end(self) -> bool:
        """Takes no more messages. Returns True once all are done, and the other rank knows that no more come."""
        self.closing = True
        if not self.lane.end():
            return False
        if self._comm is not None:
            self._comm.close()
        return True


class Pairs:
    """All channels of a rank."""

    def __init__(self, rendezvous: Rendezvous, check: Callable[[], None]) -> None:
        self.rendezvous, self.check = rendezvous, check
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._channels: Dict[Tuple[str, int, int], _Channel] = {}
        self._closing = self._watched = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        # For recv_anysource: by tag, how many messages of each rank this one took.
        self._taken: Dict[int, "collections.Counter[int]"] = {}
        self._noted: Set[str] = set()  # keys that the store is known to have

    def _channel(self, what: str, first: int, second: int, messages: str) -> _Channel:
        check_process(self._process)
        with self._lock:
            channel = self._channels.get((what, first, second))
            if channel is None:
                channel = _Channel(self.rendezvous, self.check, what, first, second, messages)
                channel.closing = self._closing
                self._channels[what, first, second] = channel
            if not self._watched:
                threading.Thread(target=_watch, args=(weakref.ref(self),), name="libdc abort", daemon=True).start()
                self._watched = True
            return channel

    # In the methods below, blocking means that the caller waits at once.

    def send(self, tensor: torch.Tensor, to: int, tag: int, blocking: bool = False) -> Work:
        self._check_peer("send", "destination", to)
        channel = self._channel(f"message.{tag}", self.rank, to, f"send (tag {tag}) from")
        channel.announce()
        self._note_sent(to, tag, 1)

        def run() -> None:
            try:
                channel.send(tensor)
            except dist.DistError:  # the message was withdrawn
                self._note_sent(to, tag, -1)
                raise

        return channel.lane.submit(Work(run, [tensor]), blocking)

    def _note_sent(self, to: int, tag: int, count: int) -> None:
        """For recv_anysource: counts a sent message, or with -1 a withdrawn one. It is a counter, so that the store
        does not grow with each message."""
        if self.size > 2:
            self.rendezvous.store.add(f"sent/{to}/{tag}/{self.rank}", count)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, blocking: bool = False) -> Work:
        self._check_peer("recv", "source", source)
        check_process(self._process)
        with self._lock:
            self._taken.setdefault(tag, collections.Counter())[source] += 1
        return self._submit_recv(tensor, source, tag, blocking)

    def _submit_recv(self, tensor: torch.Tensor, source: int, tag: int, blocking: bool) -> Work:
        channel = self._channel(f"message.{tag}", source, self.rank, f"recv (tag {tag}) from")
        channel.announce()

        def run() -> None:
            try:
                channel.recv(tensor)
            except dist.DistError:  # no message came
                with self._lock:
                    self._taken[tag][source] -= 1
                raise

        return channel.lane.submit(Work(run, [tensor], source), blocking)

    def recv_anysource(self, tensor: torch.Tensor, tag: int, blocking: bool = False) -> Work:
        if self.size == 2:
            return self.recv(tensor, 1 - self.rank, tag, blocking)
        channel = self._channel(f"any.{tag}", self.rank, self.rank, "")

        def claim() -> List[int]:
            self.check()
            return self._claim(tag) or ([-1] if channel.closing else [])

        def receive() -> None:
            found = poll(claim, self.rendezvous.timeout)
            if not found or found == [-1]:
                raise dist.DistError(f"libdc: recv from any source (tag {tag}): no rank sent " + (
                    "before the process group was destroyed" if found else
                    f"within {self.rendezvous.timeout.total_seconds():g} s"))
            work.source = found[0]
            self._submit_recv(tensor, found[0], tag, True)

        work = Work(receive, [tensor])
        return channel.lane.submit(work, blocking)

    def _claim(self, tag: int) -> List[int]:
        """A list with one rank that has a message that no recv has taken, or an empty list."""
        sources, store = [rank for rank in range(self.size) if rank != self.rank], self.rendezvous.store
        keys = {source: f"sent/{self.rank}/{tag}/{source}" for source in sources}
        self._noted.update(key for key in keys.values() if key not in self._noted and store.check([key]))
        sent = {source: int(store.get(key)) if key in self._noted else 0 for source, key in keys.items()}
        with self._lock:
            taken = self._taken.setdefault(tag, collections.Counter())
            ready = [source for source in sources if sent[source] > taken[source]]
            ready = [min(ready, key=taken.__getitem__)] if ready else []  # the least served, so that no rank starves
            taken.update(ready)
            return ready

    def _check_peer(self, call: str, what: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{call}: {what} rank = {peer}, must be another rank of 0..{self.size - 1} (this is rank "
                             f"{self.rank})")

    def pass_on_abort(self) -> bool:
        """Ends running messages if a rank has aborted the group, since their communicators do not notice that. Returns
        whether there can be more messages."""
        try:
            self.check()
        except libdc.Error as error:
            if error.status == libdc.Status.E_ABORTED:
                self.abort(error.text)
        return not self._closing or bool(self._channels)

    def abort(self, reason: str) -> None:
        for channel in list(self._channels.values()):
            channel.abort(reason)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            for channel in self._channels.values():
                channel.closing = True
        self._close("any.")  # these may still open and use the other channels
        self._close("")

    def _close(self, what: str) -> None:
        """Closes channels, all at the same time. A receive without an answer ends when the other rank ends its side,
        and that rank may wait for this rank's side of another channel."""
        while True:
            with self._lock:
                channels = [item for item in self._channels.items() if item[0][0].startswith(what)]
            ended = [key for key, channel in channels if channel.end()]
            for key in ended:
                del self._channels[key]
            if len(ended) == len(channels):
                return
            time.sleep(0.001)


def _watch(pairs: "weakref.ref[Pairs]") -> None:
    """The body of a thread that watches for an abort, since the threads with messages are blocked."""
    goes_on = True
    while goes_on:
        time.sleep(_WATCH_SECONDS)
        these = pairs()
        goes_on = these is not None and these.pass_on_abort()
        del these
