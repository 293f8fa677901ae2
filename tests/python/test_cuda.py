"""Tensors on CUDA devices: taken by contexts there, refused by others with the argument's name. No card is needed: what
only names such memory is a stand-in, and what uses it runs on the simulated driver of the C tests (tests/cudasim)."""

from __future__ import annotations

from typing import Any, Callable, Tuple

import libdc
import numpy as np
import pytest
from libdc import dlpack


class Elsewhere:
    """An array library's tensor of four floats on a device that this process need not have."""

    def __init__(self, device: Tuple[int, int]) -> None:
        self.device = device
        self.streams: list = []

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: Any = None) -> Any:
        self.streams.append(stream)
        return dlpack.write(1 << 40, (4,), libdc.DType.FLOAT32, self, self.device)


def refused(text: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(TypeError) as caught:
        call(*args, **kwargs)
    assert str(caught.value) == text


def test_a_context_on_the_cpu_names_what_it_refuses(context: libdc.Context) -> None:
    host, device = np.zeros(4, np.float32), Elsewhere((2, 0))
    refused("register_z3_param: shard is on cuda:0, must be in host memory",
            context.register_z3_param, 1, (4,), device, host)
    refused("register_z3_param: grad_buffer is on cuda:1, must be in host memory",
            context.register_z3_param, 1, (4,), host, Elsewhere((2, 1)))
    refused("register_param: tensor is on cuda:0, must be in host memory",
            context.register_param, 1, (4,), device, host)
    refused("update_param_grad_buffer: grad_buffer is on cuda:0, must be in host memory",
            context.update_param_grad_buffer, 1, device)
    refused("reduce_grad: grad is on cuda:0, must be in host memory", context.reduce_grad, device, 1, 1)
    refused("offload_tensor: tensor is on cuda:0, must be in host memory", context.offload_tensor, device, 1, 1)
    refused("free_tensors: tensors[1] is on cuda:0, must be in host memory", context.free_tensors, [host, device])
    refused("reduce_grad: grad is a tensor on DLPack device 10, must be in host memory, or on a CUDA device",
            context.reduce_grad, Elsewhere((10, 0)), 1, 1)
    assert set(device.streams) == {-1}, "the producer does not have to wait for a stream"


def test_a_communicator_without_a_stream_refuses_them() -> None:
    comm, device = libdc.Comm.single(), Elsewhere((2, 3))
    refused("all_reduce: data is on cuda:3, must be in host memory", comm.all_reduce, device)
    refused("broadcast: data is on cuda:3, must be in host memory", comm.broadcast, device)
    refused("all_gather: recv is on cuda:3, must be in host memory", comm.all_gather, np.zeros(4, np.float32), device)
    refused("reduce_scatter: send is on cuda:3, must be in host memory", comm.reduce_scatter, device, device)


def test_pinned_memory_is_host_memory(context: libdc.Context) -> None:
    context.free_tensors([np.zeros(4, np.float32), Elsewhere((3, 0))])


CONTEXT = """
import libdc, numpy as np
from simulated import refused as refused_as

def refused(text, call, *args):
    refused_as(text, TypeError, call, *args)

device = libdc.Device("cuda:0")
with libdc.Context(device) as context:
    context.init()
    pinned, grad = context.memory_alloc(24, libdc.MemoryKind.HOST), context.memory_alloc(24)
    weights, grad = pinned.tensor((6,), "float32"), grad.tensor((6,), "float32")
    weights.numpy()[:] = range(6)
    assert weights.__dlpack_device__() == (1, 0) and grad.__dlpack_device__() == (2, 0)
    refused("this tensor is on cuda:0, where NumPy cannot read it: use from_dlpack()", grad.numpy)
    plain = np.zeros(6, np.float32)
    refused("register_z3_param: shard is in host memory, must be on cuda:0 or in pinned host memory",
            context.register_z3_param, 7, (3, 2), plain, grad)
    refused("register_z3_param: grad_buffer is in host memory, must be on cuda:0",
            context.register_z3_param, 7, (3, 2), weights, plain)
    context.register_z3_param(7, (3, 2), weights, grad)
    context.register_graph_z3(1, [7])
    refused("reduce_grad: grad is in pinned host memory, must be on cuda:0", context.reduce_grad, weights, 1, 7)
    full = context.wait_allgather(context.allgather_param(None, 1, 7), 1, 7)
    assert full.__dlpack_device__() == (2, 0)
    context.start_backward(True)
    context.reduce_grad(full, 1, 7)
    context.end_backward(1)
    context.offload_tensor(grad, 1, 2)
    assert context.wait_offload(None, 1, 2).numpy().tolist() == [0, 1, 2, 3, 4, 5]
    assert context.reload_tensor(None, 1, 2).place == context.wait_reload(None, 1, 2).place == (2, 0)
    taken = context.take_param(1, 7)
    assert taken.place == (2, 0)
    comm, stream = libdc.Comm.single(), libdc.Stream(device)
    comm.broadcast(grad, 0, stream=stream)
    stream.synchronize()
    refused("broadcast: data is on cuda:0, must be in host memory", comm.broadcast, grad)
    context.free_tensors([grad, weights])
print("fine")
"""


def test_a_context_on_the_simulated_driver(on_the_simulated_driver: Callable[[str], str]) -> None:
    assert on_the_simulated_driver(CONTEXT) == "fine\n"


def test_the_memory_that_torchium_reports_is_the_devices(on_the_simulated_driver: Callable[[str], str]) -> None:
    on_the_simulated_driver("""
import libdc
from libdc import linalg
from libdc.torchium import cuda_memory_info

with libdc.Device("cuda:0") as device:
    memory = linalg.device_memory(device)
info = cuda_memory_info()
assert info["device"] == "cuda:0" and info["total_memory"] == memory["total"] != linalg.device_memory()["total"], info
""")
