"""One rank's training step, run on the counting device. The trainer gathers a layer before it runs, prefetches later
ones, and reduces each layer's gradients once they are there. Stages are those of libdc.torch.shard: in stages 1 and 2
the first forward after an update gathers the weights, and they stay gathered."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, cast

from .._lib import ffi, lib
from ..errors import check
from ..types import DType
from .checks import whole
from .counting import AdamW, Rank
from .machine import Machine
from .model import Layer, Model, numel
from .options import DTYPES, Options, size_of

_GRAPH = 1
HOLDERS = ("weights", "gradients", "optimizer", "gathered", "buckets", "other libdc", "layer gradients",
           "activations", "workspace")


class Point(NamedTuple):
    """The rank's memory at a moment of the step, by holder."""

    moment: str
    time_ns: int
    bytes: Dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class Span(NamedTuple):
    """One piece of a stream's work."""

    stream: str
    begin_ns: int
    end_ns: int
    what: str


class Plan(NamedTuple):
    model: Model
    machine: Machine
    options: Options
    points: List[Point]
    gather_wire_bytes: int
    reduce_wire_bytes: int
    node_bytes: int
    network_bytes: int
    step_ns: int
    compute_ns: int
    communication_ns: int
    host_bytes: int = 0  # the peak of offloaded activations
    spans: Tuple[Span, ...] = ()  # of the step, if traced

    @property
    def peak(self) -> Point:
        return max(self.points, key=lambda point: point.total)

    @property
    def exposed_ns(self) -> int:
        """Communication that no computation hides."""
        return max(0, self.step_ns - self.compute_ns)

    @property
    def fits(self) -> bool:
        host = self.machine.host_memory_bytes
        return self.peak.total <= self.machine.memory_bytes and (host == 0 or self.host_bytes <= host)

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all ranks."""
        return self.options.ranks * self.options.micro_batch * self.options.accumulate * self.model.tokens

    @property
    def flop_utilisation(self) -> float:
        """The model's operations, without recomputation, over those that the machine could do at its peak."""
        samples = self.options.micro_batch * self.options.accumulate
        peak = self.machine.peak(self.options.used_dtype) * self.step_ns / 1e9
        return samples * self.model.trained_flops / peak if peak > 0 else 0.0


class _Step:
    def __init__(self, model: Model, machine: Machine, options: Options, traced: bool) -> None:
        self.traced, self.spans = traced, cast(List[Span], [])
        self.traced_ops: List[Tuple[str, int, int, str, int]] = []
        self.first = model.first_trained  # autograd keeps nothing of earlier layers
        self.model = model._replace(layers=tuple(
            layer._replace(kept_bytes=0, input_bytes=0) if i < self.first else layer
            for i, layer in enumerate(model.layers)))
        self.machine, self.options = machine, options
        self.dtype, self.grad_dtype = DTYPES[options.dtype], DTYPES[options.grad_dtype]
        self.used_dtype = DTYPES[options.used_dtype]
        self.rank = Rank(machine, options.used_dtype, options.ranks, options.heap, options.bucket, options.replicas)
        self.points: List[Point] = []
        self.activations = self.compute_ns = 0
        self.ids: List[List[int]] = []
        self.frozen: List[bool] = []  # for each parameter
        self.reloaded: Dict[int, Any] = {}
        parts = self._register()
        self.own_ids = [list(ids) for ids in self.ids]
        for layer, ids in zip(model.layers, self.ids):
            ids.extend(self.own_ids[other][shape] for other, shape, _ in layer.uses)
        trained = [part for part, is_frozen in zip(parts, self.frozen) if not is_frozen]
        self.optimizer = AdamW(self.rank, trained, self.dtype, self.grad_dtype)
        self.own = sum(count for _, _, count in trained)
        self.states = {"weights": sum(count for _, _, count in parts) * options.element,
                       "gradients": self.own * size_of(options.grad_dtype)}

    def _register(self) -> List[Tuple[int, int, int]]:
        """Registers all parameters in one graph. Returns the rank's part of each: total elements, offset and count."""
        rank, stage, ranks = self.rank, self.options.stage, self.options.shards
        parts: List[Tuple[int, int, int]] = []
        reduced = DTYPES.get(self.options.reduce_dtype or "", DType.NONE)
        offset, count = ffi.new("int64_t *"), ffi.new("int64_t *")
        for layer in self.model.layers:
            self.ids.append([])
            for place, shape in enumerate(layer.shapes):
                number, total = len(parts), numel(shape)
                self.frozen.append(place in layer.frozen)
                check(lib.dc_shard_range(total, 0, ranks, offset, count))
                parts.append((total, 0, int(count[0]) if stage > 0 else total))
                dims = ffi.new("int64_t[]", list(shape) or [1])
                if stage > 0:
                    padded = [-(-total // ranks)]
                    grad = ffi.NULL if self.frozen[-1] else rank.tensor(padded, self.grad_dtype)
                    check(lib.dc_register_z3_param(rank.context, number, dims, len(shape),
                                                   rank.tensor(padded, self.dtype), grad, int(stage < 3),
                                                   int(reduced)))
                else:
                    grad = ffi.NULL if self.frozen[-1] else rank.tensor([parts[-1][2]], self.grad_dtype)
                    check(lib.dc_register_param(rank.context, number, dims, len(shape), rank.tensor(shape, self.dtype),
                                                grad, 0))
                self.ids[-1].append(number)
        ids = ffi.new("int64_t[]", list(range(len(parts))) or [0])
        register = lib.dc_register_graph_z3 if stage > 0 else lib.dc_register_graph_z0
        check(register(rank.context, _GRAPH, ids, len(parts)))
        return parts

    def note(self, moment: str, layer_gradients: int = 0, workspace: int = 0) -> None:
        """Records a point of memory use. It waits for the stream first, as reading a device's memory would."""
        time_ns = self.rank.wait()
        stats, optimizer = self.rank.stats(), self.optimizer.stats()
        states = int(optimizer.state_bytes + optimizer.scratch_bytes)
        gathered, buckets, reloaded = int(stats.gathered_bytes), int(stats.bucket_bytes), int(stats.reload_bytes)
        values = (self.states["weights"], self.states["gradients"], states, gathered, buckets,
                  self.rank.reserved_bytes() - states - gathered - buckets - reloaded, layer_gradients,
                  self.activations + reloaded, workspace)
        self.points.append(Point(moment, time_ns, dict(zip(HOLDERS, values))))
        if self.traced:
            self.traced_ops.extend(self.rank.trace())

    def work(self, layer: Layer, passes: float, what: str) -> None:
        """Runs a layer's products, as fast as measured for the widths of its matrices, weighted by elements, and for
        its rows."""
        sides = [sorted((numel(shape[:1]), numel(shape[1:]))) for shape in layer.shapes if len(shape) > 1]
        slowness = sum(a * b * 100 / self.machine.percent_of_width(a) for a, b in sides) / sum(a * b for a, b in sides
                                                                                              ) if sides else 1.0
        slowness *= 100 / self.machine.percent_of_rows(self.options.micro_batch * self.model.tokens)
        rate = self.machine.rate(self.options.used_dtype)
        flops = int(passes * layer.flops * slowness)
        duration = self.options.micro_batch * flops * 10**9 // rate if rate > 0 else 0
        self.compute_ns += duration
        self.rank.work(duration)
        if self.traced:
            end = self.rank.wait()
            self.spans.append(Span("compute", end - duration, end, f"{what} of {layer.name}"))

    def gather(self, number: int, following: Sequence[int], ids_of: Sequence[Sequence[int]]) -> None:
        """Gathers a layer, and starts to gather the following ones. ids_of: the parameters that each layer reads."""
        if self.options.stage == 0:
            return
        out = self.rank.tensor([], self.used_dtype)
        dtype = int(DType.NONE if self.options.param_dtype is None else self.used_dtype)
        for i in ids_of[number]:
            check(lib.dc_allgather_param(self.rank.context, ffi.NULL, _GRAPH, i, dtype, out))
        for other in following:
            ids = ids_of[other]
            check(lib.dc_prefetch_params_fused(self.rank.context, _GRAPH, ffi.new("int64_t[]", ids or [0]),
                                               ffi.new("int32_t[]", [dtype] * len(ids) or [0]), len(ids)))
        for i in ids_of[number]:
            check(lib.dc_wait_allgather(self.rank.context, ffi.NULL, _GRAPH, i))

    def release(self, ids: Sequence[int]) -> None:
        for i in ids if self.options.stage > 0 else ():
            check(lib.dc_release_param(self.rank.context, ffi.NULL, _GRAPH, i, 1))

    def recomputes(self, layer: Layer) -> bool:
        """Whether the layer is recomputed. One that keeps only its inputs, as embeddings do, has nothing to
        recompute."""
        return layer.recomputed or (self.options.recompute and layer.input_bytes < layer.kept_bytes)

    def kept(self, layer: Layer) -> int:
        kept = layer.input_bytes if self.recomputes(layer) else layer.kept_bytes
        return kept * self.options.micro_batch

    def offload(self, number: int) -> None:
        """Moves the activations that the layer's forward kept to host memory."""
        layer = self.model.layers[number]
        if self.options.offload and self.kept(layer) > 0:
            kept, out = self.rank.tensor([self.kept(layer)], DType.INT8), self.rank.tensor([], DType.INT8)
            check(lib.dc_offload_tensor(self.rank.context, kept, _GRAPH, number, out))
            check(lib.dc_wait_offload(self.rank.context, ffi.NULL, _GRAPH, number, out))
            self.activations -= self.kept(layer)

    def reload(self, numbers: Sequence[int]) -> None:
        """Starts to copy the kept activations back, for layers whose backward is next."""
        for number in numbers:
            if self.options.offload and self.kept(self.model.layers[number]) > 0:
                out = self.reloaded[number] = self.rank.tensor([], DType.INT8)
                check(lib.dc_reload_tensor(self.rank.context, ffi.NULL, _GRAPH, number, out))

    def forget(self, number: int) -> None:
        """Frees the layer's kept activations after its backward."""
        out = self.reloaded.pop(number, None)
        if out is None:
            self.activations -= self.kept(self.model.layers[number])
        else:
            check(lib.dc_free_tensors(self.rank.context, out, ffi.sizeof("dc_tensor"), 1, ffi.new("int32_t *")))

    def forward(self, where: str) -> None:
        layers, ahead = self.model.layers, self.options.prefetch
        check(lib.dc_start_forward(self.rank.context))
        for i, layer in enumerate(layers):
            self.gather(i, range(i + 1, min(len(layers), i + 1 + ahead)), self.ids)
            self.work(layer, 1, "forward")
            self.activations += self.kept(layer)
            self.note(f"{where}forward of {layer.name}", 0, layer.workspace_bytes * self.options.micro_batch)
            self.offload(i)
            self.release(self.ids[i])
        check(lib.dc_end_forward(self.rank.context))

    def read_by_backward(self, number: int) -> List[int]:
        layer = self.model.layers[number]
        return [*(self.own_ids[number][k] for k in layer.backward),
                *(self.own_ids[other][shape] for other, shape, reads in layer.uses if reads)]

    def backward(self, where: str, update: bool) -> None:
        layers, ahead = self.model.layers, self.options.prefetch
        read = [self.ids[i] if self.recomputes(layer) else self.read_by_backward(i) for i, layer in enumerate(layers)]
        # libdc.torch.shard() casts gradients at stage 0; at other stages the buckets have reduce_dtype.
        casts = self.options.stage == 0 and self.options.reduce_dtype is not None
        reduced = DTYPES[self.options.reduce_dtype or ""] if casts else self.used_dtype
        check(lib.dc_start_backward(self.rank.context, int(update)))
        for i in reversed(range(self.first, len(layers))):
            layer, again = layers[i], self.recomputes(layers[i])
            following = range(i - 1, max(self.first - 1, i - 1 - ahead), -1)
            self.gather(i, following, read)
            self.reload([number for number in (i, *following) if number not in self.reloaded])
            if i in self.reloaded:
                check(lib.dc_wait_reload(self.rank.context, ffi.NULL, _GRAPH, i, self.reloaded[i]))
            self.work(layer, int(again) + self.model.backward_passes(i, self.first), "backward")
            lost = (layer.kept_bytes * self.options.micro_batch - self.kept(layer)) if again else 0
            every = [*layer.shapes, *(layers[other].shapes[shape] for other, shape, _ in layer.uses)]
            shapes = [(number, shape) for place, (number, shape) in enumerate(zip(self.ids[i], every))
                      if not self.frozen[number] and place not in layer.idle]
            # Autograd returns whole gradients.
            gradients = sum(numel(shape) for _, shape in shapes) * size_of(self.options.used_dtype)
            for number, shape in shapes:
                check(lib.dc_reduce_grad(self.rank.context, self.rank.tensor(shape, reduced), _GRAPH, number))
            self.note(f"{where}backward of {layer.name}", gradients,
                      lost + layer.workspace_bytes * self.options.micro_batch)
            self.forget(i)
            self.release(read[i])
            if layer.reentrant:
                own = self.read_by_backward(i)
                self.gather(0, (), [own])
                self.release(own)
        check(lib.dc_end_backward(self.rank.context, _GRAPH, 0))

    def update(self) -> None:
        """Runs the optimizer. It reads and writes the weights, two moments, and a float32 copy of 16-bit weights; it
        reads gradients."""
        element = self.options.element
        moved = self.own * (2 * element + size_of(self.options.grad_dtype) + 16 + (8 if element < 4 else 0))
        rate = self.machine.memory_bytes_per_second
        duration = moved * 10**9 // rate if rate > 0 else 0
        if self.options.optimizer:
            self.compute_ns += duration
            self.optimizer.step()
            self.rank.work(duration)
        trained = [number for number, is_frozen in enumerate(self.frozen) if not is_frozen]
        if trained:
            check(lib.dc_context_params_updated(self.rank.context, ffi.new("int64_t[]", trained), len(trained)))
        self.note("update")

    def traced_spans(self, begin_ns: int) -> Tuple[Span, ...]:
        if not self.traced:
            return ()
        names = {number: layer.name for layer, ids in zip(self.model.layers, self.own_ids) for number in ids}
        spans = [*self.spans, *(Span(stream, begin, end, f"{op} of {names.get(number, 'the step')}")
                                for stream, begin, end, op, number in self.traced_ops if end > begin)]
        spans.sort(key=lambda span: span.begin_ns)
        return tuple(span._replace(begin_ns=span.begin_ns - begin_ns, end_ns=span.end_ns - begin_ns) for span in spans)

    def copies_ns(self, count: int) -> int:
        """The time of copying this many bytes inside the device."""
        rate = self.machine.memory_bytes_per_second
        return 2 * count * 10**9 // rate if rate > 0 else 0

    def moves_ns(self, received_bytes: int, collectives: int) -> int:
        """The time of collectives inside a node, whose cores move the data. No core is busy while data comes over the
        network."""
        rate = self.machine.node_bytes_per_second
        moves_ns = collectives * self.machine.node_latency_ns + (received_bytes * 10**9 // rate if rate > 0 else 0)
        return moves_ns if self.options.ranks > 1 else 0

    def shared_ns(self, busy_ns: int) -> int:
        """The least time of a step in which each rank of a node is busy for busy_ns, on the cores that the ranks
        share."""
        machine, ranks = self.machine, self.options.ranks
        local = min(ranks, machine.ranks_per_node or ranks)
        return busy_ns * local // machine.cores if machine.cores > 0 and local > 0 else 0

    def run(self) -> Plan:
        """Plans the second of two steps, since the first one also allocates the memory that stays."""
        rank, before = self.rank, (0, 0, 0, 0, 0, 0)
        for step in range(2):
            before = (rank.count("time_ns"), rank.count("node_received_bytes"), rank.count("network_received_bytes"),
                      rank.count("link_busy_ns"), rank.count("copied_bytes"), rank.count("collectives"))
            self.points, self.spans, self.traced_ops, self.compute_ns = [], [], [], 0
            if self.traced:
                self.rank.trace_start()
            check(lib.dc_context_reset_stats(rank.context))
            for micro in range(self.options.accumulate):
                where = f"micro-batch {micro + 1}, " if self.options.accumulate > 1 else ""
                self.forward(where)
                self.backward(where, micro == self.options.accumulate - 1)
            self.update()
        stats = rank.stats()
        points = [point._replace(time_ns=point.time_ns - before[0]) for point in self.points]
        busy = self.compute_ns
        busy += self.moves_ns(rank.count("node_received_bytes") - before[1], rank.count("collectives") - before[5])
        busy += self.copies_ns(rank.count("copied_bytes") - before[4])
        plan = Plan(self.model, self.machine, self.options, points, int(stats.gather_wire_bytes),
                    int(stats.reduce_wire_bytes), rank.count("node_received_bytes") - before[1],
                    rank.count("network_received_bytes") - before[2],
                    max(points[-1].time_ns, self.shared_ns(busy)), self.compute_ns,
                    rank.count("link_busy_ns") - before[3], int(stats.offload_bytes), self.traced_spans(before[0]))
        rank.close()
        return plan


def _look_at_size(model: Model, machine: Machine, options: Options) -> None:
    """Refuses models whose numbers exceed the counting device's 64 bits, or that would take hours to count."""
    samples = options.micro_batch * options.accumulate
    whole(f"{model.name}: parameters", model.parameters, 0, 1 << 44)
    whole(f"{model.name}: bytes kept and used by the layers for micro_batch = {options.micro_batch}",
          options.micro_batch * sum(layer.kept_bytes + layer.workspace_bytes for layer in model.layers), 0, 1 << 60)
    whole(f"{model.name}: layers, times accumulate = {options.accumulate}", len(model.layers) * options.accumulate, 1,
          1 << 17)
    rates = (machine.memory_bytes_per_second, machine.host_bytes_per_second, machine.node_bytes_per_second,
             machine.network_bytes_per_second)
    moved = 64 * options.accumulate * model.parameters + options.micro_batch * sum(
        layer.kept_bytes for layer in model.layers)
    work = 4 * 100 * samples * model.flops / max(1, machine.rate(options.used_dtype))  # at 1 % for narrow products
    seconds = work + moved / max(1, min([rate for rate in rates if rate > 0], default=1))
    if seconds > 1e9:
        raise ValueError(f"{model.name} on {machine.name}: a step takes up to {seconds:.1e} s, must be at most 1e9 s")


def run(model: Model, machine: Machine, options: Options, traced: bool = False) -> Plan:
    """Plans a step on rank 0, whose parts are the largest. traced: the plan has spans."""
    _look_at_size(model, machine, options)
    return _Step(model, machine, options, traced).run()


def largest_micro_batch(plan: Plan) -> int:
    """The most samples with which the step fits; 0 if not even one does. With offload, libdc's own memory grows with
    them too."""
    most, host = 1 << 20, plan.machine.host_memory_bytes
    if plan.host_bytes > 0 and host > 0:
        most = min(most, host * plan.options.micro_batch // plan.host_bytes)
    for point in plan.points:
        grows = point.bytes["activations"] + point.bytes["workspace"]
        grows += point.bytes["other libdc"] if plan.options.offload else 0
        free = plan.machine.memory_bytes - (point.total - grows)
        if free < 0:
            return 0
        most = min(most, free * plan.options.micro_batch // grows if grows > 0 else most)
    return most


def peak_holders(plan: Plan) -> List[Tuple[str, int]]:
    """The holders of the memory at the peak, the largest first."""
    return sorted(((name, count) for name, count in plan.peak.bytes.items() if count), key=lambda item: -item[1])

