"""Tensors in and out: every protocol and type, what is refused, and which object keeps memory alive."""

from __future__ import annotations

import array
import gc
import sys
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


KINDS = [("float32", [0.5, -2.0]), ("float64", [0.5, -2.0]), ("float16", [0.5, -2.0]), ("bfloat16", [0.5, -2.0]),
         ("int8", [1, -2]), ("int16", [1, -2]), ("int32", [1, -2]), ("int64", [1, -2]), ("uint8", [1, 2]),
         ("bool", [True, False])]  # fmt: skip


@pytest.mark.parametrize("name, values", KINDS)
def test_a_tensor_without_numpy(name, values):
    """As lists, and by Python's views, which are of the same memory."""
    import torch

    source = torch.tensor([values, values[::-1], values], dtype=getattr(torch, name)).reshape(3, 1, 2)
    tensor = libdc.Tensor(source.data_ptr(), (3, 1, 2), DType.of(name), source)
    assert tensor.tolist() == source.tolist()
    assert type(tensor.tolist()[0][0][0]) is type(values[0])
    if name == "bfloat16" or (name == "float16" and sys.version_info < (3, 12)):
        with pytest.raises(TypeError, match=f"{name} has no type in memoryview: use bits()"):
            tensor.memoryview()
        tensor = tensor.bits()
    view = tensor.memoryview()
    assert view.shape == (3, 1, 2) and not view.readonly and view.c_contiguous and view.tolist() == tensor.tolist()
    view[0, 0, 0] = view[0, 0, 1]
    assert tensor.tolist()[0][0][0] == tensor.tolist()[0][0][1]
    if sys.version_info >= (3, 12):
        assert memoryview(tensor).tolist() == tensor.tolist()


def test_a_view_keeps_its_memory():
    source = np.arange(4.0)
    alive = weakref.ref(source)
    view = libdc.Tensor(source.ctypes.data, (2, 2), DType.FLOAT64, source).memoryview()
    del source
    gc.collect()
    assert alive() is not None and view.tolist() == [[0, 1], [2, 3]]
    del view
    gc.collect()
    assert alive() is None


def test_shapes_without_dimensions_or_elements():
    source = np.array(7, np.int32)
    scalar = libdc.Tensor(source.ctypes.data, (), DType.INT32, source)
    assert scalar.tolist() == 7 and scalar.memoryview().tolist() == 7
    for shape, lists in (((0,), []), ((2, 0), [[], []]), ((0, 2), [])):
        empty = libdc.Tensor(0, shape, DType.INT32)
        assert empty.tolist() == lists and empty.memoryview().tolist() == []


def test_a_tensor_of_a_card_is_not_read():
    tensor = libdc.Tensor(4096, (2,), DType.FLOAT32, None, (2, 0))
    for read in (tensor.tolist, tensor.memoryview):
        with pytest.raises(TypeError, match="this tensor is on cuda:0, which the host cannot read: use from_dlpack()"):
            read()


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


def test_a_copy_that_was_asked_for_is_none_of_the_memory(context):
    """NumPy and PyTorch leave the copy to the exporter, which says that it makes none."""
    import torch

    tensor = context.memory_alloc(16).tensor((4,), "float32")
    with pytest.raises(BufferError, match="exported in place"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="exported in place"):
        tensor.__dlpack__(dl_device=(2, 0))
    for read in (np.from_dlpack, torch.from_dlpack):
        with pytest.raises(BufferError, match="exported in place"):
            read(tensor, copy=True)
        assert read(tensor, copy=False).sum() == 0


def test_dlpack_capsules_free_their_owner(context):
    from libdc import dlpack

    before = len(dlpack._exports)
    tensor = context.memory_alloc(16).tensor((4,), "float32")
    unused = tensor.__dlpack__()
    used = np.from_dlpack(tensor)
    assert len(dlpack._exports) == before + 2
    del unused, used
    assert len(dlpack._exports) == before


def test_a_capsule_that_is_refused_frees_its_owner(context):
    """NumPy has no bfloat16. It drops the capsule with its error set, and maybe the tensor too."""
    from libdc import dlpack

    before = len(dlpack._exports)
    buffer = context.memory_alloc(16)
    tensor = buffer.tensor((4,), "bfloat16")
    for _ in range(2):
        with pytest.raises((BufferError, RuntimeError), match="dtype"):
            np.from_dlpack(tensor)
    del tensor
    with pytest.raises((BufferError, RuntimeError), match="dtype"):
        np.from_dlpack(buffer.tensor((4,), "bfloat16"))
    assert len(dlpack._exports) == before


def test_each_export_has_a_capsule_of_its_own():
    """Also where another one is made meanwhile, as by threads. The tensor's last one was handed out twice."""
    memory, others = np.zeros(4, np.float32), []

    class Owner:
        def __del__(self):
            others.append(tensor.__dlpack__())

    tensor = libdc.Tensor(memory.ctypes.data, (4,), DType.FLOAT32, Owner())
    tensor.__dlpack__()
    tensor.buffer = memory
    mine = tensor.__dlpack__()  # in which the owner of the one before dies
    assert len(others) == 1 and others[0] is not mine


def test_a_tensor_that_dies_under_an_error_frees_its_owner(context, monkeypatch):
    """PyTorch calls the deleter while its error is set, which Python reports and drops."""
    import torch

    from libdc import dlpack

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = len(dlpack._exports)
    tensor = context.memory_alloc(16).tensor((4,), "float32")
    with pytest.raises((RuntimeError, SystemError)):
        torch.from_dlpack(tensor) + torch.ones(3)
    del tensor
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
