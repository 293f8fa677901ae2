"""Tensors in and out: every protocol and type, what is refused, and which object keeps memory alive."""

from __future__ import annotations

import array
import gc
import weakref

import libdc
import numpy as np
import pytest
from libdc import DType, Error, Status

PAIRS = [("float32", np.float32), ("float64", np.float64), ("float16", np.float16), ("int8", np.int8),
         ("int32", np.int32), ("int64", np.int64)]


@pytest.mark.parametrize("name, kind", PAIRS)
def test_numpy_arrays_go_through(name, kind):
    comm = libdc.Comm.single()
    source = np.arange(12).astype(kind).reshape(3, 4)
    assert (comm.all_gather(source, np.empty((3, 4), kind)) == source).all()
    assert DType.of(kind) is DType.of(name) is DType.of(np.dtype(kind))


def test_buffer_protocol_and_dlpack_go_through():
    comm = libdc.Comm.single()
    recv = array.array("d", [0, 0])
    assert comm.all_gather(array.array("d", [1, 2]), recv) == array.array("d", [1, 2])

    class OnlyDLPack:
        def __init__(self, data):
            self.__dlpack__, self.__dlpack_device__ = data.__dlpack__, data.__dlpack_device__

    out = np.zeros(3, np.float32)
    comm.all_gather(OnlyDLPack(np.array([1, 2, 3], np.float32)), out)
    assert out.tolist() == [1, 2, 3]


def test_torch_bfloat16_goes_through():
    import torch
    comm = libdc.Comm.single()
    source, recv = torch.arange(5).to(torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16)
    comm.all_gather(source, recv)
    assert torch.equal(source, recv)


@pytest.mark.parametrize("wrong, text", [
    (object(), "__dlpack__"), (np.zeros(4, complex), "send is an array of type '<c16', must be of float32"),
    (np.zeros(4, ">f4"), "order of bytes"), (np.zeros(4, "S3"), "send is an array of type"),
])
def test_what_is_no_tensor_is_refused(wrong, text):
    with pytest.raises(TypeError, match=text):
        libdc.Comm.single().all_gather(wrong, np.zeros(4, np.float32))


def test_numpy_scalars_and_integers():
    comm, out = libdc.Comm.single(), np.zeros((), np.float32)
    assert comm.all_gather(np.float32(2.5), out, [np.int64(1)]) == 2.5
    with pytest.raises(TypeError, match="read-only"):
        comm.all_reduce(np.float32(1))
    with libdc.Context() as context:
        context.init()
        context.register_z3_param(np.int64(1), np.array([2, 2]), np.ones(4, np.float32), None)
        context.register_graph_z3(np.int32(1), np.array([1]))
        assert context.allgather_param(None, 1, np.int64(1)).shape == (2, 2)


def test_strided_and_read_only_arrays_are_refused():
    comm = libdc.Comm.single()
    with pytest.raises(Error) as caught:
        comm.all_gather(np.zeros((4, 4), np.float32)[:, :2], np.zeros(8, np.float32))
    assert caught.value.status == Status.E_SHAPE
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        comm.all_reduce(frozen)
    assert comm.all_gather(frozen, np.ones(4, np.float32)).sum() == 0


def test_results_share_memory_and_keep_it(context):
    buffer = context.memory_alloc(64)
    tensor = buffer.tensor((4, 4), "float32")
    view = np.asarray(tensor)
    view[:] = np.arange(16).reshape(4, 4)
    assert (np.from_dlpack(tensor) == view).all() and view.ctypes.data == buffer.data
    second = np.from_dlpack(tensor)
    del buffer, tensor
    context.close()
    gc.collect()
    assert second.sum() == view.sum() == 120


def test_buffers_check_their_views(context):
    with pytest.raises(ValueError, match="needs 80 bytes"):
        context.memory_alloc(64).tensor((5, 4), "float32")


def test_bfloat16_results(context):
    import torch
    context.register_z3_param(1, [3], torch.tensor([1, 2, 3], dtype=torch.bfloat16), None)
    context.register_graph_z3(1, [1])
    context.allgather_param(None, 1, 1)
    tensor = context.take_param(1, 1)
    assert torch.from_dlpack(tensor).tolist() == [1, 2, 3]
    assert tensor.bits().numpy().tolist() == [0x3F80, 0x4000, 0x4040]
    with pytest.raises(TypeError, match="bits()"):
        tensor.numpy()


def test_dlpack_capsules_free_their_owner(context):
    from libdc import dlpack

    before = len(dlpack._exports)
    tensor = context.memory_alloc(16).tensor((4,), "float32")
    unused = tensor.__dlpack__()
    used = np.from_dlpack(tensor)
    assert len(dlpack._exports) == before + 2
    del unused, used
    assert len(dlpack._exports) == before


def test_released_parameters_cannot_be_viewed(context):
    context.register_z3_param(1, [4], np.ones(4, np.float32), None)
    context.register_graph_z3(1, [1])
    tensor = context.allgather_param(None, 1, 1)
    context.wait_allgather(tensor, 1, 1)
    assert tensor.numpy().sum() == 4
    context.release_param(tensor, 1, 1, 1)
    with pytest.raises(Error, match="given back"):
        tensor.numpy()


def test_errors_have_the_names_of_parameters(context):
    context.register_z3_param(1, [4], np.ones(4, np.float32), None, name="encoder.weight")
    context.register_param(2, [4], None, np.ones(4, np.float32), name="bias")
    context.register_graph_z3(1, [1])
    with pytest.raises(Error, match=r"parameter 1 \(encoder.weight\) is not gathered"):
        context.wait_allgather(None, 1, 1)
    with pytest.raises(Error, match=r"parameter 2 \(bias\) was registered by dc_register_param"):
        context.register_graph_z3(2, [2])
    context.set_param_name(1, None)
    with pytest.raises(Error, match="parameter 1 is not gathered"):
        context.wait_allgather(None, 1, 1)
    with pytest.raises(TypeError, match="set_param_name: name = 7, must be a str"):
        context.set_param_name(1, 7)


def test_registered_arrays_stay_alive_until_unregistered(context):
    shard, grad = np.ones(4, np.float32), np.ones(4, np.float32)
    alive = weakref.ref(shard), weakref.ref(grad)
    context.register_z3_param(1, [4], shard, grad)
    del shard, grad
    gc.collect()
    assert alive[0]() is not None and alive[1]().sum() == 0
    context.update_param_grad_buffer(1, np.ones(4, np.float32))
    gc.collect()
    assert alive[0]() is not None and alive[1]() is None
    context.unregister_param(1)
    gc.collect()
    assert alive[0]() is None


def test_offload_round_trip(context):
    context.register_graph_z3(1, [])
    source = np.arange(100, dtype=np.float32)
    context.offload_tensor(source, 1, 5)
    host = context.wait_offload(source, 1, 5)
    assert (host.numpy() == source).all()
    context.reload_tensor(None, 1, 5)
    back = context.wait_reload(None, 1, 5)
    assert (back.numpy() == source).all()
    context.end_backward(1)
    with pytest.raises(Error) as caught:
        context.wait_offload(None, 1, 6)
    assert caught.value.status == Status.E_NOT_FOUND


def test_free_tensors_says_what_may_go():
    with libdc.Context() as context:
        context.init(config=libdc.Config(free_activation_threshold=10))
        assert context.free_tensors([np.zeros(10), np.zeros(11), np.zeros((3, 4))]) == [False, True, True]
        assert context.free_tensors([]) == []


def test_scalars_and_empty_tensors(context):
    context.register_z3_param(1, [], np.float32(3).reshape(()).reshape(1), None)
    context.register_z3_param(2, [0, 3], np.zeros(0, np.float32), None)
    context.register_graph_z3(1, [1, 2])
    for id, shape in ((1, ()), (2, (0, 3))):
        context.allgather_param(None, 1, id)
        assert context.take_param(1, id).numpy().shape == shape
