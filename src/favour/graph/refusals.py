"""What `torch.export` could not do, said in the user's terms."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch
from torch import nn

from favour.errors import CaptureError
from favour.graph.dynamic import Dynamic
from favour.graph.node import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FAVOUR = os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_users(file: str) -> bool:
    """Whether a source file is the user's: neither torch's, nor favour's, nor generated."""
    return not file.startswith((_TORCH, _FAVOUR, f"torch{os.sep}", "<frozen", "<string>", "<eval_with_key>"))


def refuse_compiled_code(model: nn.Module) -> None:
    """Raise for modules whose code or weights Python does not see."""
    for name, module in model.named_modules():
        where = f"`{name}` is" if name else "`model` is"
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{where} TorchScript ({kind}), from which dropout cannot be read: give the model it was made from, "
                "as it was before `torch.jit.script` or `torch.jit.trace`."
            )
        if "quantized" in kind:
            raise CaptureError(
                f"{where} a quantised module ({kind}): its weights are whole numbers, packed, and have no derivatives. "
                "Give the model as it was before it was quantised."
            )


def explain(error: Exception, dynamic: Dynamic = None) -> str:
    """What torch.export said, the user's line it happened on, and what can be done."""
    text = str(error).strip()
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_users(name):
            frames.append(f"{name}:{traceback.tb_lineno} in {traceback.tb_frame.f_code.co_name}")
        traceback = traceback.tb_next
    quoted = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    frames += [f"{f}:{line} in {n}" for f, line, n in quoted if is_users(f)]
    fixed = [(n, int(d)) for n, d in re.findall(r"L\['(\w+)'\]\S*?\.size\(\)\[(\d+)\]", text) if d != "0"]
    if dynamic is not None and fixed:
        which = ", ".join(f"dimension {d} of `{n}`" for n, d in dict.fromkeys(fixed))
        return (
            f"torch.export cannot let {which} change, as `dynamic={dynamic!r}` asks: the model's code fixes it to the "
            "size in the example (a layer with that many features, a literal size, a branch on it). Leave it out, or "
            f"use `dynamic=True` to free whatever the model lets vary. It said: {text}"
        )
    where = frames[-1] if frames else "an unknown line"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    hint = (
        "The prediction has to be one fixed sequence of tensor operations. Replace branches on tensor values "
        "by `torch.where`, sizes read with `.item()` by shapes, and calls into other libraries by torch "
        "operations; keep the batch size out of literals (`x.flatten(1)` instead of `x.view(32, -1)`)."
    )
    return f"torch.export could not capture the model at {where}: {type(error).__name__}: {first}\n{hint}"


_SHOWN = 6  # operations in one message


def named(nodes: Sequence[Node]) -> str:
    """Operations for a message, one on each line: which, how often, and where first."""
    first: dict[str, Node] = {}
    count: dict[str, int] = {}
    for node in nodes:
        name = str(node.target)
        first.setdefault(name, node)
        count[name] = count.get(name, 0) + 1
    lines = [f"`{name}` at {node.place}" + times(count[name]) for name, node in first.items()]
    return listed(lines)


def times(count: int) -> str:
    return f", and {count - 1} more" if count > 1 else ""


def listed(lines: Sequence[str]) -> str:
    """Lines of a message, the first few of them."""
    shown = "".join(f"\n  - {line}" for line in lines[:_SHOWN])
    return shown + (f"\n  - and {len(lines) - _SHOWN} of other kinds" if len(lines) > _SHOWN else "")
