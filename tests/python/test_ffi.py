"""The library through other doors: dlopen with the same declarations, ctypes, and versions that do not fit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import libdc
import pytest

LIBRARY = os.path.join(libdc.library_dir(), "libdc.so.0.1")


def python(text: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", text], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=600, env={**os.environ, **environment})


STEP = """
import libdc
context = libdc.Context()
context.init()
context.register_z3_param(1, [3], memoryview(bytearray(12)).cast("f"), None)
context.register_graph_z3(1, [1])
context.allgather_param(None, 1, 1)
print(libdc.ffi_mode, context.take_param(1, 1).shape)
"""


@pytest.mark.parametrize("mode", ["api", "abi"])
def test_both_modes_work_without_numpy(mode):
    done = python("import sys; sys.modules['numpy'] = None\n" + STEP, LIBDC_FFI=mode)
    assert done.stdout == f"{mode} (3,)\n", done.stderr


def test_another_library_by_path():
    done = python(STEP, LIBDC_FFI="", LIBDC_LIBRARY=LIBRARY)
    assert done.stdout == "abi (3,)\n", done.stderr
    done = python("import libdc", LIBDC_FFI="", LIBDC_LIBRARY="/nowhere/libdc.so")
    assert done.returncode == 1 and "ImportError" in done.stderr and "/nowhere/libdc.so" in done.stderr
    done = python("import libdc", LIBDC_FFI="both")
    assert done.returncode == 1 and "must be 'api' or 'abi'" in done.stderr


def test_the_library_stays():
    """Handles that are still open have threads in it when the interpreter lets go of it."""
    done = python("from libdc._lib import ffi, lib; ffi.dlclose(lib); "
                  "print('libdc.so' in open('/proc/self/maps').read())", LIBDC_FFI="abi")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("version, fits", [(1000, True), (1007, True), (999, False), (2000, False), (1001000, False)])
def test_versions_that_do_not_fit_are_refused(tmp_path, version, fits):
    source, library = tmp_path / "fake.c", tmp_path / "libdc.so"
    source.write_text(f'unsigned dc_api_version(void) {{ return {version}; }}\n'
                      'const char *dc_version_string(void) { return "fake"; }\n')
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    done = python("import libdc; print(libdc.__version__)", LIBDC_FFI="abi", LIBDC_LIBRARY=str(library))
    assert (done.stdout == "fake\n") if fits else ("needs 1000" in done.stderr)


class Tensor(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("data", ctypes.c_void_p),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("ndim", ctypes.c_int32), ("dtype", ctypes.c_int32), ("buffer", ctypes.c_void_p)]


def test_ctypes():
    lib = ctypes.CDLL(LIBRARY)
    lib.dc_last_error.restype = lib.dc_status_name.restype = ctypes.c_char_p
    assert lib.dc_api_version() == libdc.api_version()
    device = ctypes.c_void_p()
    assert lib.dc_device_open(b"abacus", None, ctypes.byref(device)) == libdc.Status.E_NO_DEVICE
    assert b"abacus" in lib.dc_last_error() and not device.value
    assert lib.dc_status_name(libdc.Status.E_NO_DEVICE) == b"DC_E_NO_DEVICE"
    tensor = Tensor(data=1, ndim=7)
    lib.dc_tensor_init(ctypes.byref(tensor), ctypes.c_size_t(ctypes.sizeof(Tensor)))
    assert (tensor.struct_size, tensor.data, tensor.ndim) == (ctypes.sizeof(Tensor), None, 0)
    comm, values = ctypes.c_void_p(), (ctypes.c_float * 3)(1, 2, 3)
    assert lib.dc_comm_create_threads(1, None, ctypes.byref(comm)) == 0
    tensor.data, tensor.shape = ctypes.addressof(values), (ctypes.c_int64 * 1)(3)
    tensor.ndim, tensor.dtype = 1, libdc.DType.FLOAT32
    assert lib.dc_comm_all_reduce(comm, ctypes.byref(tensor), libdc.ReduceOp.SUM, None) == 0
    assert list(values) == [1, 2, 3]
    lib.dc_comm_destroy(comm)


def test_features():
    assert libdc.crc32c(b"123456789") == libdc.crc32c(b"6789", libdc.crc32c(bytearray(b"12345"))) == 0xE3069283
    assert libdc.has_feature("cpu") and libdc.has_feature("comm.threads") and not libdc.has_feature("abacus")


def test_the_package_is_typed():
    assert os.path.exists(os.path.join(libdc.library_dir(), "py.typed"))
