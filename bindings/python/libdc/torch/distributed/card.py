"""NCCL below a process group: collectives of tensors on a card go to PyTorch's NCCL backend."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

# The routed calls. Messages are not among them: PyTorch batches them only for its own groups, and NCCL's single
# messages may deadlock.
_CALLS = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "all_gather_single", "_allgather_base",
          "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "allgather", "allgather_coalesced",
          "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
          "reduce_scatter_tensor_coalesced", "reduce_scatter", "all_to_all_single", "alltoall_base", "alltoall",
          "gather", "gather_single", "gather_into_tensor", "scatter", "barrier", "_start_coalescing",
          "_end_coalescing")


def create_nccl_group(store: Any, rank: int, size: int, options: Any) -> dist.ProcessGroup:
    """A PyTorch group over NCCL. options: a ProcessGroupNCCL.Options with the group's timeout."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.NCCL
    backend = getattr(dist, "ProcessGroupNCCL")(store, rank, size, options)
    backend._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    return group


def nccl_options(given: Optional[Any], timeout: Any, ranks: Any, name: str) -> Any:
    """NCCL's options for a group. given: the program's pg_options; None: PyTorch's defaults."""
    options = getattr(dist, "ProcessGroupNCCL").Options() if given is None else given
    options._timeout, options.global_ranks_in_group, options.group_name = timeout, list(ranks), name
    return options


def is_of_card(value: Any) -> bool:
    """Whether an argument of a call is a card, a tensor on one, or a list that begins with one."""
    while isinstance(value, (list, tuple)):
        if not value:
            return False
        value = value[0]
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    device = value if isinstance(value, torch.device) else getattr(value, "device", None)  # of BarrierOptions
    return isinstance(device, torch.device) and device.type == "cuda"


def route_calls(cls: Any, of_card: Callable[[Any], bool] = is_of_card) -> None:
    """Routes collectives with an argument on a card to the group that cls.card_group() returns."""
    for name in _CALLS:
        setattr(cls, name, _routed(name, getattr(cls, name), of_card))


def _routed(name: str, call: Any, of_card: Callable[[Any], bool]) -> Any:
    @functools.wraps(call)
    def routed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(of_card, args)):
            return getattr(self.card_group(), name)(*args, **kwargs)
        return call(self, *args, **kwargs)

    return routed
