"""Failures: their class, number, name and text."""

from __future__ import annotations

import pickle
import threading

import libdc
import numpy as np
import pytest
from libdc import Error, Status
from libdc._lib import ffi, lib
from libdc.transformer import Layer, LayerConfig


def test_error_has_status_name_and_text(context):
    with pytest.raises(Error) as caught:
        context.init()
    assert caught.value.status == Status.E_STATE and caught.value.name == "DC_E_STATE"
    assert "dc_init" in caught.value.text and "[DC_E_STATE]" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(Error(Status.E_SHAPE, "too long")))
    assert (error.status, error.text, error.name) == (Status.E_SHAPE, "too long", "DC_E_SHAPE")


def test_unknown_things_are_named(context):
    context.register_graph_z3(7, [])
    with pytest.raises(Error, match="8"):
        context.wait_allgather(None, 8, 1)
    with pytest.raises(Error, match="1234"):
        context.register_graph_z3(9, [1234])
    with pytest.raises(Error) as caught:
        libdc.Device("abacus")
    assert caught.value.status == Status.E_NO_DEVICE and "abacus" in caught.value.text


def test_a_failed_call_changes_nothing(context):
    grad = np.full(4, 7, np.float32)
    with pytest.raises(Error) as caught:
        context.register_z3_param(1, [5], np.zeros(4, np.float32), grad)
    assert caught.value.status == Status.E_SHAPE
    assert context.get_memory_stats().registered_params == 0 and (grad == 7).all()


def test_texts_belong_to_threads(context):
    """Each thread sees its own failure, however the calls interleave."""
    wrong = []

    def fail(graph: int) -> None:
        for _ in range(200):
            try:
                context.wait_allgather(None, graph, 1)
            except Error as error:
                if str(graph) not in error.text:
                    wrong.append(error.text)

    threads = [threading.Thread(target=fail, args=(1000 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_closed_handles_raise(context):
    stream = libdc.Stream(libdc.Device())
    stream.close()
    with pytest.raises(Error, match="stream is closed"):
        context.set_stream(stream)
    event = libdc.Event(libdc.Device())
    event.close()
    with pytest.raises(Error, match="event is closed"):
        event.query()
    context.close()
    with pytest.raises(Error, match="context is closed"):
        context.start_forward()
    with Layer(LayerConfig(8, 2)) as layer:
        layer.initial_weights()
    with pytest.raises(Error, match="layer is closed"):
        layer.initial_weights()


@pytest.mark.parametrize("number, name", [(s.value, s.name) for s in Status])
def test_status_numbers_are_the_header_s(number, name):
    assert getattr(lib, f"DC_{name}") == number
    assert ffi.string(lib.dc_status_name(number)).decode() == f"DC_{name}"


@pytest.mark.parametrize("enumeration, prefix", [
    (libdc.DType, ""), (libdc.ReduceOp, ""), (libdc.MemoryKind, "MEMORY_"), (libdc.LogLevel, "LOG_"), (libdc.Op, "OP_"),
])
def test_enumerations_are_the_header_s(enumeration, prefix):
    for item in enumeration:
        name = "DC_DTYPE_NONE" if item is libdc.DType.NONE else f"DC_{prefix}{item.name}"
        assert getattr(lib, name) == item.value


@pytest.mark.parametrize("tuple_type, struct, left_out", [
    (libdc.Config, "dc_config", {"struct_size", "reserved0"}),
    (libdc.MemoryStats, "dc_memory_stats", {"struct_size"}),
    (libdc.OpInfo, "dc_op_info", {"struct_size", "ndim", "reserved0"}),
    (libdc.TraceEvent, "dc_trace_event", set()),
])
def test_structs_are_the_header_s(tuple_type, struct, left_out):
    fields = [name for name, _ in ffi.typeof(struct).fields if name not in left_out]
    assert list(tuple_type._fields) == fields


def test_config_keys_are_checked():
    with libdc.Context() as context:
        with pytest.raises(TypeError, match="no key 'dubble_buffer'"):
            context.init(config={"dubble_buffer": 1})
        context.init(config={"double_buffer": -1})


def test_log_lines_arrive():
    lines = []
    with libdc.Context(log=lambda level, message: lines.append((level, message))) as context:
        context.init()
        context.register_z3_param(1, [4], np.ones(4, np.float32), None)
        context.register_graph_z3(1, [1])
        context.start_forward()
        context.allgather_param(None, 1, 1)
        context.release_param(None, 1, 1, n_users=2)
        context.end_forward()
    assert any(level == libdc.LogLevel.WARNING for level, _ in lines), lines
