"""The machine of a rank: one accelerator, or one socket, of a described node."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from ..arguments import check_size
from .model import read_json

FOLDER = Path(__file__).parent / "machines"


class Machine(NamedTuple):
    """One rank's share. Rates are a second's; what it receives and sends at the same time counts once."""

    name: str
    ranks_per_node: int
    memory_bytes: int
    flops: Dict[str, int]  # peak of dense matrix products, by data type
    product_percent: int  # of the peak that a model's products reach
    memory_bytes_per_second: int
    host_bytes_per_second: int
    node_bytes_per_second: int
    node_latency_ns: int
    network_bytes_per_second: int
    network_latency_ns: int
    launch_ns: int
    cores: int = 0  # that all ranks of a node share, for work and for collectives in the node; 0: each has its own
    product_percent_by_width: Tuple[Tuple[int, int], ...] = ()  # of product_percent, by the shorter side of the weights

    def peak(self, dtype: str) -> int:
        if dtype not in self.flops:
            raise ValueError(f"machine {self.name}: flops has no {dtype}, only {', '.join(self.flops)}")
        return self.flops[dtype]

    def rate(self, dtype: str) -> int:
        return self.peak(dtype) * self.product_percent // 100

    def percent_of_width(self, width: int) -> int:
        """The share of rate() of a product with weights of this shorter side: that of the next width measured."""
        return next((percent for most, percent in self.product_percent_by_width if width <= most),
                    self.product_percent_by_width[-1][1] if self.product_percent_by_width else 100)


def _by_width(where: str, table: Any) -> Tuple[Tuple[int, int], ...]:
    if not isinstance(table, dict) or not all(str(width).isdigit() for width in table):
        raise ValueError(f"{where}: product_percent_by_width = {table!r}, must be an object of widths and percents")
    checked = sorted((int(width), check_size(f"{where}: product_percent_by_width", percent))
                     for width, percent in table.items())
    if any(percent < 1 for _, percent in checked):
        raise ValueError(f"{where}: product_percent_by_width has {table}, must be at least 1")
    return tuple(checked)


def names() -> List[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Machine:
    """A machine of the package by its name, or a file's."""
    path = FOLDER / f"{name}.json"
    if not path.exists() and not Path(name).exists():
        raise ValueError(f"machine = {name!r}, must be a file or one of {', '.join(names())}")
    table = read_json(str(path if path.exists() else name))
    where = f"machine {name}"
    fields = [field for field in Machine._fields if field not in ("name", "flops", *Machine._field_defaults)]
    missing = [field for field in (*fields, "flops", "sources") if field not in table]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}")
    unsourced = [field for field in (*fields, "flops") if field not in table["sources"]]
    if unsourced:
        raise ValueError(f"{where}: sources has no {unsourced[0]!r}; each figure says where it is from")
    numbers: Dict[str, Any] = {field: check_size(f"{where}: {field}", table[field]) for field in fields}
    flops = {str(dtype): check_size(f"{where}: flops.{dtype}", value) for dtype, value in table["flops"].items()}
    if not 1 <= numbers["product_percent"] <= 100:
        raise ValueError(f"{where}: product_percent = {numbers['product_percent']}, must be 1 to 100")
    numbers["cores"] = check_size(f"{where}: cores", table.get("cores", 0))
    by_width = _by_width(where, table.get("product_percent_by_width", {}))
    return Machine(product_percent_by_width=by_width, name=str(table.get("name", Path(name).stem)), flops=flops,
                   **numbers)
