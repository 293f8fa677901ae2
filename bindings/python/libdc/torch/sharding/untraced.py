"""Decorators for functions of libdc that Dynamo must leave to the interpreter."""

from __future__ import annotations

from typing import Any, Callable, TypeVar

import torch

_eval_frame: Any = torch._C._dynamo.eval_frame
_DEFAULT, _SKIP = _eval_frame._FrameAction.DEFAULT, _eval_frame._FrameAction.SKIP
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keeps Dynamo from compiling the function, and what it calls, when the interpreter calls it below a compiled
    function. torch.compiler.disable() would import Dynamo, and makes each call slower."""
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return function


def untraced_itself(function: _Function) -> _Function:
    """The same for the function only, for functions that call the model's own code, or ask whether a compiled function
    runs."""
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(_SKIP, _DEFAULT))
    return function
