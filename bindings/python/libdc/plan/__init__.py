"""Memory, bytes and time of training, before the machines are there: libdc plan, and python -m libdc.plan.

The runtime's own calls are made on a device that only counts. So what libdc takes and receives is exact; times, and
the activations of a model that PyTorch has not run, are models."""

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
