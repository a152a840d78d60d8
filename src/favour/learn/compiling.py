"""A learner's objective through `torch.compile`.

Nothing that torch's guards would look at in every call changes while a learner is trained (its shapes the learner
compares itself), and to look takes a good part of a small network's step: guards are left out. Torch keeps what it
compiled with the code object, so that no two learners may share one.
"""

from __future__ import annotations

import types
from typing import Any

import torch


def optimised(method: Any) -> Any:
    """A bound method, compiled with code of its own and without guards."""
    function = method.__func__
    apart = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(types.MethodType(apart, method.__self__), fullgraph=True, dynamic=False, options=options)


def of_compiler(error: Exception) -> bool:
    """Whether it is torch's compiler that failed; its errors cannot be imported without importing all of it."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
