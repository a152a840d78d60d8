"""Three samplers to be measured against, from what people write first to the best we can do.

    naive     n calls of the module with dropout on
    batched   draws folded into the batch, many inputs' worth at a time
    cached    the trunk once, compiled; then many draws of the head at a time, compiled too

`cached` has three ways to draw, and takes the fastest, measured: torch's own dropout inside the compiled head; on a
CPU, masks made inside it from 16-bit random words of numpy's SFC64, which cost a fraction of torch's numbers (rates
are rounded to 2⁻¹⁶, as in `favour.sample`); and `favour.sample`, which draws so too but is not compiled.

A sampler takes `fixed` seconds per batch and a number of seconds per draw, so n draws take fixed + n·per draw; how many
draws go at a time is chosen by trying. The means and covariances a user would take of the draws are not counted, in the
samplers' favour.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import favour
from favour_studies.bench.networks import Split

ROWS = (512, 2048, 8192)  # rows of the folded batch that are tried
BYTES = 2**30  # of one layer's output in the folded batch, at most


@dataclass
class Timed:
    """A sampler ready to be timed: `chunk()` makes `draws` draws, `fixed()` what is done once per batch."""

    name: str
    variant: str
    draws: int
    chunk: Callable[[], Any]
    fixed: Callable[[], Any] | None = None


class WordDropout(nn.Module):
    """Dropout whose mask is read off 16-bit words that were drawn elsewhere: kept where a word is ≥ a threshold."""

    words: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        dropped = round(p * 2**16)
        self.threshold, self.scale = dropped - 2**15, 1 / (1 - dropped / 2**16)
        self.register_buffer("words", torch.zeros(0, dtype=torch.int16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.words.view(x.shape) >= self.threshold, x * self.scale, 0.0)


def with_dropout(model: nn.Module) -> nn.Module:
    """A copy with dropout on and everything else as in eval: one call is one naive sample."""
    noisy = copy.deepcopy(model).eval()
    for module in noisy.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention):
            module.train()
        if isinstance(module, nn.TransformerEncoderLayer):  # its fast path, for inference, leaves dropout out
            module.training = True
    return noisy


def compiled(module: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` with a code object of its own.

    What torch compiled is kept by code object and found again by guards. Where these are filtered (tensors only), two
    modules of one class and of the same shapes would share what was compiled for the first.
    """

    def call(*args: Any) -> Any:
        return module(*args)

    call.__code__ = call.__code__.replace(co_name=f"call_{type(module).__name__}")
    return torch.compile(call, **options)


def folded(x: Tensor, draws: int) -> Tensor:
    """x repeated along the batch, (draws · batch, …)."""
    return x.expand(draws, *x.shape).flatten(0, 1)


class _Folded(nn.Module):
    """The head on `draws` copies of what the trunk gives."""

    def __init__(self, head: nn.Module, draws: int) -> None:
        super().__init__()
        self.head, self.draws = head, draws

    def forward(self, h: Tensor) -> Tensor:
        return self.head(folded(h, self.draws)).unflatten(0, (self.draws, h.shape[0]))


class WordSampler:
    """Draws of a head whose only noise is `nn.Dropout`: words from SFC64, all else compiled."""

    def __init__(
        self, head: nn.Module, h: Tensor, draws: int, compiler: Mapping[str, Any] | None, seed: int = 0
    ) -> None:
        self.module = _Folded(copy.deepcopy(head).eval(), draws)
        self.bits = np.random.SFC64(seed)
        places = [(n, m) for n, m in self.module.named_modules() if isinstance(m, nn.Dropout)]
        sizes = _sizes(self.module, [m for _, m in places], h)
        self.masks: list[tuple[WordDropout, torch.Size]] = []
        for (name, dropout), size in zip(places, sizes, strict=True):
            parent, _, leaf = name.rpartition(".")
            mask = WordDropout(dropout.p)
            setattr(self.module.get_submodule(parent), leaf, mask)
            self.masks.append((mask, size))
        self.call = self.module if compiler is None else compiled(self.module, **compiler)

    def __call__(self, h: Tensor) -> Tensor:
        for mask, size in self.masks:
            count = size.numel()
            raw = np.atleast_1d(self.bits.random_raw(-(-count // 4)))
            mask.words = torch.from_numpy(raw.view(np.int16)[:count]).view(size)
        return self.call(h)


def _sizes(module: nn.Module, dropouts: list[nn.Module], h: Tensor) -> list[torch.Size]:
    """The shapes that dropouts act on."""
    shapes: dict[nn.Module, torch.Size] = {}
    hooks = [m.register_forward_hook(lambda m, args, out: shapes.__setitem__(m, out.shape)) for m in dropouts]
    try:
        module(h)
    finally:
        for hook in hooks:
            hook.remove()
    return [shapes[m] for m in dropouts]


def only_plain_dropout(module: nn.Module) -> bool:
    """Whether `nn.Dropout` modules are the only noise, each used where a word mask can take its place."""
    return not any(isinstance(m, nn.MultiheadAttention) for m in module.modules())


def _seconds(function: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """The least of a few calls after two that warm up."""
    least = float("inf")
    for i in range(repeats + 2):
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i > 1:
            least = min(least, time.perf_counter() - begin)
    return least


def chunk_sizes(batch: int, widest: int, itemsize: int = 4) -> list[int]:
    """Numbers of draws to try for a batch, `widest` being the entries of the largest layer per input."""
    most = max(1, BYTES // (batch * widest * itemsize))
    return sorted({max(1, min(most, rows // batch)) for rows in ROWS})


def widest(model: nn.Module, x: Tensor) -> int:
    """Entries per input of the largest result of a leaf module."""
    most = 1

    def see(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal most
        if isinstance(output, Tensor):
            most = max(most, output[:1].numel())

    leaves = [m for m in model.modules() if not list(m.children())]
    hooks = [m.register_forward_hook(see) for m in leaves]
    try:
        model(x[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return most


def naive(model: Split, x: Tensor) -> Timed:
    """One draw is one call of the module."""
    noisy = with_dropout(model)
    return Timed("naive", "module calls", 1, lambda: noisy(x))


def batched(model: Split, x: Tensor) -> Timed:
    """The number of draws at a time with the least time per draw."""
    noisy = with_dropout(model)
    sizes = chunk_sizes(len(x), widest(model, x))
    per_draw = _tried({n: _bind(_call_folded, noisy, x, n) for n in sizes}, x.device)
    best = min(per_draw, key=per_draw.__getitem__)
    return Timed("batched", f"{best} draws at a time", best, _bind(_call_folded, noisy, x, best))


def cached(model: Split, x: Tensor, compiler: Mapping[str, Any] | None) -> Timed:
    """The fastest way we know to draw.

    Args:
        model: Trunk and head, in eval mode.
        x: Inputs, (batch, …).
        compiler: Arguments of `torch.compile`; None leaves out what needs a compiler.
    """
    h = model.trunk(x)
    trunk = model.trunk if compiler is None else compiled(model.trunk, **compiler)
    predict = favour.compile(model.head, h[:2], check=False)
    per_draw = _tried({n: _bind(predict.sample, h, n=n) for n in chunk_sizes(len(x), widest(model, x))}, x.device)
    best = min(per_draw, key=per_draw.__getitem__)
    least = per_draw[best]
    text = f"favour.sample, {best} draws at a time"
    chosen = Timed("cached", text, best, _bind(predict.sample, h, n=best), _bind(trunk, x))
    if compiler is None:
        return chosen
    for draws in sorted({best, max(per_draw)}):
        variants: dict[str, Callable[[Tensor], Tensor]] = {
            "torch's dropout": compiled(_Folded(with_dropout(model.head), draws), **compiler)
        }
        if x.device.type == "cpu" and only_plain_dropout(model.head):
            variants["16-bit words"] = WordSampler(model.head, h, draws, compiler)
        for name, call in variants.items():
            seconds = _seconds(_bind(call, h), x.device) / draws
            if seconds < least:
                least = seconds
                text = f"{name}, {draws} draws at a time, compiled"
                chosen = Timed("cached", text, draws, _bind(call, h), _bind(trunk, x))
    return chosen


def _tried(calls: Mapping[int, Callable[[], Any]], device: torch.device) -> dict[int, float]:
    """Seconds per draw of chunks of several sizes, up to the first that takes over a second."""
    per_draw: dict[int, float] = {}
    for draws, call in calls.items():
        seconds = _seconds(call, device)
        per_draw[draws] = seconds / draws
        if seconds > 1:
            break
    return per_draw


def _call_folded(model: nn.Module, x: Tensor, draws: int) -> Tensor:
    return model(folded(x, draws))


def _bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: function(*args, **kwargs)
