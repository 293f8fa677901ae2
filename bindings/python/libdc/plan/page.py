"""libdc plan --html FILE: one page that needs no network. uPlot, which draws its charts, is in the page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any, Dict, List

from .checks import whole_file
from .report import as_text
from .simulate import Faults, simulate, unscalable
from .step import HOLDERS, Plan

_RANKS = tuple(2**i for i in range(17))
TEMPLATE = Path(__file__).with_name("page.html")
UPLOT = Path(__file__).with_name("uplot")


def _efficiency(plan: Plan) -> List[Dict[str, Any]]:
    """The scaling curve; empty if the plan does not tell how its communication scales."""
    if plan.options.ranks == 1 or unscalable(plan):
        return []
    return [{"ranks": ranks, "efficiency": simulate(plan, ranks, Faults()).efficiency} for ranks in _RANKS]


def figures(plan: Plan) -> Dict[str, Any]:
    """The data that the page draws. The plan must have spans."""
    return {
        "limit": plan.machine.memory_bytes, "step_ns": plan.step_ns, "holders": list(HOLDERS),
        "points": [{"moment": point.moment, "ns": point.time_ns, "bytes": [point.bytes[name] for name in HOLDERS]}
                   for point in plan.points],
        "spans": [list(span) for span in plan.spans],
        "scale": _efficiency(plan),
    }  # fmt: skip


def page(plan: Plan, price_per_hour: float = 0.0) -> str:
    data = json.dumps(figures(plan), separators=(",", ":")).replace("<", "\\u003c")
    values = {"TITLE": html.escape(plan.model.name), "TEXT": html.escape(as_text(plan, price_per_hour)), "DATA": data}
    for name, file in (("STYLE", "uPlot.min.css"), ("LIBRARY", "uPlot.iife.js"), ("LICENSE", "LICENSE")):
        values[name] = (UPLOT / file).read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], TEMPLATE.read_text(encoding="utf-8"))


def write(plan: Plan, path: str, price_per_hour: float = 0.0) -> None:
    """Writes the page, whole or not at all."""
    with whole_file("html", path) as partial:
        partial.write_text(page(plan, price_per_hour), encoding="utf-8")
