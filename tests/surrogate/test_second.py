"""Second derivatives of a surrogate, H[u, w] = Σ_i g_i uᵀE[∂²y_i/∂x²]w, against quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from calls import Call, close, every, probe
from cases import CASES, F64, of_kind

from favour.surrogate import Pointwise
from favour.surrogate.curvature import GroupedSecond

# Operations that are curved and do not tell their second derivatives, so that `explain` says what secants leave out.
UNTOLD = {
    *("aten.matmul", "aten.bmm", "aten.baddbmm", "aten.einsum", "aten.mul", "aten.div"),
    *("aten.max", "aten.amax", "aten.scatter_reduce", "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d"),
    *(f"aten.max_pool{n}d_with_indices" for n in (1, 2, 3)),
    *(f"aten.adaptive_max_pool{n}d" for n in (1, 2, 3)),
}


@every("linear", "dropout")
def test_linear_operations_have_none(case):
    assert all(s.second is None for s in Call(case).surrogates())


def test_curved_operations_tell_or_are_listed():
    silent = set()
    for case in of_kind("curved", "scalar", "delta"):
        if any(s.second is None for s in Call(case).surrogates()):
            silent.add(".".join(case.overload.split(".")[:2]))
    assert silent == UNTOLD


@every("scalar")
def test_curvature_equals_quadrature(case):
    """E[f″] = E[f(x)((x − μ)²/σ² − 1)]/σ², by parts twice, on pieces that end where f is not smooth."""
    (s,) = Call(case).surrogates()
    ((x, _),) = s.maps
    assert isinstance(s.second, Pointwise)
    got = s.second.diagonal(torch.ones(1, *s.mean.shape, dtype=F64))[0]
    rest = case.build()[1:]
    for place in np.ndindex(*x.shape):
        mean, variance = float(x.mean[place]), float(x.variance[place])
        entry = (slice(None), *place[1:])

        def tilted(t, entry=entry, mean=mean, variance=variance):
            inputs = x.mean[:1].repeat(len(t), 1)
            inputs[entry] = torch.from_numpy(t)
            return case.on_means(inputs, *rest)[entry].numpy() * ((t - mean) ** 2 / variance - 1)

        expected = reference.gaussian_moments(tilted, mean, variance, case.kinks)[0] / variance
        close(got[place], expected, f"at {mean}, {variance}", 2e-3)  # where it is a difference of slopes


@every("scalar", "delta")
def test_forms_are_of_the_pulled_back_matrix(case):
    (s,) = Call(case).surrogates()
    ((x, _),) = s.maps
    assert s.second is not None
    g, u = probe(2, *s.mean.shape), probe(3, *x.shape)
    diagonal = s.second.diagonal(g)
    close(diagonal, g * s.second.diagonal(torch.ones(1, *s.mean.shape, dtype=F64)), "linear in covectors")
    H = diagonal.flatten(2).diag_embed()  # of element-wise functions
    flat = u.flatten(2)
    close(s.second.forms(g, u), torch.einsum("pbi,fbij,qbj->bfpq", flat, H, flat))


@pytest.mark.parametrize("mode", ["matched", "taylor"])
def test_only_price_has_curvatures(mode):
    case = next(case for case in CASES if case.overload == "aten.relu.default")
    assert Call(case, mode=mode).surrogates()[0].second is None


GROUPED = ("softmax", "layer_norm", "rms_norm", "group_norm", "instance_norm", "logsumexp", "aten.var")


@every("curved")
def test_second_derivatives_of_groups_are_those_of_autograd(case):
    """At the mean of a certain argument, all entries of H."""
    if not any(name in case.overload for name in GROUPED):
        return
    call = Call(case, certain=True)
    (s,) = call.surrogates()
    ((key, x),) = call.values.items()
    assert isinstance(s.second, GroupedSecond)
    g, u = probe(2, *s.mean.shape), probe(3, *x.shape)
    for f, covector in enumerate(g):
        H = torch.autograd.functional.hessian(lambda t, g=covector: (call.results(key, t)[0] * g).sum(), x.mean)
        n = x.mean[0].numel()
        H = H.reshape(len(x.mean), n, len(x.mean), n).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        close(s.second.diagonal(g)[f].flatten(1), H.diagonal(dim1=1, dim2=2), "diagonal", 1e-6)
        flat = u.flatten(2)
        close(s.second.forms(g, u)[:, f], torch.einsum("pbi,bij,qbj->bpq", flat, H, flat), "forms", 1e-6)
