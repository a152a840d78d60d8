"""Every rule is differentiable: slopes of mean, map and noise against finite differences, in float64.

What training needs is the gradient of anything a method makes of a surrogate. So a number is made of all of it, by
fixed random covectors c and g,

    s = ⟨c, m⟩ + Σ_maps ⟨d, Gᵀg⟩ + Σ_maps ⟨c, (G∘G) v⟩ + Σ_noises ⟨w, g N gᵀ⟩,

and its slope along a random direction through means, variances, factors, weights and known inputs at once is compared
with (8(s(h) − s(−h)) − (s(2h) − s(−2h)))/12h.
"""

from __future__ import annotations

import pytest
import torch
from calls import Call, every
from cases import F64, Batched, Case, Uncertain
from torch import Tensor

from favour.surrogate.value import Value

STEP = 1e-5  # small beside the distance to the kinks of maxima


def drawn(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def inputs(call: Call) -> list[Tensor]:
    """All float64 tensors that a call reads, in a fixed order."""
    found: dict[int, list[Tensor]] = {}
    for leaf in call.leaves:
        if isinstance(leaf, Uncertain):
            found[id(leaf)] = [leaf.mean, leaf.diag, leaf.factor]
        elif isinstance(leaf, Batched | Tensor):
            found[id(leaf)] = [leaf.tensor if isinstance(leaf, Batched) else leaf]
    return [t for tensors in found.values() for t in tensors]


def number(case: Case, replaced: list[Tensor] | None = None) -> Tensor:
    """s of a case with other inputs."""
    call = Call(case)
    if replaced is not None:
        queue, made = iter(replaced), {}
        for leaf in call.leaves:
            if isinstance(leaf, Uncertain) and id(leaf) not in made:
                made[id(leaf)] = True
                mean, diag, factor = next(queue), next(queue), next(queue)
                call.values[id(leaf)] = Value(mean, diag, {"z": factor})
            elif isinstance(leaf, Batched | Tensor) and id(leaf) not in made:
                made[id(leaf)] = Batched(next(queue))
        call.leaves = [
            made[id(leaf)] if isinstance(leaf, Batched) else made[id(leaf)].tensor if isinstance(leaf, Tensor) else leaf
            for leaf in call.leaves
        ]
    total = torch.zeros((), dtype=F64)
    for i, surrogate in enumerate(call.surrogates()):
        if not surrogate.mean.is_floating_point():
            continue
        mean = surrogate.mean.double()
        covector = drawn(mean.shape, i)
        total = total + (covector * mean).sum()
        folded = drawn(torch.Size([2, *mean.shape]), 10 + i).to(surrogate.mean.dtype)
        for k, (x, G) in enumerate(surrogate.maps):
            total = total + (drawn(folded.shape[:1] + x.shape, 20 + k) * G.transpose(folded)).sum()
            total = total + (covector * G.square(x.variance)).sum()
        for k, noise in enumerate(surrogate.noises):
            gram = noise.gram(folded)
            total = total + (drawn(gram.shape, 30 + k) * gram).sum()
    return total


# Not functions of their inputs that a gradient passes through: what stops gradients on purpose, what PyTorch itself
# has no gradient of, and float32, where differences say nothing.
STOPPED = ("aten.detach.default",)
STATISTICS = {"aten.batch_norm.default": (3, 4), "aten.instance_norm.default": (3, 4)}


@every("linear", "dropout", "draw", "scalar", "delta", "curved")
def test_slopes_equal_finite_differences(case: Case) -> None:
    call = Call(case)
    if case.overload in STOPPED or any(s.mean.dtype != F64 for s in call.surrogates()):
        pytest.skip("no gradient, or not in float64")
    fixed = [call.leaves[i] for i in STATISTICS.get(case.overload, ()) if i < len(call.leaves)]
    start, directions = [], []
    for i, t in enumerate(inputs(call)):
        d = drawn(t.shape, 40 + i) if t.dtype == F64 and not any(t is f for f in fixed) else None
        if d is not None and bool(((t >= 0) & (t <= 1)).all()):
            d, t = 0.1 * d, 0.9 * t + 0.05  # a rate stays one
        start.append(t if d is None else t + 0.02 * d)  # away from ties
        directions.append(d)
    if all(d is None for d in directions):
        pytest.skip("nothing in float64")

    def along(h: Tensor | float) -> Tensor:
        return number(case, [t if d is None else t + h * d for t, d in zip(start, directions, strict=True)])

    h = torch.zeros((), dtype=F64, requires_grad=True)
    value = along(h)
    slope = torch.autograd.grad(value, h)[0] if value.requires_grad else torch.zeros(())
    ends = [float(along(k * STEP)) for k in (1, -1, 2, -2)]
    want = (8 * (ends[0] - ends[1]) - (ends[2] - ends[3])) / (12 * STEP)
    assert float(slope) == pytest.approx(want, rel=1e-6, abs=1e-6 * max(1.0, abs(float(value.detach()))))
