"""The machine of a rank: one accelerator, or one socket, of a described node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from .checks import known, read_json, stem, title, whole

FOLDER = Path(__file__).parent / "machines"
_LEAST = {"product_percent": 1, "memory_bytes": 1, **dict.fromkeys(
    ("flops", "memory_bytes_per_second", "host_bytes_per_second", "node_bytes_per_second", "network_bytes_per_second"),
    1000)}
_MOST = {"product_percent": 100, "ranks_per_node": 1 << 20, "cores": 1 << 20, "flops": 10**21, **dict.fromkeys(
    ("node_latency_ns", "network_latency_ns", "launch_ns"), 10**12)}


class Machine(NamedTuple):
    """One rank's share of a machine. Rates are per second; bytes received and sent at the same time count once."""

    name: str
    ranks_per_node: int
    memory_bytes: int
    flops: Dict[str, int]  # peak of dense matrix products a second, by data type
    product_percent: int  # share of the peak that a model's products reach
    memory_bytes_per_second: int
    host_bytes_per_second: int
    node_bytes_per_second: int
    node_latency_ns: int
    network_bytes_per_second: int
    network_latency_ns: int
    launch_ns: int
    cores: int = 0  # that a node's ranks share for work and for collectives in the node; 0: not shared
    host_memory_bytes: int = 0  # for offload; 0: unknown, so the search does not offload
    product_percent_by_width: Tuple[Tuple[int, int], ...] = ()  # share of product_percent, by the weights' shorter side
    product_percent_by_rows: Tuple[Tuple[int, int], ...] = ()  # share of that, by the tokens of a rank's micro-batch

    def peak(self, dtype: str) -> int:
        if dtype not in self.flops:
            raise ValueError(f"machine {self.name}: flops has no {dtype}, only {', '.join(self.flops)}")
        return self.flops[dtype]

    def rate(self, dtype: str) -> int:
        return self.peak(dtype) * self.product_percent // 100

    def percent_of_width(self, width: int) -> int:
        """The percentage of rate() that products reach with weights of this shorter side."""
        return _next_measured(self.product_percent_by_width, width)

    def percent_of_rows(self, rows: int) -> int:
        """The percentage of that which a layer's products with this many rows reach."""
        return _next_measured(self.product_percent_by_rows, rows)


def _next_measured(percents: Tuple[Tuple[int, int], ...], size: int) -> int:
    """The percentage of the next larger size that was measured, or of the largest."""
    return next((percent for most, percent in percents if size <= most), percents[-1][1] if percents else 100)


def _percents(where: str, table: Any) -> Tuple[Tuple[int, int], ...]:
    if not isinstance(table, dict) or not all(size.isascii() and size.isdigit() for size in table):
        raise ValueError(f"{where} = {table!r}, must be an object of sizes and percents")
    return tuple(sorted((whole(f"{where}: a size", int(size), 1, 1 << 32), whole(f"{where}[{size}]", percent, 1, 100))
                        for size, percent in table.items()))


def _figure(where: str, field: str, value: Any) -> int:
    kind = field.partition(".")[0]
    return whole(f"{where}: {field}", value, _LEAST.get(kind, 0), _MOST.get(kind, 10**18))


def names() -> List[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Machine:
    """Loads a machine of the package by name, or one from a file."""
    path = str(FOLDER / f"{name}.json")
    path = path if os.path.exists(path) else name
    if not os.path.exists(path):  # Path.exists() raises where a name is too long
        raise ValueError(f"machine = {name!r}, must be a file or one of {', '.join(names())}")
    table = read_json(path)
    where = f"machine {name}"
    fields = [field for field in Machine._fields if field not in ("name", "flops", *Machine._field_defaults)]
    known(where, table, (*Machine._fields, "sources"))
    missing = [field for field in (*fields, "flops", "sources") if field not in table]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}")
    for field in ("flops", "sources"):
        if not isinstance(table[field], dict) or not table[field]:
            raise ValueError(f"{where}: {field} = {table[field]!r}, must be an object with an entry or more")
    unsourced = [field for field in (*fields, "flops") if field not in table["sources"]]
    if unsourced:
        raise ValueError(f"{where}: sources has no {unsourced[0]!r}; each figure says where it is from")
    numbers: Dict[str, Any] = {field: _figure(where, field, table[field]) for field in fields}
    numbers.update((field, _figure(where, field, table.get(field, 0))) for field in ("cores", "host_memory_bytes"))
    flops = {dtype: _figure(where, f"flops.{dtype}", value) for dtype, value in table["flops"].items()}
    for field in ("product_percent_by_width", "product_percent_by_rows"):
        numbers[field] = _percents(f"{where}: {field}", table.get(field, {}))
    return Machine(name=title(f"{where}: name", table.get("name", stem(name))), flops=flops, **numbers)
