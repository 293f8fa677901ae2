"""torch.compile: the operators in the graphs, and backend="libdc".

While Dynamo traces, a parameter reads as dc_rt.take, whose memory is freed with the tensor. Its gradient reads as
dc_rt.reduce, which does all that a gradient needs. Such a graph is right as it is, in any compiler. Two passes make the
graphs of compilers that know gradients better, and leave graphs without our operators alone:

    joint       before the split into forward and backward: gathers are repeated in backward, never saved; the backward
                begins by saying so; gradients become reduce_grad
    place       on each part, by Inductor and our backend: gathers become allgather_param and wait_allgather, one where
                uses overlap, with release_param after the last use and prefetch ahead

The end of a backward is not in the graphs: see root.py."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from . import semantics
from .order import groups_of
from .root import Root, by_graph, is_model

_library = torch.library.Library("dc_rt", "FRAGMENT")
_dc, _rt = torch.ops.dc, torch.ops.dc_rt


# Operators of the step, in Python: once a graph


_DEVICES = ("CPU", "CUDA")


def _define(schema: str, body: Callable[..., Any], keys: Sequence[str], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _library.define(schema)
    for key in keys:
        _library.impl(name, body, key)
    torch.library.register_fake(f"dc_rt::{name}", fake, lib=_library)
    op = getattr(_rt, name).default
    semantics.keep_side_effects(op)
    return op


def _begin_forward_body(graph_id: int) -> None:
    by_graph(graph_id).pre_forward_compiled()


def _begin_backward_body(grad: Tensor, graph_id: int, ids: Sequence[int]) -> Tensor:
    root = by_graph(graph_id)
    root.pre_backward()
    root.begin_reductions()
    for id in ids:
        root.with_grad[id] = root.group.entries[id]
    return torch.ops.aten.alias.default(grad)


def _reduce_body(grad: Tensor, graph_id: int, id: int) -> Tensor:
    root = by_graph(graph_id)
    root.pre_backward()
    root.group.entries[id].reduce(grad)
    return grad.new_empty(0)


_begin_forward = _define("begin_forward(int graph_id) -> ()", _begin_forward_body, ("CompositeExplicitAutograd",),
                         lambda graph_id: None)
# The first gradient goes through it: compilers move, or lose, what no data flow holds in its place.
_begin_backward = _define("begin_backward(Tensor(a) grad, int graph_id, int[] ids) -> Tensor(a)", _begin_backward_body,
                          _DEVICES, lambda grad, graph_id, ids: torch.ops.aten.alias.default(grad))
# A gradient outside of no_sync() and inside: the latter stays as it is.
_reduce, _keep_grad = (_define(f"{name}(Tensor grad, int graph_id, int id) -> Tensor", _reduce_body, _DEVICES,
                               lambda grad, graph_id, id: grad.new_empty(0)) for name in ("reduce", "keep_grad"))


# What Dynamo sees


class _Gather(torch.autograd.Function):
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


def describe(module: nn.Module, root: Root, ids: Dict[str, Tuple[int, Optional[torch.dtype]]]) -> None:
    """Leaves with a module what read() and begin_forward() need, in terms that Dynamo takes as constants."""
    module.__dict__["_dc_graph"] = root.group.graph_id
    module.__dict__["_dc_ids"] = ids
    module.__dict__["_dc_whole"] = root.group.stage == 0
    module.__dict__["_dc_reduced"] = root.group.options.reduce_dtype if root.group.stage == 0 else None
    module.__dict__["_dc_anchor"] = _anchor_of(root)
    module.__dict__["_dc_root"] = root


_anchors: "weakref.WeakKeyDictionary[Root, weakref.ref[Tensor]]" = weakref.WeakKeyDictionary()


def _anchor_of(root: Root) -> Tensor:
    """An empty leaf. Its gradient is what the reductions' results are for, so that no compiler thinks them useless; and
    by it a graph, which knows the root by number, keeps it."""
    reference = _anchors.get(root)
    anchor = None if reference is None else reference()
    if anchor is None:
        anchor = torch.zeros(0, requires_grad=True, device=root.group.device)
        anchor.dc_root = root  # type: ignore[attr-defined]
        _anchors[root] = weakref.ref(anchor)
    return anchor


def read(module: nn.Module, name: str) -> Tensor:
    """A parameter's weights, traced."""
    param = module._parameters[name]
    graph_id, (id, dtype) = module.__dict__["_dc_graph"], module.__dict__["_dc_ids"][name]
    whole = module.__dict__["_dc_whole"]
    if param.requires_grad and torch.is_grad_enabled():
        return _Gather.apply(param, module.__dict__["_dc_anchor"], graph_id, id, dtype, whole,
                             module.__dict__["_dc_reduced"], module.__dict__["_dc_root"].reduce_grads)
    if not whole:
        return _rt.take(param, graph_id, id, dtype)
    return param if dtype is None else param.to(dtype)


def begin_forward(module: nn.Module) -> None:
    """The root's forward, traced."""
    _rt.begin_forward(module.__dict__["_dc_graph"])


def _of_model(node: fx.Node, *targets: Any) -> bool:
    """Whether the node is a call of one of these operators for a sharded model. A program that calls the operators
    itself has placed them as it wants them."""
    return node.op == "call_function" and node.target in targets and is_model(node.args[1])


# The joint graph


def joint(gm: fx.GraphModule, _inputs: Any = None) -> fx.GraphModule:
    """Tags gathers for the partitioner, and lets the backward begin."""
    from torch.utils.checkpoint import CheckpointPolicy

    graph = gm.graph
    if _backend_places():
        _gather_apart(graph)
    reduced: Dict[int, List[fx.Node]] = {}
    for node in graph.nodes:
        if _of_model(node, _dc.allgather_param.default, _dc.wait_allgather.default, _rt.take.default):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif _of_model(node, _reduce):
            node.target = _dc.reduce_grad.default
            reduced.setdefault(node.args[1], []).append(node)
    for graph_id, nodes in reduced.items():
        ids = list(dict.fromkeys(node.args[2] for node in nodes))
        with graph.inserting_before(nodes[0]):
            begin = graph.call_function(_begin_backward, (nodes[0].args[0], graph_id, ids))
        begin.meta.update(nodes[0].args[0].meta)
        begin.meta["partitioner_tag"] = "must_be_in_backward"
        nodes[0].update_arg(0, begin)
    gm.recompile()
    return gm


_compiling = threading.local()


def _backend_places() -> bool:
    """Whether the backend that compiles now runs place() on each part: ours, or Inductor with our pass."""
    if getattr(_compiling, "ours", False):
        return True
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None:
        return False
    from torch._subclasses.fake_tensor import FakeTensorMode

    return isinstance(virtualized.V.get_fake_mode(), FakeTensorMode)


# A forward, backward or inference graph


def _aliases(wait: fx.Node) -> List[fx.Node]:
    """The node and all that may view its memory."""
    found, todo = {}, [wait]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        for user in node.users:
            schema = getattr(user.target, "_schema", None)
            if user.op == "call_function" and (
                    schema is None or any(result.alias_info is not None for result in schema.returns)
                    or user.target is torch.ops.aten.reshape.default):
                todo.append(user)
    return list(found)


def _own_one(graph: fx.Graph, wait: fx.Node) -> None:
    gather = wait.args[0]
    with graph.inserting_before(wait):
        taken = graph.call_function(_rt.take.default, gather.args, gather.kwargs)
    taken.meta.update(wait.meta)
    wait.replace_all_uses_with(taken)
    graph.erase_node(wait)
    if not gather.users:
        graph.erase_node(gather)


def _gather_apart(graph: fx.Graph) -> None:
    """Lets gathers begin before they are waited for: their memory is given back by release_param."""
    for node in list(graph.nodes):
        if not _of_model(node, _rt.take.default):
            continue
        with graph.inserting_before(node):
            gather = graph.call_function(_dc.allgather_param.default, node.args, node.kwargs)
            wait = graph.call_function(_dc.wait_allgather.default, (gather, *node.args[1:3]))
        for made in (gather, wait):
            made.meta.update(node.meta)
        node.replace_all_uses_with(wait)
        graph.erase_node(node)


def place(graph: fx.Graph) -> bool:
    """Orders gathers, releases and prefetches. Returns whether there was anything to do."""
    _gather_apart(graph)
    waits = [node for node in graph.nodes if _of_model(node, _dc.wait_allgather.default)]
    if not waits:
        return False
    order = {node: k for k, node in enumerate(graph.nodes)}
    cycles: Dict[Tuple[int, int], Tuple[fx.Node, fx.Node]] = {}  # (graph, id) → the latest wait and its last use
    releases: List[Tuple[fx.Node, fx.Node]] = []
    for wait in waits:
        key = wait.args[1], wait.args[2]
        earlier = cycles.get(key)
        if earlier is not None and order[wait.args[0]] < order[earlier[1]] and _same_type(earlier[0], wait):
            gather = wait.args[0]
            wait.replace_all_uses_with(earlier[0])  # a tied parameter, still there
            graph.erase_node(wait)
            if not gather.users:
                graph.erase_node(gather)
            wait = earlier[0]
        uses = [user for alias in _aliases(wait) for user in alias.users]
        cycles[key] = wait, max(uses, key=order.__getitem__, default=wait)
        releases = [(w, last) for w, last in releases if w is not wait] + [cycles[key]]
    kept = []
    for wait, last in releases:
        if last.op == "output":
            _own_one(graph, wait)
            continue
        with graph.inserting_after(last):
            release = graph.call_function(_dc.release_param.default, (wait, wait.args[1], wait.args[2], 1))
        for key in ("val", "tensor_meta"):
            if key in wait.meta:
                release.meta[key] = wait.meta[key]
        kept.append(wait)
    _prefetch(graph, kept)
    return True


def _same_type(a: fx.Node, b: fx.Node) -> bool:
    return a.meta["val"].dtype == b.meta["val"].dtype


def _prefetch(graph: fx.Graph, waits: List[fx.Node]) -> None:
    """Ahead of the first gather of each group, starts those that follow, one handshake a group."""
    roots = {wait.args[1]: by_graph(wait.args[1]) for wait in waits}
    for graph_id, root in roots.items():
        gathers = [wait.args[0] for wait in waits if wait.args[1] == graph_id]
        options = root.group.options
        groups = groups_of([root.group.entries[node.args[2]].numel for node in gathers], options.group_size)
        num_prefetched = 0
        for k, (begin, _) in enumerate(groups):
            until = min(k + 1 + options.prefetch, len(groups)) if options.prefetch else 0
            for first, last in groups[num_prefetched:until]:
                coming = gathers[first:last]
                types = None
                if any(len(node.args) > 3 and node.args[3] is not None for node in coming):
                    types = [node.meta["val"].dtype for node in coming]
                with graph.inserting_before(gathers[begin]):
                    node = graph.call_function(_dc.prefetch_params_fused.default, (
                        graph_id, [node.args[0] for node in coming], [node.args[2] for node in coming], types))
                node.meta["val"] = None
            num_prefetched = max(num_prefetched, until)


# backend="libdc"


def _finish(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    place(gm.graph)
    gm.graph.set_codegen(fx.graph._BoxedCodeGen())
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)

    def run(values: List[Any]) -> Any:
        return gm.forward(values)

    run._boxed_call = True  # it empties the list: arguments die at their last use
    return run


def backend(gm: fx.GraphModule, inputs: Sequence[Any], **_options: Any) -> Callable[..., Any]:
    """torch.compile(backend="libdc"): graphs with the operators in their places, run node by node by PyTorch's own
    kernels, with the bits of eager mode."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    _compiling.ours = True
    try:
        return aot_autograd(fw_compiler=_finish, bw_compiler=_finish, inference_compiler=_finish,
                            partition_fn=min_cut_rematerialization_partition)(gm, inputs)
    finally:
        _compiling.ours = False


def _concerns(graph: fx.Graph) -> bool:
    return any(getattr(node.target, "namespace", "") in ("dc", "dc_rt") for node in graph.nodes
               if node.op == "call_function")


class _JointPass:
    """Ours behind the user's."""

    def __init__(self, first: Any) -> None:
        self.first = first

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        gm = gm if self.first is None else self.first(gm, inputs)
        return joint(gm, inputs) if _concerns(gm.graph) else gm


def _place_pass(first: Any) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class PlacePass(CustomGraphPass):
        of_libdc = True

        def __call__(self, graph: fx.Graph) -> None:
            if first is not None:
                first(graph)
            place(graph)

        def uuid(self) -> Any:
            # Part of the key of Inductor's cache.
            return "libdc-place-1" if first is None else ("libdc-place-1", first.uuid())

    return PlacePass()


def _put_passes() -> None:
    """Compilers look for passes in their configuration, which each thread has its own of: so this is done whenever one
    of our operators is traced. Passes that are there already run first."""
    import torch._functorch.config as functorch

    if not isinstance(functorch.joint_custom_pass, _JointPass):
        functorch.joint_custom_pass = _JointPass(functorch.joint_custom_pass)
    if "torch._inductor.config" in sys.modules:
        inductor = sys.modules["torch._inductor.config"]
        if not hasattr(inductor.post_grad_custom_post_pass, "of_libdc"):
            inductor.post_grad_custom_post_pass = _place_pass(inductor.post_grad_custom_post_pass)


semantics.on_trace.append(_put_passes)


def register_backend() -> None:
    """Makes torch.compile(backend="libdc") known. Where the package is installed its metadata does, by an entry point:
    PyTorch finds it at the name's first use, so programs that do not compile never import Dynamo, which
    takes a second."""
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="libdc"):
        return
    import torch._dynamo

    if "libdc" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(backend, name="libdc")
