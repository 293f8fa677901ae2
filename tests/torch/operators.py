"""Shared by the tests of the operators torch.ops.dc.*: a world of one, arguments for each, and PyTorch's own
checks."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List

import pytest

import torch
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS, safe_aot_autograd_check

from libdc.torch import dc, ops  # noqa: E402

D, RT = torch.ops.dc, torch.ops.dc_rt
CONFIG = {"symmetric_memory": False, "double_buffer": True, "free_activation_threshold": 16,
          "sync_before_reduce": False, "sync_after_reduce": False, "sync_before_allgather": False,
          "sync_after_allgather": False}
GRAPH = (1 << 63) - 1  # what id(graph) may be at most
GRAPH_Z2 = 2
SHAPE = (3, 5)
PLAIN, KEPT, FROZEN, WHOLE = 10, 11, 12, 13


class Run:
    """A world of one: three sharded parameters in a stage-3 graph, a whole one in a stage-2 graph."""

    def __init__(self) -> None:
        dc.init(None, CONFIG, 64)
        self.token = torch.empty(0)
        self.shards = {id: torch.randn(15) for id in (PLAIN, KEPT, FROZEN)}
        self.grads = {id: torch.zeros(15) for id in (PLAIN, KEPT)}
        self.grads[FROZEN] = torch.empty(0)
        for id, shard in self.shards.items():
            dc.register_z3_param(id, SHAPE, shard, self.grads[id], persistent=id == KEPT)
        self.whole, self.whole_grad = torch.randn(15), torch.zeros(15)
        dc.register_param(WHOLE, SHAPE, self.whole, self.whole_grad, 0)
        dc.register_graph_z3(GRAPH, list(self.shards))
        dc.register_graph_z2(GRAPH_Z2, [WHOLE])

    def full(self, id: int) -> Any:
        return self.shards[id].view(SHAPE)

    def gather(self, id: int = PLAIN, dtype: Any = None) -> Any:
        return D.wait_allgather(D.allgather_param(self.token, GRAPH, id, dtype=dtype), GRAPH, id)

    def stats(self) -> Any:
        return ops.context().get_memory_stats()


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    dc.cleanup()


def raises(text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(RuntimeError, match=text):
        call(*args, **kwargs)


SAMPLES: Dict[str, Callable[[Run, Any], List[Any]]] = {
    "allgather_param": lambda run, x: [(x, GRAPH, PLAIN), (x, GRAPH, PLAIN, torch.bfloat16)],
    "prefetch_params_fused": lambda run, x: [(GRAPH, [x], [PLAIN], None), (GRAPH, [x], [PLAIN], [torch.float16])],
    "wait_allgather": lambda run, x: [(x, GRAPH, PLAIN)],
    "release_param": lambda run, x: [(x, GRAPH, KEPT, 1)],
    "reduce_grad": lambda run, x: [(x, GRAPH, PLAIN)],
    "free_tensors": lambda run, x: [([x],)],
    "offload_tensor": lambda run, x: [(x, GRAPH, 1)],
    "reload_tensor": lambda run, x: [(x, GRAPH, 1)],
    "wait_offload": lambda run, x: [(x, GRAPH, 1)],
    "wait_reload": lambda run, x: [(x, GRAPH, 1)],
    "offload_parameter": lambda run, x: [(x, GRAPH, PLAIN)],
    "reload_parameter": lambda run, x: [(x, GRAPH, PLAIN)],
    "end_backward": lambda run, x: [(GRAPH,)],
    "take": lambda run, x: [(x, GRAPH, FROZEN), (x, GRAPH, FROZEN, torch.float16)],
}


# Operators whose result is on its way when they return: it may be read only after the wait, which takes the same ids.
PENDING = {"allgather_param": "wait_allgather", "offload_tensor": "wait_offload", "reload_tensor": "wait_reload"}


def opcheck(name: str, args: Any) -> None:
    """PyTorch's own four tests of an operator. The fourth reads the results, so it gets a pending one with its wait."""
    op, checks = getattr(RT if name == "take" else D, name).default, list(DEFAULT_TEST_UTILS)
    if name in PENDING:
        checks.remove("test_aot_dispatch_dynamic")
        wait = getattr(D, PENDING[name])
        safe_aot_autograd_check(lambda x, graph, id, *dtype: wait(op(x, graph, id, *dtype), graph, id), args, {}, True)
    torch.library.opcheck(op, args, test_utils=checks)
