"""Calls that users get wrong: each is refused at once, by an error that names the argument, its value and what may
be."""

from __future__ import annotations

import math
import os

import libdc
import numpy as np
import pytest
from libdc import linalg
from libdc.optim import arrays
from libdc.transformer import Layer, LayerConfig, plan

NAN = math.nan
FEW = np.zeros(4, np.float32)
EYE = np.eye(4, dtype=np.float32)
LINEAR = linalg.SampleLayer("linear")
X = np.zeros((1, 2, 64), np.float32)
FROZEN = np.eye(4, dtype=np.float32)
ONES = np.ones(4, np.float32)
FROZEN.flags.writeable = False


def config(**changed):
    return LayerConfig(**{"hidden_size": 64, "heads": 4, **changed})


def refused(text, call):
    with pytest.raises((TypeError, ValueError, libdc.Error)) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("text, call", [
    ("shape = 4, must be a sequence", lambda c: c.register_z3_param(1, 4, FEW, FEW)),
    ("length -4 in dimension 0, must be >= 0", lambda c: c.register_z3_param(1, (-4,), FEW, FEW)),
    ("more than 2^56 elements", lambda c: c.register_z3_param(1, (2**62, 2**62), FEW, FEW)),
    (f"shape = ({2**70},), must be", lambda c: c.register_z3_param(1, (2**70,), FEW, FEW)),
    ("shard is NULL", lambda c: c.register_z3_param(1, (4,), None, FEW)),
    ("shard is a list, must have __dlpack__", lambda c: c.register_z3_param(1, (4,), [1.0], FEW)),
    ("shard is an array of type '|O', must be of", lambda c: c.register_z3_param(1, (4,), np.array([None]), FEW)),
    ("shard is not contiguous", lambda c: c.register_z3_param(1, (2,), FEW[::2], FEW)),
    ("has 3 elements, must have 4", lambda c: c.register_z3_param(1, (4,), FEW[:3], FEW)),
    ("grad_buffer is read-only, must be writable", lambda c: c.register_z3_param(1, (4, 4), EYE, FROZEN)),
    ("dtype = 'floaty', must be one of float32", lambda c: c.register_z3_param(1, (4,), FEW, FEW, False, "floaty")),
    ("dtype = '99', must be one of float32", lambda c: c.allgather_param(None, 1, 1, 99)),
    ("ids = 7, must be a sequence", lambda c: c.register_graph_z3(1, 7)),
    ("ids = ['a'], must be a sequence", lambda c: c.register_graph_z3(1, ["a"])),
    ("grad is a list, must have __dlpack__", lambda c: c.reduce_grad([1.0], 1, 7)),
    ("nbytes = -1, must be 0 to", lambda c: c.memory_alloc(-1)),
    ("kind = 77, must be", lambda c: c.memory_alloc(8, 77)),
    ("limit = -1, must be 0 to", lambda c: c.trace_read(-1)),
    ("capacity = -1, must be 0 to", lambda c: c.trace_start(-1)),
    ("folder = 'a\\x00b', must be a path without NUL", lambda c: c.trace_dump("a\0b")),
    ("folder = 7, must be a path", lambda c: c.trace_dump_on_error(7)),
    ("op = 999 is none", lambda c: c.dry_run(999, 1, 1)),
    ("stream = 's', must be a Stream or None", lambda c: c.set_stream("s")),
])
def test_of_a_context(context, text, call):
    before = context.get_memory_stats()
    refused(text, lambda: call(context))
    assert context.get_memory_stats() == before


@pytest.mark.parametrize("text, arguments", [
    ("comm = 'world', must be a Comm or None", ("world",)),
    ("config = 'abc', must have some of the attributes symmetric_memory", (None, "abc")),
    ("config.check_finite = nan, must be a number", (None, {"check_finite": NAN})),
    (f"config.check_finite = {2**40}, must be a number", (None, {"check_finite": 2**40})),
    ("initial_reduce_bucket_size = -3, must be 0 to", (None, None, -3)),
    ("initial_reduce_bucket_size = 1.5, must be an integer", (None, None, 1.5)),
])
def test_of_init(text, arguments):
    with libdc.Context() as context:
        refused(text, lambda: context.init(*arguments))
        context.init()


ONE = np.zeros(1, np.float32)


@pytest.mark.parametrize("text, call", [
    ("(there is 1 group)", lambda c: arrays.AdamW().set_lr(3, 1.0)),
    ("weights[0] has 1 element, must have 4", lambda c: step([ONE], [ONE])),
    ("a part of the 1 element", lambda c: arrays.AdamW().add_param((1,), offset=0, count=2)),
    ("shard of parameter 2 on rank 0 has 4 elements, must have 1 (1 element over 1 rank, rounded up)",
     lambda c: c.register_z3_param(2, (1,), FEW, FEW)),
    ("is not a registered parameter (1 is registered)", lambda c: c.register_graph_z3(1, [5])),
    ("is not a registered graph (1 is registered)", lambda c: c.allgather_param(None, 5, 1)),
    ("is not in graph 1 (it has 1 parameter)", lambda c: (c.register_z3_param(2, (4,), FEW, FEW),
                                                          c.allgather_param(None, 1, 2))),
    ("grad has 1 element, but parameter 1 has 4", lambda c: c.reduce_grad(ONE, 1, 1)),
    ("is in 1 graph; unregister it first", lambda c: c.unregister_param(1)),
    ("a has 1 dimension, must have 2", lambda c: linalg.eigh(FEW)),
    ("must have one for each of 1 rank", lambda c: libdc.Comm.single().all_gather(FEW, FEW.copy(), counts=[1, 2])),
    ("dtypes has 1 entry, must have one for each of 2 ids", lambda c: c.prefetch_params_fused(1, [1, 1], ["float32"])),
    ("needs 4 bytes, the buffer has 1", lambda c: c.memory_alloc(1).tensor((1,), "float32")),
])
def test_one_thing_is_not_called_many(context, text, call):
    context.register_z3_param(1, (4,), FEW.copy(), FEW.copy())
    context.register_graph_z3(1, [1])
    refused(text, lambda: call(context))


@pytest.mark.parametrize("text, call", [
    ("name = 5, must be a str", lambda: libdc.Device(5)),
    ("name = 'cpu\\x00x', must be a str without NUL", lambda: libdc.Device("cpu\0x")),
    ("name = '\\udce9', must have characters of UTF-8 alone", lambda: libdc.Device("\udce9")),
    ('name = "tpu", must be "cpu"', lambda: libdc.Device("tpu")),
    ("device = 'cpu', must be a Device", lambda: libdc.Context("cpu")),
    ("device = None, must be a Device", lambda: libdc.Stream(None)),
    ("n = 1099511627776, must be 0 to", lambda: libdc.Comm.threads(2**40)),
    ("world_size = 65, must be 1 to 64", lambda: libdc.Comm.threads(65)),
    ("n = '2', must be an integer", lambda: libdc.Comm.threads("2")),
    ("timeout = nan, must be > 0 seconds", lambda: libdc.Comm.threads(1, timeout=NAN)),
    ("timeout = 'x', must be a number of seconds", lambda: libdc.Comm.threads(1, timeout="x")),
    ("heap_bytes = -1, must be 0 to", lambda: libdc.Comm.threads(1, heap_bytes=-1)),
    ("rank = 3, must be 0 to 1", lambda: libdc.Comm.processes("a", 3, 2)),
    ("counts has 2 entries", lambda: libdc.Comm.single().all_gather(FEW, FEW.copy(), counts=[1, 2])),
    ("op = 9, must be", lambda: libdc.Comm.single().all_reduce(FEW.copy(), op=9)),
    ("root = 5, must be 0 to 0", lambda: libdc.Comm.single().broadcast(FEW.copy(), root=5)),
])
def test_of_devices_and_communicators(text, call):
    refused(text, call)


def step(*arguments, **named):
    optimizer = arrays.AdamW()
    optimizer.add_param((4,))
    optimizer.step(*arguments, **named)


@pytest.mark.parametrize("text, call", [
    ("AdamW: beta1 = nan, must be >= 0", lambda: arrays.AdamW(beta1=NAN)),
    ("options.weight_decay = nan, must be >= 0 and finite", lambda: arrays.AdamW(weight_decay=NAN)),
    ("options.momentum = -1, must be >= 0 and < 1", lambda: arrays.SGD(momentum=-1)),
    ("lr = inf, must be finite", lambda: arrays.AdamW(lr=math.inf)),
    ("beta1 = 'x', must be a number", lambda: arrays.AdamW(beta1="x")),
    ("no option 'betas', there are amsgrad", lambda: arrays.AdamW(betas=(0.9, 0.99))),
    ("comm = 'c', must be a Comm or None", lambda: arrays.Shampoo(comm="c")),
    ("handle = 'h', must be a Handle", lambda: arrays.SOAP(handle="h")),
    ("shape = 4, must be a sequence", lambda: arrays.AdamW().add_param(4)),
    ("more than 2^56 elements", lambda: arrays.AdamW().add_param((2**40, 2**30))),
    ("offset = 9 and count = -5, must be a part", lambda: arrays.AdamW().add_param((4,), offset=9)),
    ("weights[0] is a list, must have", lambda: step([[1.0]], [FEW])),
    ("weights[0] has 3 elements, must have 4", lambda: step([FEW[:3].copy()], [FEW[:3]])),
    ("1 weight and 0 gradients", lambda: step([FEW.copy()], [])),
    ("grads[0] is int32, must be float32", lambda: step([FEW.copy()], [np.zeros(4, np.int32)])),
    ("grad_scale = nan, must be finite", lambda: step([FEW.copy()], [FEW], grad_scale=NAN)),
    ("state is a str, must be bytes", lambda: arrays.AdamW().load("x")),
    ("name = None, must be a str", lambda: arrays.AdamW().state(0, None)),
    ("set_lr: lr = 'x', must be a number", lambda: arrays.AdamW().set_lr(0, "x")),
    ("set_lr: group = '0', must be an integer", lambda: arrays.AdamW().set_lr("0", 0.1)),
    ("set_group: group = None, must be an integer", lambda: arrays.AdamW().set_group(None)),
    ("add_param: offset = 'x', must be an integer", lambda: arrays.AdamW().add_param((4,), offset="x")),
    ("add_param: count = 1.5, must be an integer", lambda: arrays.AdamW().add_param((4,), count=1.5)),
    ("add_param: group = 'x', must be an integer", lambda: arrays.AdamW().add_param((4,), group="x")),
    ("grad_scale = 'x', must be a number", lambda: step([FEW.copy()], [FEW], grad_scale="x")),
    ("state: index = 'x', must be an integer", lambda: arrays.AdamW().state("x", "step")),
    ("add_layer: bias = 'x', must be an integer", lambda: arrays.KFAC().add_layer(LINEAR, 0, "x")),
    ("loss_scale = 'x', must be a number", lambda: arrays.KFAC().accumulate(0, EYE, EYE, "x")),
    ("grads[0] overlaps weights[0], which are written", lambda: step([ONES], [ONES])),
])
def test_of_optimizers(text, call):
    refused(text, call)


@pytest.mark.parametrize("text, call", [
    ("a is None, must be an array", lambda: linalg.eigh(None)),
    ("a is a list, must have", lambda: linalg.eigh([[1.0]])),
    ("a is 4 by 1, must be square", lambda: linalg.eigh(EYE[:, :1].copy())),
    ("handle = 'cpu', must be a Handle", lambda: linalg.eigh(EYE, handle="cpu")),
    ("eps_abs = 'x', must be a number", lambda: linalg.inverse_root(EYE, 2, eps_abs="x")),
    ("root = 2.5, must be an integer", lambda: linalg.inverse_root(EYE, 2.5)),
    (f"root = {10**12}, must be ", lambda: linalg.inverse_root_newton(EYE, 10**12)),
    ("root = -1, must be 1 to", lambda: linalg.inverse_root(EYE, -1)),
    ("options.eps_abs = nan, must be finite", lambda: linalg.inverse_root(EYE, 2, eps_abs=NAN)),
    ("out is read-only", lambda: linalg.inverse_root(EYE, 2, out=FROZEN)),
    ("basis is read-only", lambda: linalg.inverse_root(EYE, 2, basis=FROZEN)),
    ("b is float64, must be float32", lambda: linalg.matmul(EYE, np.eye(4))),
    ("b is a str, must have", lambda: linalg.matmul(EYE, "b")),
    ("a_shape = (-2, 2), must be rows and columns", lambda: linalg.kron_nearest(EYE, (-2, 2), (2, 2))),
    ("a_shape = 3, must be rows and columns, two", lambda: linalg.kron_nearest(EYE, 3, (2, 2))),
    ("b_shape = (2.0, 2), must be rows and columns", lambda: linalg.kron_nearest(EYE, (2, 2), (2.0, 2))),
    ("budget_bytes = -1, must be >= 1", lambda: linalg.matmul_bounded(EYE, EYE, -1)),
    ("threads = '2', must be a number", lambda: linalg.Handle(threads="2")),
    ("device = 'cpu', must be a Device", lambda: linalg.Handle(device="cpu")),
    ("memory is read-only", lambda: linalg.Handle().set_workspace(FROZEN)),
    ("power = 'x', must be a number", lambda: linalg.matrix_power(EYE, "x")),
    ("alpha = 'x', must be a number", lambda: linalg.matmul(EYE, EYE, alpha="x")),
    ("damping = 'x', must be a number", lambda: linalg.kron_solve(EYE, FEW, EYE, FEW, "x", EYE)),
    ("max_norm = 'x', must be a number", lambda: linalg.clip_factors(FEW, "x")),
    ("descending = 'False', must be True or False", lambda: linalg.eigh(EYE, descending="False")),
    ("vectors = 'no', must be True or False", lambda: linalg.eigh(EYE, vectors="no")),
    ("max_bytes = 'x', must be an integer", lambda: linalg.kron(EYE, EYE, max_bytes="x")),
    ("plain = 'no', must be True or False", lambda: linalg.Handle(plain="no")),
    ("accumulate = 2, must be True or False", lambda: linalg.clipped_grad_sum(LINEAR, EYE, EYE, accumulate=2)),
    ("want_bias = '', must be True or False", lambda: linalg.per_sample_norms(LINEAR, EYE, EYE, want_bias="")),
    ("accumulate = True, but there is no weight", lambda: linalg.clipped_grad_sum(LINEAR, EYE, EYE, accumulate=True)),
    ("no bias to which it could add; want_bias=False",
     lambda: linalg.clipped_grad_sum(LINEAR, EYE, EYE, weight=EYE.copy(), accumulate=True)),
])
def test_of_matrices(text, call):
    refused(text, call)


@pytest.mark.parametrize("text, call", [
    ("config = {}, must be a libdc.transformer.LayerConfig", lambda layer, w: Layer({})),
    ("config.hidden_size = '64', must be a number", lambda layer, w: Layer(config(hidden_size="64"))),
    ("hidden_dropout_ratio = nan, must be", lambda layer, w: Layer(config(hidden_dropout_ratio=NAN))),
    ("heads = 5, must divide hidden_size = 64", lambda layer, w: Layer(config(heads=5))),
    ("config.pre_layer_norm = -1, must be True or False", lambda layer, w: Layer(config(pre_layer_norm=-1))),
    ("config.training = -1, must be True or False", lambda layer, w: Layer(config(training=-1))),
    ("config.adjust_init_range = 'no', must be True", lambda layer, w: Layer(config(adjust_init_range="no"))),
    ("cu_seqlens = [0, 1.5], must be a sequence of 32", lambda layer, w: layer.forward(w, X[0], cu_seqlens=[0, 1.5])),
    ("cu_seqlens = 2, must be a sequence", lambda layer, w: layer.forward(w, X[0], cu_seqlens=2)),
    ("cu_seqlens is empty, must have 0", lambda layer, w: layer.forward(w, X[0], cu_seqlens=[])),
    ("cu_seqlens = [0, 2147483648], must be", lambda layer, w: layer.forward(w, X[0], cu_seqlens=[0, 2**31])),
    ("offset = 1.5, must be a number", lambda layer, w: layer.forward(w, X, offset=1.5)),
    ("ranks = 'x', must be a number", lambda layer, w: plan(config(), 128, 1 << 30, ranks="x")),
    ("x is None, must be an array", lambda layer, w: layer.forward(w, None)),
    ("x has the shape (4,), must be [batch", lambda layer, w: layer.forward(w, FEW)),
    ("weights is a NoneType, must be a sequence of 12", lambda layer, w: layer.forward(None, X)),
    ("weights is a list of 3, must be", lambda layer, w: layer.forward(w[:3], X)),
    ("kept is a NoneType, must be what forward()", lambda layer, w: layer.backward(w, FEW, FEW, None)),
    ("accumulate = True, but there are no grad_weights",
     lambda layer, w: layer.backward(w, X, X, layer.forward(w, X)[1], accumulate=True)),
    ("wanted has 1 entry, must have 12",
     lambda layer, w: layer.backward(w, X, X, layer.forward(w, X)[1], wanted=[True])),
])
def test_of_the_layer(text, call):
    layer = Layer(config())
    refused(text, lambda: call(layer, layer.initial_weights()))


def test_after_a_fork():
    """The child may not use objects of the parent, and is told so in one sentence. Its own objects work."""
    context, optimizer = libdc.Context(), arrays.AdamW()
    context.init()
    child = os.fork()
    if not child:
        try:
            refused("fork", context.get_memory_stats)
            refused("fork", lambda: optimizer.set_lr(0, 1.0))
            with libdc.Context() as own:
                own.init()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    context.get_memory_stats()


@pytest.mark.parametrize("value", ["abc", "-3", "2.5", " 2"])
def test_of_the_environment(monkeypatch, value):
    monkeypatch.setenv("LIBDC_NUM_THREADS", value)
    refused(f"LIBDC_NUM_THREADS={value} in the environment: must be a number >= 0", lambda: Layer(config()))
    monkeypatch.setenv("LIBDC_NUM_THREADS", "")  # counts as not set
    Layer(config())
