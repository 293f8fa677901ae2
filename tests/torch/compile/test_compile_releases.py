"""When compiled graphs of sharded models give weights back: after their last use, by each compiler."""

from __future__ import annotations

from typing import Any

import libdc.run
import libdc.torch as dct
import pytest
import torch
import torch.nn as nn
from compared import record_graphs
from sharded import one_thread  # noqa: F401

dc = torch.ops.dc


def test_views_whose_schemas_do_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.unsafe_chunk() views its argument. The weight was released before its pieces were read."""

    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.other = nn.Linear(4, 4, bias=False)  # of the same size: it gets the memory that was given back

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = torch.unsafe_chunk(self.weight, 2)
            return (x @ first.t()).sum() * self.other(x) + (x @ second.t()).sum()

    graphs = record_graphs(monkeypatch)

    def rank(comm: Any) -> None:
        torch.manual_seed(0)
        plain = Pieces()
        expected = plain(torch.ones(2, 4))
        model = dct.shard(plain, 3, comm=comm, prefetch=0)
        found = torch.compile(model, backend="libdc", fullgraph=True)(torch.ones(2, 4))
        torch.testing.assert_close(found.detach(), expected.detach())

    torch._dynamo.reset()
    libdc.run.threads(1, rank, timeout=120)
    targets = graphs[0]
    released = min(k for k, (target, args) in enumerate(targets)
                   if target is dc.release_param.default and args[2] == 0)
    products = [k for k, (target, _) in enumerate(targets) if target is torch.ops.aten.mm.default]
    assert len(products) == 3 and released > products[-1]  # ids follow the order of parameters: 0 is `weight`


@pytest.mark.parametrize("how", ["options", "thread"])
def test_inductor_without_libdcs_pass(launch: Any, how: str) -> None:
    """Inductor takes its passes from a configuration that torch.compile(options=...) replaces for each part, and that
    another thread's backward does not see. Weights were gathered and never released then."""
    text = """
import sys, threading, torch
import libdc.torch as dct
from models import Plain, make
from torch._inductor.custom_graph_pass import CustomGraphPass
torch.set_num_threads(1)
comm = dct.init()

class Nothing(CustomGraphPass):
    def __call__(self, graph):
        pass
    def uuid(self):
        return "nothing"

how = %r
model = make(Plain, width=32, layers=2)
dct.shard(model, 3, comm=comm, group_size=1)
options = {"options": {"post_grad_custom_post_pass": Nothing()}} if how == "options" else {}
call = torch.compile(model, **options)
for _ in range(2):
    loss = call(torch.randn(4, 32)).sum()
    assert dct.stats(model).gathered_bytes == 0, ("forward", dct.stats(model).gathered_bytes)
    if how == "thread":
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    del loss
    assert dct.stats(model).gathered_bytes == 0, ("backward", dct.stats(model).gathered_bytes)
    assert all(p.grad is not None for p in model.parameters())
print("released", comm.rank)
""" % how
    assert launch(text).count("released") == 2
