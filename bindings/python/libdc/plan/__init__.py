"""Predicts memory, communication and time of training without the machines: libdc plan, and python -m libdc.plan.

It makes the runtime's own calls on a device that only counts. So the bytes that libdc allocates and receives are exact.
Times, and the activations of a model that PyTorch has not run, are estimates."""

from .machine import Machine, load, names
from .model import Layer, Model, from_layers, read
from .report import as_json, as_text, timeline
from .search import Found, advise, search
from .options import Options
from .step import Plan, Point, largest_micro_batch, run

__all__ = [
    "Found", "Layer", "Machine", "Model", "Options", "Plan", "Point", "advise", "as_json", "as_text", "from_layers",
    "largest_micro_batch", "load", "names", "read", "run", "search", "timeline",
]  # fmt: skip
