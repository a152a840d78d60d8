"""What `torch.compile` is told about our functions, without importing the compiler.

`torch.compiler.assume_constant_result` does the same as `constant`, but loads the whole of `torch._dynamo` (a second of
start-up) in order to set one attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """Mark a function whose result depends on its arguments alone: the tracer calls it and keeps the result.

    For tables made with numpy, which is not traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
