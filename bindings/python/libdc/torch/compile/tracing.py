"""Makes torch.compile trace a sharded model's parameters as operators.

While Dynamo traces, reading a parameter becomes dc_rt.take, whose memory is freed with its tensor. A gradient becomes
dc_rt.reduce, which does all the work for it. Such a graph is correct in any compiler; passes.py makes it faster. The
end of a backward is not in the graphs: see sharding/root.py."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn

from ..ops import registrations
from ..sharding.root import Root, root_by_graph
from ..sharding.sharded_param import accumulates

_library = torch.library.Library("dc_rt", "FRAGMENT")
_rt = torch.ops.dc_rt


# Operators that mark the phases of a step. They are in Python, since each is called once for a graph.


_DEVICES = ("CPU", "CUDA")


def _define(schema: str, body: Callable[..., Any], keys: Sequence[str], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _library.define(schema)
    for key in keys:
        _library.impl(name, body, key)
    torch.library.register_fake(f"dc_rt::{name}", fake, lib=_library)
    op = getattr(_rt, name).default
    registrations.keep_side_effects(op)
    return op


def _begin_forward_body(graph_id: int) -> None:
    root_by_graph(graph_id).pre_forward_compiled()


def _refuse_write_body(graph_id: int, id: int) -> None:
    name = root_by_graph(graph_id).group.entries[id].names[0]
    raise RuntimeError(f"{name}: a compiled function has written into the weight, but a sharded model gathers it "
                       "for that function alone, so the change would be lost: write into it in `with "
                       "libdc.torch.gathered(model):`, outside of compiled functions")


def _refuse_compiled_autograd() -> None:
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled_autograd, "in_compiled_autograd_region", False):
        raise RuntimeError("compiled autograd runs the backward without autograd's engine, which tells sharded models "
                           "which gradients are wanted and when a backward ends: call backward() without it")


def _begin_backward_body(grad: Tensor, graph_id: int, ids: Sequence[int]) -> Tensor:
    root = root_by_graph(graph_id)
    root.refuse_compiled()
    _refuse_compiled_autograd()
    root.pre_backward()
    if accumulates(_anchor_of(root)):
        if not root.reduce_grads:
            raise RuntimeError("no_sync: the graph of this compiled forward averages its gradients, since the forward "
                               "was outside of the block: call it in `with libdc.torch.no_sync(model):`, too")
        root.compiled_grads.stop_dropping()  # begun by an autograd.grad() inside of this backward
        root.begin_reductions()
        for id in ids:
            root.begin_reduction(root.group.entries[id])
    else:
        root.compiled_grads.drop()
    return torch.ops.aten.alias.default(grad)


def _reduce_body(grad: Tensor, graph_id: int, id: int) -> Tensor:
    root = root_by_graph(graph_id)
    _refuse_compiled_autograd()
    root.pre_backward()
    if root.compiled_grads.wants(root.group.entries[id]) and accumulates(_anchor_of(root)):
        root.group.entries[id].reduce(grad, root)
        root.flush_reductions()  # since the graph reuses the gradient's memory
    return grad.new_empty(0)


begin_forward_op = _define("begin_forward(int graph_id) -> ()", _begin_forward_body, ("CompositeExplicitAutograd",),
                            lambda graph_id: None)
refuse_write_op = _define("refuse_write(int graph_id, int id) -> ()", _refuse_write_body,
                          ("CompositeExplicitAutograd",), lambda graph_id, id: None)
# The first gradient passes through it, since compilers move or drop an operator that no data flow holds in place.
begin_backward_op = _define("begin_backward(Tensor(a) grad, int graph_id, int[] ids) -> Tensor(a)",
                            _begin_backward_body, _DEVICES,
                            lambda grad, graph_id, ids: torch.ops.aten.alias.default(grad))
# The operators for a gradient outside of no_sync(), and inside, where it is not reduced.
reduce_op, keep_grad_op = (_define(f"{name}(Tensor grad, int graph_id, int id) -> Tensor", _reduce_body, _DEVICES,
                                    lambda grad, graph_id, id: grad.new_empty(0)) for name in ("reduce", "keep_grad"))


# Parameters as Dynamo traces them


class _TracedUnshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, anchor: Tensor, graph_id: int, id: int, dtype: Optional[torch.dtype],
                whole: bool, reduced: Optional[torch.dtype], synchronised: bool) -> Tensor:
        ctx.graph_id, ctx.id, ctx.reduced, ctx.synchronised = graph_id, id, reduced, synchronised
        if not whole:
            return _rt.take(shard, graph_id, id, dtype)
        return shard.view_as(shard) if dtype is None else shard.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[None, Tensor, None, None, None, None, None, None]:
        if ctx.synchronised:
            done = _rt.reduce(grad if ctx.reduced is None else grad.to(ctx.reduced), ctx.graph_id, ctx.id)
        else:
            done = _rt.keep_grad(grad, ctx.graph_id, ctx.id)
        return None, done.float(), None, None, None, None, None, None


def annotate_module(module: nn.Module, root: Root, names: Sequence[Tuple[str, int]]) -> None:
    """Stores in a module the values that traced_param() and begin_forward() read. Each is a constant for Dynamo."""
    module.__dict__["_dc_graph"] = root.group.graph_id
    entries = {name: root.group.entries[id] for name, id in names}
    whole = module.__dict__["_dc_whole"] = root.group.stage == 0
    module.__dict__["_dc_ids"] = {name: (entry.id, entry.param_dtype, entry.reduce_dtype if whole else None)
                                  for name, entry in entries.items()}
    module.__dict__["_dc_local"] = {name: entry.data for name, entry in entries.items()}
    module.__dict__["_dc_given"] = {}
    module.__dict__["_dc_trained"] = trained = {}
    for name, entry in entries.items():
        trained[name] = entry.param.requires_grad
        entry.trained.append((trained, name))
    module.__dict__["_dc_anchor"] = _anchor_of(root)
    module.__dict__["_dc_root"] = root


def note_given(module: nn.Module, name: str, own: bool) -> None:
    """Notes that functional_call() gave the module a tensor in place of the parameter, or put the parameter back. Each
    graph is for one of the two cases, which guards tell by `_dc_given`."""
    given = module.__dict__["_dc_given"]
    if own:
        given.pop(name, None)
    else:
        given[name] = True


_anchors: "weakref.WeakKeyDictionary[Root, weakref.ref[Tensor]]" = weakref.WeakKeyDictionary()


def traced_roots() -> List[Root]:
    """The roots of sharded models, in the order of their graphs."""
    return sorted(_anchors, key=lambda root: root.group.graph_id)


def _anchor_of(root: Root) -> Tensor:
    """An empty leaf tensor for a root. Its gradient is the reductions' results, so that no compiler removes them as
    unused. It shows whether a backward accumulates into `.grad`. It also keeps the root alive for a graph, which names
    the root only by number."""
    reference = _anchors.get(root)
    anchor = None if reference is None else reference()
    if anchor is None:
        anchor = torch.zeros(0, requires_grad=True, device=root.group.device)
        anchor.dc_root = root  # type: ignore[attr-defined]
        _anchors[root] = weakref.ref(anchor)
    return anchor


def traced_param(module: nn.Module, name: str) -> Tensor:
    """A parameter's weights as Dynamo traces them. Dynamo never sees the parameter itself, since it cannot trace its
    class."""
    if name in module.__dict__["_dc_given"]:
        return module._parameters[name]  # type: ignore[return-value]
    _note_use(module.__dict__["_dc_graph"])
    graph_id, (id, dtype, reduced) = module.__dict__["_dc_graph"], module.__dict__["_dc_ids"][name]
    whole = module.__dict__["_dc_whole"]
    local = module.__dict__["_dc_local"][name]
    if module.__dict__["_dc_trained"][name] and torch.is_grad_enabled():
        return _TracedUnshard.apply(local, module.__dict__["_dc_anchor"], graph_id, id, dtype, whole,
                                    reduced, module.__dict__["_dc_root"].reduce_grads)
    if not whole:
        return _rt.take(local, graph_id, id, dtype)
    return local if dtype is None else local.to(dtype)


def begin_forward(module: nn.Module) -> None:
    """Begins the root's forward while Dynamo traces."""
    if not _note_use(module.__dict__["_dc_graph"]):
        _rt.begin_forward(module.__dict__["_dc_graph"])


# Dynamo's finished graphs


def _note_use(graph_id: int) -> bool:
    """Notes that the graph that Dynamo traces uses a model's weights. Returns False if Dynamo is not tracing."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(getattr(dynamo, "tls", None), "current_tx", None)
    if translator is None:
        return False
    output = translator.output
    if "_dc_graph_ids" not in output.__dict__:
        output._dc_graph_ids = {}
        output.add_graph_finalizer(functools.partial(_finish_graph, output._dc_graph_ids))
    output._dc_graph_ids[graph_id] = None
    return True


# Makes Dynamo call the function instead of tracing it, as torch.compiler.assume_constant_result() would. That one
# imports Dynamo.
_note_use._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _finish_graph(graph_ids: Dict[int, None], gm: fx.GraphModule) -> None:
    """Inserts, at the graph's beginning, the operators that must precede reads of a model's weights, since a compiled
    function may read them outside of the model's forward. It also refuses writes to weights here: in later graphs
    compilers have turned writes into new tensors."""
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    with gm.graph.inserting_before(first):
        for graph_id in graph_ids:
            gm.graph.call_function(begin_forward_op, (graph_id,))
        for graph_id, id in _written_weights(gm):
            gm.graph.call_function(refuse_write_op, (graph_id, id))
    gm.recompile()


def _is_take(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in (_rt.take, _rt.take.default)


def _written_weights(gm: fx.GraphModule) -> Iterable[Tuple[int, int]]:
    """The weights, by graph and id, that were written in place while Dynamo traced: their versions have risen."""
    for node in gm.graph.nodes:
        body = getattr(gm, node.target) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield from _written_weights(body)
        take = node if _is_take(node) else _take_of(gm, node)
        value = node.meta.get("example_value")
        value = value[0] if isinstance(value, tuple) else value
        if take is not None and isinstance(value, Tensor) and value._version:
            yield take.args[1], take.args[2]


def _take_of(gm: fx.GraphModule, node: fx.Node) -> Optional[fx.Node]:
    """The take inside a call of _TracedUnshard, an autograd function that returns the taken weights."""
    if getattr(node.target, "__name__", "") != "autograd_function_apply":
        return None
    results = getattr(gm, node.args[0].target).graph.output_node().all_input_nodes
    return results[0] if len(results) == 1 and _is_take(results[0]) else None
