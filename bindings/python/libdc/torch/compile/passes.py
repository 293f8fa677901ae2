"""Passes over the graphs of torch.compile; graphs without libdc's operators stay as they are.

    joint_pass        before the split into forward and backward: gathers are repeated in backward, never saved;
                      reductions become reduce_grad; begin_backward is added at the first one
    schedule_gathers  on each part, in Inductor and libdc's backend: gathers become allgather_param and wait_allgather,
                      one pair where uses overlap, with release_param after the last use, and prefetches"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch
from torch import fx

from ..sharding.order.exec_order import split_into_groups
from ..sharding.root import is_sharded_graph, root_by_graph
from .tracing import begin_backward_op, reduce_op, traced_roots

_dc, _rt = torch.ops.dc, torch.ops.dc_rt


def _is_model_op(node: fx.Node, *targets: Any) -> bool:
    """Whether the node calls one of these operators for a sharded model. Operators that a program calls itself stay
    where the program put them."""
    return node.op == "call_function" and node.target in targets and is_sharded_graph(node.args[1])


# The joint graph


def joint_pass(gm: fx.GraphModule, _inputs: Any = None) -> fx.GraphModule:
    """Tags gathers for the partitioner, and adds the operator that begins the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    graph = gm.graph
    reduced: Dict[int, List[fx.Node]] = {}
    for node in graph.nodes:
        if _is_model_op(node, _dc.allgather_param.default, _dc.wait_allgather.default, _rt.take.default):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif _is_model_op(node, reduce_op):
            node.target = _dc.reduce_grad.default
            reduced.setdefault(node.args[1], []).append(node)
    for graph_id, nodes in reduced.items():
        ids = list(dict.fromkeys(node.args[2] for node in nodes))
        with graph.inserting_before(nodes[0]):
            begin = graph.call_function(begin_backward_op, (nodes[0].args[0], graph_id, ids))
        begin.meta.update(nodes[0].args[0].meta)
        begin.meta["partitioner_tag"] = "must_be_in_backward"
        nodes[0].update_arg(0, begin)
    gm.recompile()
    return gm


# A forward, backward or inference graph

# Operators whose results are views of their argument, although their schemas do not say so.
_UNMARKED_VIEWS = (torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default,
                   torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default)


def _may_alias(wait: fx.Node) -> List[fx.Node]:
    """The node and all nodes that may view its memory."""
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
                    or user.target in _UNMARKED_VIEWS):
                todo.append(user)
    return list(found)


def _take_ownership(graph: fx.Graph, wait: fx.Node) -> None:
    gather = wait.args[0]
    with graph.inserting_before(wait):
        taken = graph.call_function(_rt.take.default, gather.args, gather.kwargs)
    taken.meta.update(wait.meta)
    wait.replace_all_uses_with(taken)
    graph.erase_node(wait)
    if not gather.users:
        graph.erase_node(gather)


def _split_takes(graph: fx.Graph) -> None:
    """Splits each take into allgather_param and wait_allgather, so that the gather can start early. Its memory must
    then be freed by release_param. So only schedule_gathers() does this, since it adds the releases: a compiler need
    not run it on each part."""
    for node in list(graph.nodes):
        if not _is_model_op(node, _rt.take.default):
            continue
        with graph.inserting_before(node):
            gather = graph.call_function(_dc.allgather_param.default, node.args, node.kwargs)
            wait = graph.call_function(_dc.wait_allgather.default, (gather, *node.args[1:3]))
        for made in (gather, wait):
            made.meta.update(node.meta)
        node.replace_all_uses_with(wait)
        graph.erase_node(node)


def schedule_gathers(graph: fx.Graph) -> bool:
    """Orders gathers, releases and prefetches. Returns whether there was anything to do."""
    _split_takes(graph)
    waits = [node for node in graph.nodes if _is_model_op(node, _dc.wait_allgather.default)]
    if not waits:
        return False
    order = {node: k for k, node in enumerate(graph.nodes)}
    cycles: Dict[Tuple[int, int], Tuple[fx.Node, fx.Node]] = {}  # (graph, id) → latest wait, and its last use
    releases: List[Tuple[fx.Node, fx.Node]] = []
    for wait in waits:
        key = wait.args[1], wait.args[2]
        earlier = cycles.get(key)
        if earlier is not None and order[wait.args[0]] < order[earlier[1]] and _same_type(earlier[0], wait):
            gather = wait.args[0]
            wait.replace_all_uses_with(earlier[0])  # a tied parameter, still gathered
            graph.erase_node(wait)
            if not gather.users:
                graph.erase_node(gather)
            wait = earlier[0]
        uses = [user for alias in _may_alias(wait) for user in alias.users]
        cycles[key] = wait, max(uses, key=order.__getitem__, default=wait)
        releases = [(w, last) for w, last in releases if w is not wait] + [cycles[key]]
    kept = []
    for wait, last in releases:
        if last.op == "output":
            _take_ownership(graph, wait)
            continue
        with graph.inserting_after(last):
            release = graph.call_function(_dc.release_param.default, (wait, wait.args[1], wait.args[2], 1))
        for key in ("val", "tensor_meta"):
            if key in wait.meta:
                release.meta[key] = wait.meta[key]
        kept.append(wait)
    _prefetch(graph, kept)
    return True


def gather_options() -> str:
    """The inputs of schedule_gathers() besides a graph, for each sharded model."""
    return repr([(root.group.graph_id, root.group.options, [entry.size for entry in root.group.entries])
                 for root in traced_roots()])


def _same_type(a: fx.Node, b: fx.Node) -> bool:
    return a.meta["val"].dtype == b.meta["val"].dtype


def _prefetch(graph: fx.Graph, waits: List[fx.Node]) -> None:
    """Before the first gather of each group, prefetches it and the next groups, unless that was done earlier. Each
    group takes one handshake."""
    roots = {wait.args[1]: root_by_graph(wait.args[1]) for wait in waits}
    for graph_id, root in roots.items():
        gathers = [wait.args[0] for wait in waits if wait.args[1] == graph_id]
        options = root.group.options
        groups = split_into_groups([root.group.entries[node.args[2]].size for node in gathers], options.group_size)
        num_prefetched = 0
        for k, (begin, _) in enumerate(groups):
            until = min(k + 1 + options.prefetch, len(groups)) if options.prefetch else 0
            for first, last in groups[num_prefetched:until]:
                upcoming = gathers[first:last]
                types = None
                if any(len(node.args) > 3 and node.args[3] is not None for node in upcoming):
                    types = [node.meta["val"].dtype for node in upcoming]
                with graph.inserting_before(gathers[begin]):
                    node = graph.call_function(_dc.prefetch_params_fused.default, (
                        graph_id, [node.args[0] for node in upcoming], [node.args[2] for node in upcoming], types))
                node.meta["val"] = None
            num_prefetched = max(num_prefetched, until)
