"""Writes the C source of the compiled module: build_api.py CDEF OUTPUT."""

import sys

from cffi import FFI

ffi = FFI()
with open(sys.argv[1], encoding="utf-8") as file:
    ffi.cdef(file.read())
ffi.set_source("libdc._dc_api", '#include "dc_api.h"', py_limited_api=True)
ffi.emit_c_code(sys.argv[2])
