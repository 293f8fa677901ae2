"""Functions of libdc that Dynamo leaves to the interpreter."""

from __future__ import annotations

from typing import Any, Callable, TypeVar

import torch

_eval_frame: Any = torch._C._dynamo.eval_frame
_DEFAULT, _SKIP = _eval_frame._FrameAction.DEFAULT, _eval_frame._FrameAction.SKIP
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Where the interpreter calls the function below a compiled one, Dynamo compiles neither it nor what it calls.
    torch.compiler.disable() would import Dynamo, and costs each call more."""
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return function


def untraced_itself(function: _Function) -> _Function:
    """The same, for a function that calls the model's own code, or asks whether a compiled function is under way."""
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(_SKIP, _DEFAULT))
    return function
