"""What torch's tracers are told about our functions, and when they may run.

`torch.compiler.assume_constant_result` does the same as `constant`, but loads the whole of `torch._dynamo` (a second of
start-up) in order to set one attribute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

# Held around every use of `torch.export`. Its tracer puts a dispatch mode on a stack that the whole process shares
# (`torch._ops._mode_stack_state_for_pre_dispatch`), and patches modules while it runs, so a second one fails half-way.
# Predictions go on meanwhile: the mode concerns only the thread that traces.
TRACING = threading.RLock()


def traced() -> bool:
    """Whether the code that asks is being compiled or exported.

    While any thread captures a model `torch.compiler.is_compiling()` is True in all of them, and predictions beside it
    would leave out their checks and follow no weights. A tracer's dispatch mode is on the stack of its thread only.
    """
    return torch.compiler.is_dynamo_compiling() or (
        torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
    )


F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """Mark a function whose result depends on its arguments alone: the tracer calls it and keeps the result.

    For tables made with numpy, which is not traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def modules_may_fail() -> Iterator[None]:
    """Let code catch what a module raises (`try: layer(x, mask) except TypeError: layer(x)`).

    The tracer leaves a module that raised on its stack of the modules it is in, and then stumbles over it.
    """
    call_module = torch.fx.Tracer.call_module

    def call(self: Any, *args: Any) -> Any:
        depth = len(self.module_stack)
        try:
            return call_module(self, *args)
        except BaseException:
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            raise

    torch.fx.Tracer.call_module = call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.fx.Tracer.call_module = call_module  # type: ignore[method-assign]
