"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any, Dict, List

from .step import HOLDERS, Plan, largest_micro_batch, peak_holders

_GIB = float(1 << 30)


def as_json(plan: Plan, price_per_hour: float = 0.0) -> Dict[str, Any]:
    """The plan in bytes, nanoseconds and counts. price_per_hour: of a rank, in any currency; 0: no cost."""
    options = plan.options
    table: Dict[str, Any] = {
        "model": {"name": plan.model.name, "parameters": plan.model.parameters, "layers": len(plan.model.layers),
                  "tokens": plan.model.tokens},
        "machine": {"name": plan.machine.name, "memory_bytes": plan.machine.memory_bytes},
        "options": {name: getattr(options, name) for name in options.__dataclass_fields__},
        "exact": {"gather_wire_bytes": plan.gather_wire_bytes, "reduce_wire_bytes": plan.reduce_wire_bytes,
                  "node_bytes": plan.node_bytes, "network_bytes": plan.network_bytes},
        "memory": {"peak_bytes": plan.peak.total, "peak_moment": plan.peak.moment, "fits": plan.fits,
                   "largest_micro_batch": largest_micro_batch(plan), "host_bytes": plan.host_bytes,
                   "points": [{"moment": point.moment, "time_ns": point.time_ns, **point.bytes}
                              for point in plan.points]},
        "time": {"step_ns": plan.step_ns, "compute_ns": plan.compute_ns, "communication_ns": plan.communication_ns,
                 "exposed_ns": plan.exposed_ns, "flop_utilisation": plan.flop_utilisation,
                 "tokens_per_second": plan.tokens * 1e9 / plan.step_ns if plan.step_ns else 0.0},
    }  # fmt: skip
    if price_per_hour > 0:
        table["time"]["cost_per_million_tokens"] = cost(plan, price_per_hour)
    return table


def cost(plan: Plan, price_per_hour: float) -> float:
    """The price of a million tokens."""
    return price_per_hour * plan.options.ranks * plan.step_ns / 3.6e12 / plan.tokens * 1e6


def settings(plan: Plan) -> str:
    options = plan.options
    text = (f"stage {options.stage}, micro-batch {options.micro_batch}, bucket {options.bucket}, "
            f"prefetch {options.prefetch}")
    text += f", {options.replicas} replicas" if options.replicas > 1 else ""
    return text + (", recomputation" if options.recompute else "") + (", offload" if options.offload else "")


def _types(plan: Plan) -> str:
    """The weights' type, and the types in which they are used and gradients averaged if those differ."""
    options = plan.options
    text = options.dtype + (f" used as {options.param_dtype}" if options.used_dtype != options.dtype else "")
    return text + (f", gradients averaged in {options.reduce_dtype}" if options.reduce_dtype is not None else "")


def as_text(plan: Plan, price_per_hour: float = 0.0) -> str:
    """The plan as text of at most 120 columns."""
    step, machine = plan.step_ns, plan.machine
    most = largest_micro_batch(plan)
    lines = [
        f"{plan.model.name}: {plan.model.parameters:,} parameters, {len(plan.model.layers)} layers, "
        f"{plan.model.tokens} tokens a sample",
        f"{plan.options.ranks} x {machine.name}: {settings(plan)}, {_types(plan)}",
        "",
        f"memory of rank 0: {plan.peak.total / _GIB:.2f} of {machine.memory_bytes / _GIB:.2f} GiB at the peak, "
        f"{plan.peak.moment}: {'fits' if plan.fits else 'does not fit'}",
        *(f"  {name:<16} {count / _GIB:10.3f} GiB" for name, count in peak_holders(plan)),
        *([f"  in host memory   {plan.host_bytes / _GIB:10.3f} GiB"] if plan.host_bytes else []),
        f"  largest micro-batch {most}" if most else "  not even one sample fits",
        "",
        "received by rank 0 in a step (exact)",
        f"  gathers          {plan.gather_wire_bytes:>18,} bytes",
        f"  reductions       {plan.reduce_wire_bytes:>18,} bytes",
        f"  within the node  {plan.node_bytes:>18,} bytes",
        f"  over the network {plan.network_bytes:>18,} bytes",
        "",
        "time of a step (a model)",
        f"  step             {step / 1e6:10.2f} ms",
        f"  compute          {plan.compute_ns / 1e6:10.2f} ms at {machine.product_percent} % of the peak",
        f"  communication    {plan.communication_ns / 1e6:10.2f} ms",
        f"  waiting          {plan.exposed_ns / 1e6:10.2f} ms for what no work hides",
        f"  FLOP utilisation {100 * plan.flop_utilisation:10.1f} %",
        f"  tokens a second  {plan.tokens * 1e9 / step if step else 0.0:10.0f}",
    ]
    if price_per_hour > 0:
        lines.append(f"  a million tokens {cost(plan, price_per_hour):10.4f} at {price_per_hour:g} a rank and hour")
    return "\n".join(lines) + "\n"


def timeline(plan: Plan) -> str:
    """A table of memory by holder at each point of the step, in MiB."""
    head = f"{'ms':>10}  {'total':>10}  " + "  ".join(f"{name:>{len(name)}}" for name in HOLDERS) + "  moment"
    rows: List[str] = [head]
    for point in plan.points:
        cells = "  ".join(f"{point.bytes[name] / (1 << 20):>{len(name)}.0f}" for name in HOLDERS)
        rows.append(f"{point.time_ns / 1e6:>10.2f}  {point.total / (1 << 20):>10.0f}  {cells}  {point.moment}")
    return "\n".join(rows) + "\n"
