"""Every registered operation on hostile values, by every method: never NaN, negative or absurd in silence.

What is tried is in `hostile`. The fast part takes the first case of every operation and the options that differ most;
the `slow` part all cases, all options and both dtypes.
"""

from __future__ import annotations

from typing import Any

import hostile
import pytest
import torch
from cases import CASES, F64, Case
from hostile import OPTIONS, PROBED, SMALL, WAYS, Probe, bounds, first_of_each, found
from torch import Tensor

FAST = ("pairs", "dplr", "diag")
# They take nothing that could be hostile.
DRAWS = {"favour.bernoulli.default", "favour.normal.default", "favour.uniform.default"}
# A Gaussian that reaches a pole has no moments (docs/limits.md): nothing is asked of them there.
POLES = {"aten.reciprocal.default", "aten.div.Tensor", "aten.rsqrt.default", "aten.pow.Tensor_Scalar"}
# The expectation of eˣ leaves the range of a float long before samples of eˣ do.
OVERFLOWS = {"aten.exp.default", "aten.expm1.default"}
# How far above its greatest possible value a variance may lie: pairs and secants are second-order.
SLACK = 4.0


def rows_of(t: Tensor, ok: Tensor) -> Tensor:
    return t[ok].double()


def check(probe: Probe, option: str, samples: list[Tensor]) -> None:
    case = probe.case
    predict = probe.predictor(option)
    for i, belief in found(predict(*probe.args)):
        if not belief.mean.numel():
            continue
        drawn = samples[i]
        finite = drawn.isfinite().transpose(0, 1).flatten(1).all(1)  # rows the network itself has an answer for
        mean, variance = rows_of(belief.mean, finite), rows_of(belief.variance, finite)
        assert not (variance < 0).any(), f"{option}: a variance of {variance.min()}"
        if case.overload in POLES | OVERFLOWS and probe.way == "belief":
            continue
        assert mean.isfinite().all() and variance.isfinite().all(), f"{option}: not finite where samples are"
        limits = bounds(case)
        if limits is not None:
            low, high = limits
            bounded = OPTIONS[option].get("activation") != "taylor"  # a tangent goes on for ever
            assert not (variance.numel() and bounded) or variance.max() <= SLACK * ((high - low) / 2) ** 2 + 1e-9, (
                option
            )
            assert (mean >= low - 1e-5).all() and (mean <= high + 1e-5).all(), option
        elif probe.way == "dropout" and case.overload not in OVERFLOWS:
            # Second moments of what was drawn, or of inputs twice their size, bound a variance generously.
            size = max([t.abs().max().item() for t in probe.plain if t.is_floating_point()] + [1.0])
            most = drawn[:, finite].double().abs().amax() if finite.any() else torch.zeros(())
            assert not variance.numel() or variance.max() <= 10 * most.square() + 16 * size**2, option


def probed(case: Case, options: Any, dtype: torch.dtype = F64) -> None:
    for way in WAYS:
        if case.overload == "aten.rrelu.default" and way != "belief":
            continue  # live it draws, and vmap has no rule for it; captured networks have its mean instead
        probe = Probe(case, way, dtype)
        samples = probe.samples(32)
        for option in options:
            check(probe, option, samples)


def ids(case: Case) -> str:
    return case.name.replace("::", ".")


@pytest.mark.parametrize("case", first_of_each(PROBED) + SMALL, ids=ids)
def test_hostile_values(case: Case) -> None:
    probed(case, FAST)


def rearranged(args: list[Any], rows: Tensor) -> list[Any]:
    return [a[rows] for a in args]


CURVED = [case for case in first_of_each(PROBED) if case.kind in ("curved", "dropout")]


@pytest.mark.parametrize("case", CURVED + SMALL, ids=ids)
def test_a_row_is_a_row_wherever_it_stands(case: Case) -> None:
    """Rows of a batch permuted permute the belief, and one alone has what it has among others."""
    order = torch.randperm(hostile.ROWS, generator=torch.Generator().manual_seed(5))
    for way in WAYS:
        probe = Probe(case, way)
        predict = probe.predictor("pairs")
        together = predict(*probe.args)
        again, permuted = predict(*probe.args), predict(*rearranged(probe.args, order))
        alone = predict(*rearranged(probe.args, torch.tensor([3])))
        for i, belief in found(together):
            for name in ("mean", "variance"):
                expected = getattr(belief, name)
                torch.testing.assert_close(getattr(again[i], name), expected, rtol=0, atol=0, equal_nan=True)
                same = {"rtol": 1e-6, "atol": 1e-9, "equal_nan": True}
                torch.testing.assert_close(getattr(permuted[i], name), expected[order], **same)
                torch.testing.assert_close(getattr(alone[i], name), expected[3:4], **same)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", PROBED + SMALL, ids=ids)
def test_hostile_values_of_all_cases(case: Case, dtype: torch.dtype) -> None:
    probed(case, OPTIONS, dtype)


def test_the_probe_reaches_every_operation() -> None:
    """But those that only refuse, or whose rows are no calls of their own."""
    reached = {case.overload for case in PROBED}
    left = {case.overload for case in CASES if case.kind != "refused"} - reached
    assert left == {"aten.squeeze.default", "aten.broadcast_to.default", *DRAWS}
