"""libdc's element types and PyTorch's, which have the same names."""

from __future__ import annotations

from typing import Dict

import libdc
import torch

TORCH_DTYPES: Dict[libdc.DType, torch.dtype] = {
    dtype: getattr(torch, dtype.name.lower()) for dtype in libdc.DType if dtype is not libdc.DType.NONE
}
# Types of weights and gradients.
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Types of parameters that collectives can move.
PARAM_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64)
DTYPES: Dict[torch.dtype, libdc.DType] = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
