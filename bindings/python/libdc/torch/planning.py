"""Describes a PyTorch model to the planner. Its forward runs on the meta device, where tensors have shapes but no
memory."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ..plan import Layer, Machine, Model, Options, Plan, load, run
from ..plan.checks import whole
from ..plan.model import MAX_TOKENS
from .forward_trace import Trace, own_parameters, units_of

BUCKET_SIZE = 1 << 20  # elements; the default of shard()
_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """The operations of attention's two products, for shapes [batch, heads, tokens, width]."""
    batch, heads, tokens, width = query
    return int(2 * batch * heads * tokens * key[2] * (width + value[3]))


class _WithoutValues(TorchFunctionMode):
    """Traces attention as the fused kernels compute it, without a matrix of all pairs of tokens; the meta device has
    only the plain form. Tensors without values count as true, so a mask that is dropped if all its elements are true is
    dropped."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if function is torch.Tensor.__bool__ and args[0].device.type == "meta":
            return True
        return function(*args, **kwargs)

    @staticmethod
    def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                   is_causal: bool = False, scale: Any = None, enable_gqa: bool = False) -> Any:
        return _fused_attention(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _to_meta(value: Any, dtype: Optional[torch.dtype]) -> Any:
    if isinstance(value, torch.Tensor):
        meta = value.detach().to("meta", dtype if value.dtype.is_floating_point else None)
        return meta.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _to_meta(item, dtype) for key, item in value.items()}
    return type(value)(_to_meta(item, dtype) for item in value) if isinstance(value, (list, tuple)) else value


def _as_arguments(batch: Any) -> Any:
    """The batch as a dict, list or tuple of arguments."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if not isinstance(batch, (dict, list, tuple)):
        raise TypeError(f"plan: batch is a {type(batch).__name__}, must be a tensor, a list or tuple of the forward's "
                        "arguments, or a dict of named ones")
    return batch


def _samples_of(arguments: Any) -> torch.Tensor:
    """The first tensor of the arguments. Its first dimension is the number of samples."""
    values = arguments.values() if isinstance(arguments, dict) else arguments
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if first is None or first.dim() == 0 or first.shape[0] == 0:
        raise ValueError("plan: batch has no tensor of at least one sample")
    return first


def _dtype_of(model: torch.nn.Module) -> str:
    """float32 if any weight has it, else the type of the first weight."""
    types = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    return "float32" if torch.float32 in types or not types else _name_of(types[0])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _frozen(own: List[torch.nn.Parameter]) -> Tuple[int, ...]:
    return tuple(i for i, p in enumerate(own) if not p.requires_grad)


def model_of(model: torch.nn.Module, batch: Any, tokens: int = 0, dtype: Optional[torch.dtype] = None) -> Model:
    """The planner's model, from a forward of the batch on the meta device. The model is not changed. batch: the
    arguments, in a dict by name, or in a list or tuple by position; the first dimension of its tensors counts samples.
    tokens: of a sample; 0: the second dimension of the first tensor, or 1. dtype: the type of floating-point weights,
    buffers and inputs; None: their own types."""
    whole("tokens", tokens, 0, MAX_TOKENS)
    batch = _as_arguments(batch)
    shape = _samples_of(batch).shape
    samples = shape[0]
    arguments, names = ((), _to_meta(batch, dtype)) if isinstance(batch, dict) else (_to_meta(tuple(batch), dtype), {})
    state = {name: _to_meta(tensor, dtype) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    units = units_of(model)
    counter = FlopCounterMode(display=False, custom_mapping={_fused_attention: _attention_flops})
    trace = Trace(model, units, counter.get_total_flops)
    with _WithoutValues(), counter, trace.watch():
        trace.end(torch.func.functional_call(model, state, arguments, names))
    used = {number for segment in trace.segments for number in segment.used}
    owners: Dict[int, Tuple[int, int]] = {}  # a parameter's layer, and its index there
    layers: List[Layer] = []
    for segment in trace.segments:
        own = [p for p in segment.params if id(p) not in owners]
        tied = [p for p in segment.params if id(p) in owners]
        uses = tuple((*owners[id(p)], id(p) in segment.saved) for p in tied)
        owners.update((id(p), (len(layers), i)) for i, p in enumerate(own))
        read = tuple(i for i, p in enumerate(own) if id(p) in segment.saved)
        idle = tuple(i for i, p in enumerate([*own, *tied]) if id(p) in used - segment.used)
        size = segment.kept_bytes // samples
        layers.append(Layer(segment.name, tuple(tuple(p.shape) for p in own), read, segment.flops // samples, size,
                            min(size, segment.input_bytes // samples), 0, uses, _frozen(own), idle, segment.recomputed,
                            segment.reentrant))
    return Model(type(model).__name__, tuple(layers), tokens or (shape[1] if len(shape) > 1 else 1))


def _without_batch(model: torch.nn.Module) -> Model:
    """The planner's model from the parameters alone, without activations."""
    layers, owned = [], set()
    for name, unit in units_of(model).items():
        own = [p for p in own_parameters(name, unit) if id(p) not in owned]
        owned.update(map(id, own))
        layers.append(Layer(name, tuple(tuple(p.shape) for p in own), tuple(range(len(own))), 0, 0, 0, 0, (),
                            _frozen(own)))
    return Model(type(model).__name__, tuple(layers), 1)


def _machine_here(device: torch.device, dtype: str, ranks: int) -> Machine:
    """A machine with this device's memory and the rates of a data sheet. Ranks of this machine share the host's
    memory."""
    machine = load("h100" if device.type == "cuda" else "xeon8480")
    local = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    return machine._replace(ranks_per_node=local, memory_bytes=memory,
                            flops={dtype: machine.flops.get(dtype, machine.peak("bfloat16"))})


def _limited(bucket: int, layers: Model) -> int:
    """The bucket size as shard() limits it."""
    return max(1, min(bucket, layers.trained_parameters))


def _stage_of(model: torch.nn.Module, batch: Any, ranks: int, device: torch.device, options: Dict[str, Any]) -> int:
    """The fastest stage that fits; of equally fast ones the one with least memory. Prints the choice."""
    dtype, used = _dtype_of(model), options["param_dtype"]
    layers = _without_batch(model) if batch is None else model_of(model, batch, 0, used)
    options["bucket"] = _limited(options["bucket"], layers)
    for name in ("param_dtype", "reduce_dtype"):
        options[name] = None if options[name] is None else _name_of(options[name])
    samples = 1 if batch is None else len(_samples_of(_as_arguments(batch)))
    chosen = Options(ranks=ranks, micro_batch=samples, dtype=dtype, grad_dtype=dtype, **options)
    machine = _machine_here(device, chosen.used_dtype, ranks)
    plans = {stage: run(layers, machine, dataclasses.replace(chosen, stage=stage))
             for stage in (0, 1, 3)}  # stage 2 has stage 1's calls
    fitting = [stage for stage in plans if plans[stage].fits]
    taken = min(fitting or [3], key=lambda stage: (plans[stage].step_ns, plans[stage].peak.total))
    counted = "weights, gradients and AdamW's state" + (", without activations" if batch is None else "")
    lacking = "" if fitting else ", though it does not fit"
    told = ", ".join(f"stage {stage} {each.peak.total / 2**30:.2f}" for stage, each in plans.items())
    print(f"libdc: shard(stage=\"auto\") takes stage {taken} for {ranks} ranks with "
          f"{machine.memory_bytes / 2**30:.2f} GiB each{lacking}: GiB of {counted}: {told}",
          file=sys.stderr, flush=True)
    return taken


def choose_stage(model: torch.nn.Module, batch: Any, comm: Any, device: torch.device, **options: Any) -> int:
    """The stage for shard(stage="auto"): rank 0's choice, on every rank. Collective."""
    told, failure = torch.tensor([-1], dtype=torch.int64), None
    if comm.rank == 0:
        try:
            told[0] = _stage_of(model, batch, comm.size, device, options)
        except Exception as error:
            failure = error
    if comm.size > 1:
        comm.broadcast(told, 0)
    if failure is not None:
        raise failure
    if told[0] < 0:
        raise RuntimeError("shard: stage = 'auto': rank 0 could not plan; its error says why")
    return int(told[0])


def plan(model: torch.nn.Module, batch: Any, machine: Any = "h100", tokens: int = 0, **options: Any) -> Plan:
    """Predicts a training step without the machine: libdc.plan's result, for the layers of this model.

        plan = libdc.torch.plan(model, [tokens], machine="h100", ranks=64, stage=3, micro_batch=4)
        print(libdc.plan.as_text(plan))

    machine: a libdc.plan.Machine, the name of one, or a file; options: those of libdc.plan.Options. dtype is the type
    of weights and activations, by default the model's own types. grad_dtype is by default the weights' type.
    param_dtype, reduce_dtype and bucket are those of libdc.torch.shard(), which limits bucket to the number of trained
    elements."""
    if not isinstance(machine, (Machine, str, os.PathLike)):
        raise TypeError(f"plan: machine is a {type(machine).__name__}, must be a libdc.plan.Machine, a name or a file")
    chosen = machine if isinstance(machine, Machine) else load(os.fspath(machine))
    planned = Options(**{"dtype": _dtype_of(model), "bucket": BUCKET_SIZE, **options})
    if "grad_dtype" not in options:  # as for gradients of shard()
        planned = dataclasses.replace(planned, grad_dtype=planned.dtype)
    dtype = getattr(torch, planned.used_dtype) if "dtype" in options or planned.param_dtype is not None else None
    layers = model_of(model, batch, tokens, dtype)
    return run(layers, chosen, dataclasses.replace(planned, bucket=_limited(planned.bucket, layers)))
