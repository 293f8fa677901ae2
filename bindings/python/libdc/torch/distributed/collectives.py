"""PyTorch's collectives, implemented by those of a communicator. Each blocks until it is done."""

from __future__ import annotations

from typing import Any, List, Sequence

import libdc
import torch

from .reductions import Reduction, sparse_signature, sum_sparse, text_of
from .tensors import (
    check, check_device, check_parts, contiguous_output, flat_count, flat_output, flat_view, flattened, overlap)

_ROWS_BYTES = 1 << 22  # bytes of a gather for a reduction that libdc does not have


class Collectives:
    """One rank's end of the collectives."""

    def __init__(self, comm: libdc.Comm) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._cause = ""  # the call behind an error that names a gather of descriptions

    # ---- reductions ----

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any) -> None:
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                check_device("all_reduce", tensor)
                self._all_reduce_sparse(tensor, op)
                continue
            check("all_reduce", tensor)
            with contiguous_output(tensor) as data:
                self._all_reduce(data, Reduction.of("all_reduce", op, data.dtype))

    def _all_reduce(self, data: torch.Tensor, reduction: Reduction, details: str = "") -> None:
        if not data.numel():
            self.comm.all_reduce(flat_view(data))
        elif reduction.native:
            if reduction.factor is not None:
                data.mul_(reduction.factor)
            self.comm.all_reduce(flat_view(_real(data)), reduction.native_op)
        else:
            self._compare(reduction.signature(data.numel(), details))
            flat = data.view(-1)
            for window in flat.split(max(1, _ROWS_BYTES // (self.size * flat.element_size()))):
                window.copy_(reduction.combine(self._rows(window)))

    def _compare(self, call: torch.Tensor) -> None:
        """Raises if the ranks' reductions differ. If another rank's call is not such a reduction, libdc's error names
        the gather of the descriptions. The text then says which call of this rank that was."""
        try:
            rows = self._rows(call)
        except libdc.Error as error:
            if f"({self.size * call.numel()} elements, int8)" not in error.text:
                raise
            self._cause = self._cause or text_of(call)  # a broken group keeps its error
            raise libdc.Error(error.status, f"{error.text}; rank {self.rank} called {self._cause}, which begins with "
                                            "that all_gather") from None
        Reduction.compare(rows)

    def _rows(self, part: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's part, as rows."""
        rows = part.new_empty(self.size, part.numel())
        self.comm.all_gather(flat_view(part), flat_view(rows))
        return rows

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Any) -> None:
        Reduction.check_sparse(op)
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # its new values are for the caller
            self._sum_sparse(tensor)

    def _sum_sparse(self, tensor: torch.Tensor) -> None:
        own = tensor.coalesce()
        self._compare(sparse_signature(own))
        counts = [int(count) for count, in self._rows(torch.tensor([own._nnz()], device="cpu")).tolist()]
        indices = self._ragged(own.indices().t().contiguous(), counts)
        values = self._ragged(own.values().contiguous(), counts)
        total = sum_sparse([(part.t(), value) for part, value in zip(indices, values)], tensor.shape)
        tensor.copy_(total)

    def _ragged(self, mine: torch.Tensor, counts: List[int]) -> List[torch.Tensor]:
        """Gathers every rank's rows, of which each may have a different number."""
        out = mine.new_empty(sum(counts), *mine.shape[1:])
        row = flat_count(mine.dtype, mine[:1].numel() if len(mine) else out[:1].numel())
        self.comm.all_gather(flat_view(mine), flat_view(out), [count * row for count in counts])
        return list(out.split(counts))

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> None:
        """Reduces to rank root. Other ranks keep their values."""
        check("reduce", tensor)
        reduction, details = Reduction.of("reduce", op, tensor.dtype), f" for rank {root}"
        if self.rank == root:
            with contiguous_output(tensor) as data:
                self._all_reduce(data, reduction, details)
        else:
            self._all_reduce(tensor.clone(memory_format=torch.contiguous_format), reduction, details)

    def reduce_scatter_flat(self, out: torch.Tensor, whole: torch.Tensor, op: Any) -> None:
        check("reduce_scatter_tensor", out, whole)
        _check_parts("reduce_scatter_tensor", "output", out, "input", whole, self.size)
        with contiguous_output(out, keep=False) as part:
            self._reduce_scatter(part, whole.contiguous(), None, Reduction.of("reduce_scatter_tensor", op, whole.dtype))

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: Any) -> None:
        check("reduce_scatter", out, *parts)
        _check_length("reduce_scatter", "input", parts, self.size)
        check_parts("reduce_scatter", parts, self.rank, out)
        counts = [part.numel() for part in parts]
        with contiguous_output(out, keep=False) as part:
            self._reduce_scatter(part, flattened(parts), counts, Reduction.of("reduce_scatter", op, out.dtype))

    def _reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor, counts: Any, reduction: Reduction) -> None:
        if not reduction.native:
            whole = whole.clone()
            self._all_reduce(whole, reduction, f" in parts {counts}" if counts else "")
            begin = sum(counts[: self.rank]) if counts else self.rank * out.numel()
            out.view(-1).copy_(whole.view(-1)[begin : begin + out.numel()])
            return
        if reduction.factor is not None:
            whole = whole.clone().mul_(reduction.factor)
        else:
            whole = _apart(whole, out)
        if counts and whole.is_complex():
            counts = [2 * count for count in counts]
        self.comm.reduce_scatter(flat_view(_real(whole)), flat_view(_real(out)), counts, reduction.native_op)

    # ---- moves ----

    def all_gather_flat(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        check("all_gather_into_tensor", out, mine)
        _check_parts("all_gather_into_tensor", "input", mine, "output", out, self.size)
        with contiguous_output(out, keep=False) as whole:
            self._gather(mine, whole, mine.numel() * self.rank, None)

    def all_gather(self, outs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Gathers parts, which may have different sizes."""
        check("all_gather", mine, *outs)
        _check_length("all_gather", "output", outs, self.size)
        check_parts("all_gather", outs, self.rank, mine)
        with flat_output(outs) as block:
            self._gather(mine, block, sum(out.numel() for out in outs[: self.rank]), _counts(outs))

    def _gather(self, mine: torch.Tensor, whole: torch.Tensor, place: int, counts: Any) -> None:
        """Gathers mine into whole. mine may overlap whole; its own part begins at element `place` of whole."""
        part = mine.contiguous()
        if part.data_ptr() != whole.data_ptr() + place * whole.element_size():
            part = _apart(part, whole)
        self.comm.all_gather(flat_view(part), flat_view(whole), counts)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        check("broadcast", tensor)
        with contiguous_output(tensor) as data:
            self.comm.broadcast(flat_view(data), root)

    def all_to_all(self, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """parts: what each rank gets from this rank; outs: what this rank gets."""
        call = "all_to_all"
        check(call, *outs, *parts)
        _check_length(call, "output", outs, self.size)
        _check_length(call, "input", parts, self.size)
        _check_one_type(call, *outs, *parts)
        with flat_output(outs) as block:
            whole = _apart(flattened(parts), block)
            self.comm.all_to_all(flat_view(whole), flat_view(block), _counts(parts), _counts(outs))
        torch.autograd.graph.increment_version(outs)

    def all_to_all_flat(self, out: torch.Tensor, whole: torch.Tensor, out_counts: Sequence[int],
                        counts: Sequence[int]) -> None:
        """Exchanges parts along dimension 0. The counts are in elements of flat_view()."""
        _check_one_type("all_to_all_single", out, whole)
        with contiguous_output(out, keep=False) as target:
            data = _apart(whole.contiguous(), target)
            self.comm.all_to_all(flat_view(data), flat_view(target), counts, out_counts)
        torch.autograd.graph.increment_version(out)

    def gather(self, outs: Sequence[torch.Tensor], mine: torch.Tensor, root: int) -> None:
        check("gather", mine, *outs)
        if self.rank != root:
            self.comm.gather(flat_view(mine.contiguous()), root=root)
            return
        _check_length("gather", "output", outs, self.size)
        _check_one_type("gather", mine, *outs)
        with flat_output(outs) as block:
            part = _apart(mine.contiguous(), block)
            self.comm.gather(flat_view(part), flat_view(block), _counts(outs), root)
        torch.autograd.graph.increment_version(outs)

    def gather_flat(self, out: torch.Tensor, mine: torch.Tensor, root: int) -> None:
        """out: the concatenated parts, on the root alone."""
        check("gather_single", mine)
        if self.rank != root:
            self.comm.gather(flat_view(mine.contiguous()), root=root)
            return
        check("gather_single", out)
        _check_parts("gather_single", "input", mine, "output", out, self.size)
        with contiguous_output(out, keep=False) as whole:
            self.comm.gather(flat_view(_apart(mine.contiguous(), whole)), flat_view(whole), root=root)
        torch.autograd.graph.increment_version(out)

    def scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> None:
        check("scatter", out, *parts)
        with contiguous_output(out, keep=False) as part:
            if self.rank != root:
                self.comm.scatter(None, flat_view(part), root=root)
            else:
                _check_length("scatter", "input", parts, self.size)
                _check_one_type("scatter", out, *parts)
                whole = _apart(flattened(parts), part)
                self.comm.scatter(flat_view(whole), flat_view(part), _counts(parts), root)
        torch.autograd.graph.increment_version(out)


def _apart(data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The data, or a copy if received data could overwrite parts that were not sent yet."""
    return data.clone() if overlap(data, target) else data


def _counts(tensors: Sequence[torch.Tensor]) -> List[int]:
    return [flat_count(tensor.dtype, tensor.numel()) for tensor in tensors]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _check_one_type(call: str, *tensors: torch.Tensor) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(f"{call}: tensors of {' and '.join(sorted(map(str, dtypes)))}, must be of one type")


def _check_length(call: str, what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{call}: {len(tensors)} {what} tensors, must be {size}, one for each rank")


def _check_parts(call: str, part_name: str, part: torch.Tensor, whole_name: str, whole: torch.Tensor, size: int
                 ) -> None:
    if part.dtype is not whole.dtype:
        raise ValueError(f"{call}: {part_name} is {part.dtype} and {whole_name} {whole.dtype}, must be the same")
    if part.numel() * size != whole.numel():
        raise ValueError(f"{call}: {whole_name} has {whole.numel()} elements, must have {part.numel() * size}: "
                         f"{size} ranks times the {part.numel()} of {part_name}")
