"""Writes the last steps in Chrome's trace format, for https://ui.perfetto.dev: ranks are processes, streams are
threads."""
from __future__ import annotations

import json
import os
from typing import Any, Dict, Iterable, List

from trainer import Span

_LANES = {0: "caller", 1: "gather stream", 2: "reduce stream", 3: "offload stream", 4: "reload stream"}
_LOOP = 9


def _events(rank: int, spans: Iterable[Span], events: Iterable[Any], names: List[str]) -> List[Dict[str, Any]]:
    lanes = {_LOOP: "training loop", **_LANES}
    out: List[Dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for order, (lane, name) in enumerate(lanes.items()):
        for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": order})):
            out.append({"ph": "M", "name": key, "pid": rank, "tid": lane, "args": value})

    def work(name: str, lane: int, begin: int, end: int, **args: Any) -> None:
        out.append({"ph": "X", "name": name, "pid": rank, "tid": lane, "ts": begin / 1e3, "dur": (end - begin) / 1e3,
                    "args": args})

    for name, begin, end in spans:
        work(name, _LOOP, begin, end)
    for e in events:
        of = {"parameter": names[e.id]} if 0 <= e.id < len(names) else {}
        work(e.op, e.lane, e.begin_ns, e.end_ns, bytes=e.bytes, **of)
    return out


def write(path: str, group: Any, spans: Iterable[Span], events: Iterable[Any], names: List[str]) -> None:
    """Every rank calls it; rank 0 joins the ranks' parts into one file. names: the parameters' names, by id."""
    with open(f"{path}.{group.rank}", "w") as f:
        json.dump(_events(group.rank, spans, events, names), f)
    group.barrier()
    if group.rank == 0:
        joined: List[Dict[str, Any]] = []
        for rank in range(group.size):
            with open(f"{path}.{rank}") as f:
                joined += json.load(f)
            os.remove(f"{path}.{rank}")
        with open(path + ".part", "w") as f:
            json.dump({"traceEvents": joined, "displayTimeUnit": "ms"}, f)
        os.rename(path + ".part", path)
    group.barrier()
