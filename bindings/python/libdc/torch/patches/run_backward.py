"""Patches torch.autograd for sharded models: backward(inputs=[parameter]), and grad() with respect to parameters and
others."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, List, NoReturn, Set

from torch import Tensor

from ..sharding import input_backwards
from ..sharding.parameter import entry_of
from ..sharding.sharded_param import ShardedParam

_Function = Callable[..., Any]


def _node_of(output: Any) -> Any:
    return output.grad_fn if isinstance(output, Tensor) else output.node


def _leaves_in(outputs: Any, entries: Set[ShardedParam]) -> List[Tensor]:
    """The leaves through which these parameters get gradients in the outputs' graph: whole weights, and anchors of
    compiled graphs."""
    roots = {entry.root_ref() for entry in entries} - {None}
    nodes = [_node_of(output) for output in outputs]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if getattr(leaf, "dc_use", (None, None))[1] in entries or getattr(leaf, "dc_root", None) in roots:
            leaves.append(leaf)
        found = {other for other, _ in getattr(node, "next_functions", ()) if other is not None} - seen
        seen |= found
        nodes.extend(found)
    return leaves


def _refuse_autograd_grad(leaf: Any, entries: Set[Any]) -> NoReturn:
    used = getattr(leaf, "dc_use", (None, next(iter(entries))))[1]
    raise RuntimeError(f"torch.autograd.grad: {used.names[0]} among inputs belongs to a sharded model, whose forward "
                       "computes with whole weights in its place, so it would get None: call loss.backward(), and read "
                       ".grad")


def make_run_backward(inner: _Function) -> _Function:
    """Wraps autograd's backward. A graph's leaves are the whole weights, except where a parameter is used other than as
    a module's attribute, as in penalties: there the parameter itself is a leaf."""

    @functools.wraps(inner)
    def run_backward(outputs: Any, grads: Any, retain_graph: bool, create_graph: bool, inputs: Any, *args: Any,
                     **kwargs: Any) -> Any:
        entries: Set[Any] = {entry_of(tensor) for tensor in inputs} - {None}
        leaves = _leaves_in(outputs, entries) if entries else []
        if leaves and not kwargs.get("accumulate_grad"):
            _refuse_autograd_grad(leaves[0], entries)
        if not entries or not kwargs.get("accumulate_grad"):
            with input_backwards.note(map(_node_of, outputs)) if inputs else contextlib.nullcontext():
                return inner(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
        inputs = (*inputs, *leaves)
        roots = {entry.root_ref() for entry in entries} - {None}
        outer = {root.compiled_grads: root.compiled_grads.inputs for root in roots}
        for compiled_grads in outer:
            compiled_grads.inputs = entries
        try:
            return inner(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
        finally:
            for compiled_grads, before in outer.items():
                compiled_grads.inputs = before

    return run_backward
