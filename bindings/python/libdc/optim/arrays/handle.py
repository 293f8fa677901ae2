"""The base of all optimizers on arrays: groups, parameters, steps, state."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

from ..._handle import OwnedHandle
from ..._lib import ffi, gc_handle, lib, new_struct, text
from ...arguments import assign, c_double, c_int, c_int64, c_string, counted, int64_array
from ...device import Stream, handle_of
from ...errors import check
from ...linalg.handle import Handle, default, handle_ptr
from ...tensors import HOST, Place, Tensor, View, _count, fill, output, result
from ...types import DType


class OptimizerStats(NamedTuple):
    """An optimizer's memory and work on this rank; see dc_optimizer_stats."""

    steps: int
    params: int
    blocks: int
    owned_blocks: int
    refreshes: int
    warm_refreshes: int
    failed_refreshes: int
    state_bytes: int
    scratch_bytes: int
    wire_bytes: int
    refresh_ns: int
    skipped_steps: int


class FlatTensors:
    """Tensors of one dimension, given by their addresses and made once for many steps. Nothing is checked or kept
    alive."""

    def __init__(self, counts: Sequence[int], dtypes: Sequence[DType]) -> None:
        self.count = len(counts)
        self.c = new_struct("dc_tensor", self.count)
        self._shapes = ffi.new("int64_t[]", list(counts) or [0])
        self._addresses, self._dtypes = [0] * self.count, list(dtypes)
        for index, dtype in enumerate(dtypes):
            self.c[index].shape, self.c[index].ndim, self.c[index].dtype = self._shapes + index, 1, dtype

    def set(self, index: int, address: int, dtype: DType) -> None:
        """Sets a tensor's address and type if they changed: most tensors stay where they are, and making a pointer is
        slow."""
        if self._addresses[index] == address and self._dtypes[index] is dtype:
            return
        self._addresses[index], self._dtypes[index] = address, dtype
        tensor = self.c[index]
        tensor.data, tensor.dtype = ffi.cast("void *", address), dtype


class Optimizer(OwnedHandle):
    """Base of the optimizers. A subclass names the C struct of its options (`_struct_name`), and calls the functions
    that create one (`_create`) and set a group's options (`_set_group`). Options in `_zero_allowed` may be 0, which C
    writes as -1; those in `_positive_only` may not. `_counts_on_host`: step counters are in host memory, even if the
    rest of the state is on a device."""

    _kind = "optimizer"
    _struct_name = ""
    _zero_allowed: Sequence[str] = ()
    _positive_only: Sequence[str] = ()
    _counts_on_host = True

    def __init__(self, lr: float = 1e-3, handle: Optional[Handle] = None, **options: Any) -> None:
        self._linalg = default() if handle is None else handle
        out = ffi.new("dc_optimizer **")
        check(self._create(handle_ptr(self._linalg), self._options_struct(options), out))
        self._owned: Any = gc_handle(out[0], lib.dc_optimizer_destroy)
        self._stream: Optional[Stream] = None
        self._scaling: List[View] = []  # loss scale and found_inf, which steps read
        self.params: List[int] = []  # elements that this rank has of each parameter
        self.set_lr(0, lr)

    def _create(self, linalg: Any, options: Any, out: Any) -> int:
        raise NotImplementedError

    def _set_group(self, group: int, options: Any) -> int:
        raise NotImplementedError

    def _options_struct(self, options: Any) -> Any:
        """The C struct. In Python a zero means zero, and becomes C's -1. C's own -1, and 0 as C's default, are refused.
        """
        struct = new_struct(self._struct_name)
        known = {name for name, _ in ffi.typeof(self._struct_name).fields} - {"struct_size", "reserved0"}
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__}: no option {name!r}, there are {', '.join(sorted(known))}")
            assign(struct, name, self._c_value(name, value), f"{type(self).__name__}: {name}")
        return struct

    def _c_value(self, name: str, value: Any) -> Any:
        may_be_zero = name in self._zero_allowed
        if not (may_be_zero or name in self._positive_only):
            return value
        try:
            number = float(value)
        except (TypeError, ValueError):
            return value  # assign() then refuses it
        if not (number > 0 or (number == 0 and may_be_zero)):
            raise ValueError(f"{type(self).__name__}: {name} = {value!r}, must be {'>= 0' if may_be_zero else '> 0'}")
        return value if number else -1

    @property
    def place(self) -> Place:
        """Where weights, gradients and state must be."""
        return self._linalg.device.place

    def set_group(self, group: int, **options: Any) -> None:
        """Sets all options of a group. An index equal to the number of groups adds a group."""
        check(self._set_group(c_int("set_group: group", group), self._options_struct(options)))

    def set_lr(self, group: int, lr: float) -> None:
        check(lib.dc_optimizer_set_lr(self._handle, c_int("set_lr: group", group), c_double("set_lr: lr", lr)))

    def add_param(self, shape: Sequence[int], offset: int = 0, count: Optional[int] = None, dtype: Any = DType.FLOAT32,
                  group: int = 0) -> int:
        """Adds a parameter, of which this rank has the elements [offset, offset + count) in flattened order; count
        None: all from offset on. Returns its index."""
        lengths, index = int64_array("add_param: shape", shape), ffi.new("int64_t *")
        offset = c_int64("add_param: offset", offset)
        if count is None:
            count = min(_count(shape), 1 << 60) - offset  # the library refuses longer shapes
        check(lib.dc_optimizer_add_param(self._handle, c_int("add_param: group", group), *lengths, offset,
                                         c_int64("add_param: count", count), DType.of(dtype), index))
        self.params.append(count)
        return int(index[0])

    def step(self, weights: Sequence[Any], grads: Sequence[Any], grad_scale: float = 1.0) -> None:
        """Changes the weights in place; a parameter whose gradient is None is not changed. All arrays are on the
        handle's device. The caller waits for streams that still write them, and the step is done when the call returns.
        After set_stream() the step runs in that stream's order, and the stream keeps the arrays alive until then."""
        if len(weights) != len(grads):
            raise ValueError(f"step: {counted(len(weights), 'weight')} and {counted(len(grads), 'gradient')}, must be "
                             "as many")
        scale = c_double("step: grad_scale", grad_scale)
        c_weights, c_grads = (new_struct("dc_tensor", len(weights)) for _ in range(2))
        keep = []
        for i, (weight, grad) in enumerate(zip(weights, grads)):
            keep.append(fill(c_weights[i], weight, True, f"step: weights[{i}]", (self.place,)))
            if grad is not None:
                keep.append(fill(c_grads[i], grad, False, f"step: grads[{i}]", (self.place,)))
        check(lib.dc_optimizer_step(self._handle, c_weights, c_grads, ffi.sizeof("dc_tensor"), len(weights), scale))
        if self._stream is not None:
            self._stream.pin(keep, self._scaling)  # set_loss_scale() may replace these before the step reads them

    def set_stream(self, stream: Optional[Stream]) -> None:
        """Makes later steps run in the stream's order; None: on the calling thread. Steps of AdamW and SGD, and on a
        CUDA device of Muon without comm, then return when they are queued. A gradient that is not finite is then no
        error, but counted in `stats().skipped_steps`."""
        check(lib.dc_optimizer_set_stream(self._handle, handle_of(stream)))
        self._stream = stream

    def set_loss_scale(self, loss_scale: Any = None, found_inf: Any = None) -> None:
        """Sets two arrays of one float32 each on the handle's device, which later steps read when they run. They are
        kept alive until they are replaced and earlier steps are done. Gradients are divided by loss_scale (None: they
        are not). A step that reads a number other than 0 from found_inf changes nothing and is counted
        (`stats().skipped_steps`)."""
        views = [View(array, False, f"set_loss_scale: {name}", (self.place,))
                 for name, array in (("loss_scale", loss_scale), ("found_inf", found_inf))]
        check(lib.dc_optimizer_set_loss_scale(self._handle, views[0].c, views[1].c))
        self._scaling = views

    def set_loss_scale_at(self, loss_scale: Optional[int], found_inf: Optional[int]) -> None:
        """set_loss_scale() by the addresses of two float32, whose memory the caller keeps; None: there is none."""
        tensors: List[Any] = [ffi.NULL, ffi.NULL]
        for index, address in enumerate((loss_scale, found_inf)):
            if address is not None:
                tensors[index] = new_struct("dc_tensor")
                tensors[index].data, tensors[index].dtype = ffi.cast("void *", address), DType.FLOAT32
        check(lib.dc_optimizer_set_loss_scale(self._handle, *tensors))

    def step_tensors(self, weights: "FlatTensors", grads: "FlatTensors", grad_scale: float = 1.0) -> None:
        """step() with arrays that the caller has checked, and keeps alive as long as the step reads them."""
        check(lib.dc_optimizer_step(self._handle, weights.c, grads.c, ffi.sizeof("dc_tensor"), weights.count,
                                    grad_scale))

    @property
    def steps(self) -> int:
        """The most steps that any parameter has made. Waits for the stream, if there is one."""
        steps = ffi.new("int64_t *")
        check(lib.dc_optimizer_get_steps(self._handle, steps))
        return int(steps[0])

    def state_names(self, index: int) -> List[str]:
        """The names of the pieces of a parameter's state on this rank."""
        names: List[str] = []
        name = ffi.new("char const **")
        while True:
            check(lib.dc_optimizer_get_state_name(self._handle, c_int64("state_names: index", index), len(names),
                                                  name))
            if name[0] == ffi.NULL:
                return names
            names.append(text(name[0]))

    def state(self, index: int, name: str) -> Tensor:
        """A piece of a parameter's state, to read and write between steps. It is in the handle's device memory, except
        the counters "step", "failures" and "rooted", which are in host memory (not those of AdamW, SGD, and Muon
        without comm)."""
        view = output()
        check(lib.dc_optimizer_get_state(self._handle, c_int64("state: index", index), c_string("name", name), view))
        counts = view.dtype == DType.INT64 and self._counts_on_host
        return result(view, self._handle, HOST if counts else self.place)

    def save(self) -> bytes:
        """This rank's state, as bytes for load()."""
        size = ffi.new("int64_t *")
        check(lib.dc_optimizer_get_save_bytes(self._handle, size))
        memory = bytearray(size[0])
        check(lib.dc_optimizer_save(self._handle, ffi.from_buffer(memory), len(memory)))
        return bytes(memory)

    def load(self, state: Any) -> None:
        """Loads the bytes of save() into an optimizer with the same parameters."""
        try:
            memory = ffi.from_buffer(state)
        except TypeError:
            raise TypeError(f"load: state is a {type(state).__name__}, must be bytes or another buffer") from None
        check(lib.dc_optimizer_load(self._handle, memory, len(memory)))

    def stats(self) -> OptimizerStats:
        stats = new_struct("dc_optimizer_stats")
        check(lib.dc_optimizer_get_stats(self._handle, stats))
        return OptimizerStats(*(int(getattr(stats, name)) for name in OptimizerStats._fields))
