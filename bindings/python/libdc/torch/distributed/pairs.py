"""Messages between two ranks. They have a communicator for each direction and tag, made at the first message. So
messages of one kind keep their order, and those of different kinds never wait for each other."""

from __future__ import annotations

import collections
import threading
from typing import Any, Callable, Dict, List, Tuple

import libdc
import torch
import torch.distributed as dist

from .rendezvous import Rendezvous, poll
from .tensors import contiguous_output, flat_view
from .work import Lane, Work


class _Channel:
    """Messages from one rank to another, in order."""

    def __init__(self, rendezvous: Rendezvous, check: Callable[[], None], what: str, first: int, second: int,
                 messages: str) -> None:
        """check: raises where the group was aborted or a rank has died."""
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

    # A meeting can't be cut short, and a group may end while the other rank does not come. So the two agree in the
    # store before their first message. A call says "waits", under a key of each rank. The receiver makes the sender's
    # word "met". A rank whose time is over withdraws its own, and one that leaves makes it "left".

    def announce(self) -> None:
        """In the caller's thread, so that a call is known to the other rank before a barrier behind it."""
        with self._lock:
            if self._comm is None and not self._announced:
                self._announced = True
                self.rendezvous.store.set(self._key(self.rendezvous.rank), "waits")

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
        """Whether the two meet, or this rank gives up; else nothing."""
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
            return ask()

        self.announce()
        timeout, rank = self.rendezvous.timeout, self.rendezvous.rank
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
        """root: a rank of the group, one of the two."""
        place = 0 if root == self.first else 1
        if root == self.rendezvous.rank:
            data = tensor.contiguous()  # kept until it has gone: flat_view() is its address
            self._run(lambda comm: comm.broadcast(flat_view(data), place))
        else:
            with contiguous_output(tensor, keep=False) as data:
                self._run(lambda comm: comm.broadcast(flat_view(data), place))

    def swap(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Each of the two sends and receives at once: two gathers, started as one, in which one of them has a part."""
        own = 0 if self.rendezvous.rank == self.first else 1
        nothing = sent.new_empty(0)

        def run(comm: libdc.Comm) -> None:
            with contiguous_output(received, keep=False) as data, comm.group():
                for place in range(2):
                    whole = flat_view(sent if place == own else data)
                    counts = [0, 0]
                    counts[place] = whole.shape[0]
                    comm.all_gather(whole if place == own else flat_view(nothing), whole, counts)

        self._run(run)

    def _run(self, call: Callable[[libdc.Comm], Any]) -> None:
        try:
            call(self.comm())
        except libdc.Error as error:  # it knows the two as ranks 0 and 1
            raise libdc.Error(error.status, f"{self.messages} rank {self.first} to rank {self.second} (below they are "
                                            f"ranks 0 and 1): {error.text}") from None

    def abort(self, reason: str) -> None:
        if self._comm is not None:
            self._comm.abort(reason)

    def close(self) -> None:
        self.closing = True
        self.lane.close()
        if self._comm is not None:
            self._comm.close()


class Pairs:
    """All channels of a rank."""

    def __init__(self, rendezvous: Rendezvous, check: Callable[[], None]) -> None:
        self.rendezvous, self.check = rendezvous, check
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._channels: Dict[Tuple[str, int, int], _Channel] = {}
        self._lock = threading.Lock()
        # Of each tag: the ranks whose messages this one took, for recv_anysource.
        self._taken: Dict[int, "collections.Counter[int]"] = {}

    def _channel(self, what: str, first: int, second: int, messages: str) -> _Channel:
        with self._lock:
            channel = self._channels.get((what, first, second))
            if channel is None:
                channel = _Channel(self.rendezvous, self.check, what, first, second, messages)
                self._channels[what, first, second] = channel
            return channel

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        self._check_peer("send", "destination", to)
        self._note_sent(to, tag, f"{self.rank},")
        channel = self._channel(f"message.{tag}", self.rank, to, f"send (tag {tag}) from")
        channel.announce()

        def run() -> None:
            try:
                channel.send(tensor)
            except dist.DistError:  # withdrawn
                self._note_sent(to, tag, f"-{self.rank},")
                raise

        return channel.lane.submit(Work(run, [tensor]), False)

    def _note_sent(self, to: int, tag: int, entry: str) -> None:
        """For recv_anysource: a message, or with a minus one that was withdrawn."""
        if self.size > 2 and self.rendezvous.store.has_extended_api():
            self.rendezvous.store.append(f"sent/{to}/{tag}", entry)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        self._check_peer("recv", "source", source)
        with self._lock:
            self._taken.setdefault(tag, collections.Counter())[source] += 1
        return self._submit_recv(tensor, source, tag)

    def _submit_recv(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        channel = self._channel(f"message.{tag}", source, self.rank, f"recv (tag {tag}) from")
        channel.announce()

        def run() -> None:
            try:
                channel.recv(tensor)
            except dist.DistError:  # without a message
                with self._lock:
                    self._taken[tag][source] -= 1
                raise

        return channel.lane.submit(Work(run, [tensor], source), False)

    def recv_anysource(self, tensor: torch.Tensor, tag: int) -> Work:
        if self.size == 2:
            return self.recv(tensor, 1 - self.rank, tag)
        if not self.rendezvous.store.has_extended_api():
            raise NotImplementedError("libdc: recv from any source needs a store with append (TCPStore or HashStore); "
                                      "name the source")

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
            self._submit_recv(tensor, found[0], tag).wait()

        work = Work(receive, [tensor])
        return channel.lane.submit(work, False)

    def _claim(self, tag: int) -> List[int]:
        """The first rank whose message no recv has taken, as a list of one; none: an empty one."""
        key, store = f"sent/{self.rank}/{tag}", self.rendezvous.store
        if not store.check([key]):
            return []
        entries = store.get(key).decode().rstrip(",").split(",")
        with self._lock:
            gone = self._taken.setdefault(tag, collections.Counter()) + collections.Counter(
                int(entry[1:]) for entry in entries if entry[0] == "-")
            for source in (int(entry) for entry in entries if entry[0] != "-"):
                if not gone[source]:
                    self._taken[tag][source] += 1
                    return [source]
                gone[source] -= 1
        return []

    def exchange(self, send: Callable[[int], torch.Tensor], recv: Callable[[int], torch.Tensor]) -> None:
        """Each rank's part for each other one, in place. In round k the ranks whose numbers add up to k meet, so a
        round has all ranks at work. A part without elements is no message."""
        for k in range(self.size):
            peer = (k - self.rank) % self.size
            if peer == self.rank:
                continue
            sent, received = send(peer), recv(peer)
            if not (sent.numel() or received.numel()):
                continue
            channel = self._channel("exchange", min(peer, self.rank), max(peer, self.rank), "an exchange of")
            if sent.numel() and received.numel():
                channel.swap(sent, received)
            elif sent.numel():
                channel.broadcast(sent, self.rank)
            else:
                channel.broadcast(received, peer)

    def _check_peer(self, call: str, what: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{call}: {what} rank = {peer}, must be another rank of 0..{self.size - 1} (this is rank "
                             f"{self.rank})")

    def abort(self, reason: str) -> None:
        for channel in list(self._channels.values()):
            channel.abort(reason)

    def close(self) -> None:
        while self._channels:  # a recv from any source may still open one
            with self._lock:
                channel = self._channels.popitem()[1]
            channel.close()
