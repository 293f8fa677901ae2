"""The last steps as a file in Chrome's trace format, for https://ui.perfetto.dev: ranks are processes, streams lanes."""
from __future__ import annotations

import json
import os
from typing import Any, Callable, Dict, Iterable, List

from trainer import Span

_LANES = {0: "caller", 1: "gather stream", 2: "reduce stream", 3: "offload stream", 4: "reload stream"}
_STEP_LANE = 9


def _events(rank: int, spans: Iterable[Span], events: Iterable[Any], names: Dict[int, str]) -> List[Dict[str, Any]]:
    out: List[Dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
                                 {"ph": "M", "name": "thread_name", "pid": rank, "tid": _STEP_LANE,
                                  "args": {"name": "training loop"}},
                                 {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": _STEP_LANE,
                                  "args": {"sort_index": -1}}]
    for lane, name in _LANES.items():
        out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
    for name, begin, end in spans:
        out.append({"ph": "X", "name": name, "pid": rank, "tid": _STEP_LANE, "ts": begin / 1e3, "dur": (end - begin) / 1e3})
    for e in events:
        args = {"bytes": e.bytes, "graph": e.graph_id, "id": e.id}
        if e.id in names:
            args["parameter"] = names[e.id]
        out.append({"ph": "X", "name": e.op, "pid": rank, "tid": e.lane, "ts": e.begin_ns / 1e3,
                    "dur": (e.end_ns - e.begin_ns) / 1e3, "args": args})
    return out


def write(path: str, rank: int, ranks: int, spans: Iterable[Span], events: Iterable[Any], names: Dict[int, str],
          barrier: Callable[[], None]) -> None:
    """Every rank calls it; rank 0 joins the ranks' parts into one file."""
    with open(f"{path}.{rank}", "w") as f:
        json.dump(_events(rank, spans, events, names), f)
    barrier()
    if rank == 0:
        joined: List[Dict[str, Any]] = []
        for r in range(ranks):
            with open(f"{path}.{r}") as f:
                joined += json.load(f)
            os.remove(f"{path}.{r}")
        with open(path + ".part", "w") as f:
            json.dump({"traceEvents": joined, "displayTimeUnit": "ms"}, f)
        os.rename(path + ".part", path)
    barrier()
