"""The bindings of libdc.torch.dc: names, arguments, life cycle, wrong arguments, and torch.distributed underneath."""

from __future__ import annotations

import gc
import inspect
import os
import pathlib
import subprocess
import sys
import types
from typing import Any, Callable, Iterator

import pytest

import torch
import libdc

from libdc.torch import dc, ops  # noqa: E402
from operators import CONFIG, D  # noqa: E402

BINDINGS = {
    "init": ["process_group", "config", "initial_reduce_bucket_size"],
    "cleanup": [],
    "register_param": ["ds_id", "ds_shape", "ds_tensor", "grad_buffer", "offset"],
    "register_graph_z1": ["graph_id", "ds_ids"],
    "register_graph_z2": ["graph_id", "ds_ids"],
    "register_z3_param": ["ds_id", "ds_shape", "ds_tensor", "grad_buffer", "persistent", "expected_grad_dtype"],
    "register_graph_z3": ["graph_id", "ds_ids"],
    "set_persistent": ["ds_id"],
    "start_forward": [],
    "end_forward": [],
    "start_backward": ["update"],
    "grads_finite": [],
    "enable_profiling": ["enable"],
    "is_profiling": [],
    "reset": [],
    "invalidate_gathered_param": ["ds_id"],
    "clear_all_gathered_params": [],
    "update_param_grad_buffer": ["ds_id", "grad_buffer", "offset"],
    "params_updated": ["ds_ids"],
}


@pytest.fixture
def started() -> Iterator[None]:
    dc.init(None, CONFIG, 64)
    yield
    dc.cleanup()


def raises(kind: Any, text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=text):
        call(*args, **kwargs)


def test_names_and_arguments() -> None:
    for name, arguments in BINDINGS.items():
        assert list(inspect.signature(getattr(dc, name)).parameters) == arguments
        raises(TypeError, "argument", getattr(dc, name), *range(9))


# Life


def test_everything_needs_init() -> None:
    dc.cleanup()
    dc.cleanup()
    x = torch.ones(4)
    calls = [(dc.register_param, (1, [4], x, x, 0)), (dc.register_z3_param, (1, [4], x, x, False)),
             (dc.register_graph_z1, (1, [1])), (dc.register_graph_z2, (1, [1])), (dc.register_graph_z3, (1, [1])),
             (dc.set_persistent, (1,)), (dc.start_forward, ()), (dc.end_forward, ()), (dc.start_backward, (True,)),
             (dc.grads_finite, ()), (dc.enable_profiling, (True,)), (dc.is_profiling, ()), (dc.reset, ()),
             (dc.invalidate_gathered_param, (1,)), (dc.clear_all_gathered_params, ()),
             (dc.update_param_grad_buffer, (1, x, 0)), (dc.params_updated, ())]
    for call, args in calls:
        raises(RuntimeError, f"dc.{call.__name__}: not initialised, or cleaned up", call, *args)


def test_init_twice(started: None) -> None:
    first = ops.context()
    raises(RuntimeError, r"dc.init: initialised already; call dc.cleanup\(\) first", dc.init, None, CONFIG, 64)
    assert ops.context() is first
    dc.start_forward()
    dc.end_forward()
    dc.cleanup()
    dc.init(None, CONFIG, 64)
    assert ops.context() is not first and not dc.is_profiling()


def test_config_as_mapping_or_object() -> None:
    for config in (CONFIG, types.SimpleNamespace(**CONFIG, offload_activation_pin_memory=True), {**CONFIG, "more": 1}):
        dc.init(process_group=None, config=config, initial_reduce_bucket_size=64.0)
        dc.cleanup()


@pytest.mark.parametrize("key", list(CONFIG))
def test_missing_config_key_is_named_and_nothing_stays_open(key: str) -> None:
    less = {name: value for name, value in CONFIG.items() if name != key}
    closed = []

    class Collectives(libdc.Collectives):
        def close(self) -> None:
            closed.append(self)

    for config in (less, types.SimpleNamespace(**less)):
        comm = libdc.Comm.external(Collectives(), 0, 1)
        raises(ValueError, f"dc.init: config has no '{key}'", dc.init, comm, config, 64)
        raises(RuntimeError, "not initialised", dc.is_profiling)
        comm.close()
        del comm
    gc.collect()
    assert len(closed) == 2


def test_config_values() -> None:
    dc.init(None, {**CONFIG, "free_activation_threshold": 0}, 64)
    one = torch.ones(1)
    D.free_tensors([one])
    assert one.untyped_storage().nbytes() == 0
    dc.cleanup()
    raises(TypeError, "config.double_buffer = 'yes', must be an integer", dc.init, None,
           {**CONFIG, "double_buffer": "yes"}, 64)
    raises(RuntimeError, "initial_reduce_bucket_size = 0", dc.init, None, CONFIG, 0)
    raises(TypeError, "initial_reduce_bucket_size = 1.5", dc.init, None, CONFIG, 1.5)
    raises(TypeError, "process_group is a int, must be a libdc.Comm, a torch.distributed.ProcessGroup or None",
           dc.init, 3, CONFIG, 64)
    raises(RuntimeError, "not initialised", dc.reset)
    dc.init(None, CONFIG, 64)
    dc.cleanup()


# Registration


def test_wrong_arguments(started: None) -> None:
    x = torch.ones(4)
    z3, param = dc.register_z3_param, dc.register_param
    raises(TypeError, "dc.register_z3_param: ds_tensor is a list, must be a torch.Tensor", z3, 1, [4], [1.0], x, False)
    raises(TypeError, "dc.register_z3_param: ds_tensor is None", z3, 1, [4], None, x, False)
    raises(TypeError, "dc.register_z3_param: ds_id = 'a', must be an integer", z3, "a", [4], x, x, False)
    raises(TypeError, "dc.register_z3_param: ds_shape = 4, must be a sequence of integers", z3, 1, 4, x, x, False)
    raises(TypeError, r"dc.register_z3_param: ds_shape\[0\] = None", z3, 1, [None], x, x, False)
    raises(TypeError, "expected_grad_dtype = 'float32', must be None or one of torch.float32", z3, 1, [4], x, x, False,
           "float32")
    raises(TypeError, "ds_tensor.dtype = torch.complex64", z3, 1, [4], x.to(torch.complex64), x, False)
    raises(ValueError, "ds_tensor is on meta", z3, 1, [4], x.to("meta"), x, False)
    raises(ValueError, "ds_tensor is on cpu with layout torch.sparse_coo", z3, 1, [4], x.to_sparse(), x, False)
    raises(ValueError, "must fit in 64 bits", z3, 1 << 63, [4], x, x, False)
    raises(RuntimeError, "shard of parameter 1 on rank 0 has 3 elements, must have 4", z3, 1, [4], torch.ones(3), x, 0)
    raises(RuntimeError, "grad_buffer of parameter 1 on rank 0 has 2 elements, must have 4", z3, 1, [4], x,
           torch.ones(2), False)
    raises(RuntimeError, "contiguous", z3, 1, [4], torch.ones(8)[::2], x, False)
    raises(RuntimeError, "contiguous", z3, 1, [4], x, torch.ones(8)[::2], False)
    raises(RuntimeError, "covers elements 3 to 7", param, 1, [4], x, x, 3)
    raises(TypeError, "dc.register_param: grad_buffer is a str", param, 1, [4], x, "x", 0)
    z3(1, [4], x, torch.ones(4), False)
    raises(RuntimeError, "id = 1 is registered already", z3, 1, [4], x, x, False)
    raises(RuntimeError, "id = 7 is not a registered parameter", dc.register_graph_z3, 1, [7])
    raises(RuntimeError, "has parameter 1 twice", dc.register_graph_z3, 1, [1, 1])
    raises(RuntimeError, "which a stage-2 graph does not take", dc.register_graph_z2, 1, [1])
    raises(RuntimeError, "id = 7 is not a registered parameter", dc.set_persistent, 7)
    raises(RuntimeError, "id = 7 is not a registered parameter", dc.params_updated, [7])
    raises(TypeError, r"dc.params_updated: ds_ids\[0\] = 'x'", dc.params_updated, ["x"])
    raises(RuntimeError, "id = 7 is not a registered parameter", dc.update_param_grad_buffer, 7, x, 0)


def test_tensors_stay_alive_and_in_place(started: None) -> None:
    shard, grad = torch.nn.Parameter(torch.randn(6)), torch.ones(6)
    dc.register_z3_param(ds_id=1, ds_shape=torch.Size([2, 3]), ds_tensor=shard, grad_buffer=grad, persistent=False)
    assert grad.count_nonzero() == 0, "registration zeroes the gradient buffer"
    dc.register_graph_z3(graph_id=0, ds_ids=(1,))
    expected = shard.detach().clone().view(2, 3)
    del shard
    gc.collect()
    torch.randn(1000)
    assert torch.equal(torch.ops.dc_rt.take(torch.empty(0), 0, 1), expected)
    with torch.no_grad():
        D.reduce_grad(expected, 0, 1)
    D.end_backward(0)
    assert torch.equal(grad, expected.view(-1))


def test_weights_and_gradients_through_a_step(started: None) -> None:
    shard, grad, token = torch.zeros(4), torch.zeros(4), torch.empty(0)
    dc.register_z3_param(1, [4], shard, grad, True, torch.float32)
    dc.register_graph_z3(5, [1])
    stats = ops.context().get_memory_stats
    dc.start_forward()
    D.wait_allgather(D.allgather_param(token, 5, 1), 5, 1)
    D.release_param(token, 5, 1, 1)
    dc.end_forward()
    dc.start_backward(update=True)
    D.reduce_grad(torch.full((4,), 2.0, dtype=torch.bfloat16), 5, 1)
    D.end_backward(5)
    assert grad.tolist() == [2.0] * 4
    shard.sub_(grad)
    gathers = stats().gathers
    dc.params_updated()
    assert D.wait_allgather(D.allgather_param(token, 5, 1), 5, 1).tolist() == [-2.0] * 4
    assert stats().gathers == gathers + 1
    other = torch.ones(4)
    dc.update_param_grad_buffer(1, other, 0)
    dc.start_backward(True)
    D.reduce_grad(torch.full((4,), 3.0), 5, 1)
    D.end_backward(5)
    assert other.tolist() == [3.0] * 4 and grad.tolist() == [2.0] * 4


def test_stages_1_and_2(started: None) -> None:
    whole, part = torch.zeros(2, 3), torch.zeros(3)
    dc.register_param(1, [2, 3], whole, part, 2)
    dc.register_graph_z1(1, [1])
    gradient = torch.arange(6.0).view(2, 3)
    dc.start_backward(False)
    D.reduce_grad(gradient, 1, 1)
    D.end_backward(1)
    assert part.count_nonzero() == 0
    dc.start_backward(True)
    D.reduce_grad(gradient, 1, 1)
    D.end_backward(1)
    assert part.tolist() == [4, 6, 8]
    dc.register_param(2, [6], None, torch.empty(0), 0)
    dc.register_graph_z2(2, [2])
    D.reduce_grad(torch.ones(6), 2, 2)
    D.end_backward(2)


def test_persistence_and_invalidation(started: None) -> None:
    token, stats = torch.empty(0), ops.context().get_memory_stats
    dc.register_z3_param(1, [4], torch.ones(4), None, False)
    dc.register_graph_z3(5, [1])
    D.allgather_param(token, 5, 1)
    D.allgather_param(token, 5, 1)
    assert (stats().gathers, stats().gather_hits) == (1, 1)
    dc.invalidate_gathered_param(1)
    D.allgather_param(token, 5, 1)
    assert stats().gathers == 2
    dc.clear_all_gathered_params()
    dc.set_persistent(1)
    assert stats().gathers == 3
    dc.clear_all_gathered_params()
    dc.invalidate_gathered_param(1)
    D.allgather_param(token, 5, 1)
    assert stats().gathers == 3
    dc.reset()
    raises(RuntimeError, "graph_id = 5 is not a registered graph", D.allgather_param, token, 5, 1)
    dc.register_graph_z3(5, [1])
    D.allgather_param(token, 5, 1)
    assert stats().gathers == 3


def test_grads_finite() -> None:
    with pytest.raises(ValueError, match="config has no 'double_buffer'"):
        dc.init(None, {"check_finite": True, "symmetric_memory": False}, 64)
    dc.init(None, {**CONFIG, "check_finite": True}, 64)
    dc.register_z3_param(1, [4], torch.ones(4), torch.zeros(4), False, torch.float16)
    dc.register_graph_z3(5, [1])
    for last, expected in ((65504.0, (True, None)), (65520.0, (False, 1)), (-1.0, (True, None))):
        dc.start_backward(True)
        D.reduce_grad(torch.tensor([0.0, 1.0, 2.0, last]), 5, 1)
        D.end_backward(5)
        assert dc.grads_finite() == expected
    dc.cleanup()


def test_profiling(started: None) -> None:
    grad = torch.zeros(4)
    dc.register_z3_param(1, [4], torch.ones(4), grad, False)
    dc.register_graph_z3(5, [1])
    dc.enable_profiling(True)
    assert dc.is_profiling()
    D.reduce_grad(torch.ones(4), 5, 1)
    D.end_backward(5)
    dc.enable_profiling(False)
    assert not dc.is_profiling() and grad.count_nonzero() == 0


# Loading, in processes of their own


def python(code: str, **environment: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
                            text=True, timeout=1200, cwd=pathlib.Path(__file__).parent)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def library() -> str:
    path = os.environ.get("LIBDC_TORCH_LIBRARY") or os.path.join(libdc.library_dir(), "libdc_torch.so")
    assert os.path.exists(path), "the compiled adapter is not installed"
    return path


@pytest.mark.parametrize("kind", ["compiled", "python"])
def test_a_taken_namespace_is_refused(kind: str) -> None:
    library()
    out = python("""
import torch
taken = torch.library.Library("dc", "DEF")
taken.define("end_backward(Any deps, int graph_id, bool release_reduce_buckets) -> ()")
try:
    from libdc.torch import dc
except ImportError as error:
    print(error)
print(torch.ops.dc.end_backward.default._schema)
torch.library.Library("dc_rt", "DEF")
""", LIBDC_TORCH_OPS=kind)
    assert "the operator namespace 'dc' is taken: DeepSpeed's own dc operators" in out
    assert "Any deps" in out


def test_registering_by_hand() -> None:
    out = python(f"""
import ctypes
adapter = ctypes.CDLL({library()!r})
adapter.dct_error.restype = ctypes.c_char_p
print(adapter.dct_register(), adapter.dct_error().decode())
import torch
print(adapter.dct_register(), adapter.dct_register(), adapter.dct_error().decode())
print(hasattr(torch.ops.dc, "end_backward"))
""")
    assert out == "-1 dct_register: libtorch_cpu.so is not loaded in this process: import torch first\n0 0 \nTrue\n"


def test_another_library_has_kernels_of_its_own(tmp_path: pathlib.Path) -> None:
    """LIBDC_LIBRARY names a library that the adapter is not linked with: handles of one would crash in the other."""
    library()
    other = tmp_path / "other.so"
    # By another name, or the loader would take it for the one that the adapter asks for.
    library_bytes = pathlib.Path(libdc.library_dir(), "libdc.so.0.1").read_bytes()
    other.write_bytes(library_bytes.replace(b"libdc.so.0.1\0", b"libxx.so.0.1\0"))
    code = """
try:
    from libdc.torch import dc, ops
    print(ops.backend)
except ImportError as error:
    print(error)
"""
    assert python(code, LIBDC_LIBRARY=str(other)) == "python\n"
    assert "is linked with another libdc.so" in python(code, LIBDC_LIBRARY=str(other), LIBDC_TORCH_OPS="compiled")


def test_choosing_the_kernels(monkeypatch: Any) -> None:
    monkeypatch.setenv("LIBDC_TORCH_OPS", "fast")
    raises(ImportError, "LIBDC_TORCH_OPS = 'fast', must be 'auto', 'compiled' or 'python'", ops._choose_kernels)
    monkeypatch.delenv("LIBDC_TORCH_OPS")
    monkeypatch.setenv("LIBDC_TORCH_LIBRARY", "/nowhere.so")
    assert ops._choose_kernels() == ("compiled", "/nowhere.so")
    raises(ImportError, "/nowhere.so", ops._load_adapter, "/nowhere.so")
    monkeypatch.delenv("LIBDC_TORCH_LIBRARY")
    monkeypatch.setattr(libdc, "library_dir", lambda: "/nowhere")
    assert ops._choose_kernels()[0] == "python"
