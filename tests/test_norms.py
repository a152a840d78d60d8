"""Norms: the Jacobian against autograd, mean and covariance against draws from the same Gaussian."""

from __future__ import annotations

import pytest
import torch
from calls import Call, close, covariance, dense
from cases import of_kind

import favour
from favour.rules import RULES
from favour.value import Context, Value

F64 = torch.float64
aten = torch.ops.aten
CTX = Context(module="layer", place="layer (model.py:1)")
NORMS = [case for case in of_kind("curved") if "norm" in case.overload or "var" in case.overload]


CURVED = [c for c in of_kind("curved") if c in NORMS or "softmax" in c.overload or "logsum" in c.overload]


@pytest.mark.parametrize("case", CURVED, ids=lambda c: c.name)
def test_map_without_covariance_is_the_jacobian(case):
    call = Call(case, certain=True)
    (surrogate,) = call.surrogates()
    ((x, G),) = surrogate.maps
    (key,) = call.values
    jacobian = torch.func.jacrev(lambda t: call.results(key, t)[0])(x.mean)
    close(dense(G, x.shape, F64), jacobian.reshape(surrogate.mean.numel(), -1))


def uncertain(n, spread, rank, seed=0):
    torch.manual_seed(seed)
    mean = torch.randn(2, n, dtype=F64)
    diag = spread**2 * (0.5 + torch.rand(2, n, dtype=F64))
    return Value(mean, diag, {"z": spread / rank**0.5 * torch.randn(rank, 2, n, dtype=F64)})


def draws(x, count=200_000):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(count, *x.shape, dtype=F64, generator=generator)
    w = torch.randn(count, x.blocks["z"].shape[0], dtype=F64, generator=generator)
    return x.mean + z * x.diag.sqrt() + torch.einsum("nr,rbi->nbi", w, x.blocks["z"])


OPERATIONS = {
    "layer": (aten.layer_norm.default, lambda n: ([n],)),
    "rms": (aten.rms_norm.default, lambda n: ([n], None, 1e-6)),
    "group": (aten.group_norm.default, lambda n: (2,)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_mean_and_covariance_against_draws(name, spread):
    op, options = OPERATIONS[name]
    n = 24
    x = uncertain(n, spread, 4)
    surrogate = RULES[op].function(CTX, x, *options(n))
    samples = op(draws(x).reshape(-1, n), *options(n)).reshape(-1, *x.shape)
    error = ((surrogate.mean - samples.mean(0)) / samples.std(0)).abs().max()
    naive = ((op(x.mean, *options(n)) - samples.mean(0)) / samples.std(0)).abs().max()
    assert error < 0.012 + 0.02 * (spread > 0.2) and error < naive / 4, (error, naive)

    ((_, G),) = surrogate.maps
    columns = torch.cat([G.apply(torch.diag_embed(x.diag.sqrt()).transpose(0, 1)), G.apply(x.blocks["z"])])
    got = torch.einsum("kbi,kbj->bij", columns, columns) + covariance(surrogate.noises[0], x.shape)
    centred = samples - samples.mean(0)
    expected = torch.einsum("nbi,nbj->bij", centred, centred) / (len(samples) - 1)
    assert (got - expected).norm() / expected.norm() < (0.03 if spread < 0.2 else 0.12)


def test_the_spread_of_the_input_enters_the_denominator():
    """With the mean alone the output would be too large: a constant input of variance v is divided by √v, not by √ε."""
    n, v = 64, 0.25
    x = Value(torch.zeros(1, n, dtype=F64), torch.full((1, n), v, dtype=F64))
    surrogate = RULES[aten.layer_norm.default].function(CTX, x, [n])
    ((_, G),) = surrogate.maps
    total = G.square(x.diag) + surrogate.noises[0].diag()
    close(total, torch.full_like(total, 1.0), tolerance=0.03)


def test_hand_written_rms_norm_is_close_to_the_operation():
    class Hand(torch.nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own, self.drop = own, torch.nn.Dropout(0.1)

        def forward(self, x):
            x = self.drop(x)
            if self.own:
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            return torch.nn.functional.rms_norm(x, (16,), eps=1e-5)

    torch.manual_seed(0)
    x = torch.randn(3, 16, dtype=F64)
    beliefs = [favour.compile(Hand(own), x, method="adjoint", rank=16)(x) for own in (True, False)]
    draws = favour.compile(Hand(True), x).sample(x, n=20_000)
    for belief in beliefs:
        assert ((belief.mean - draws.mean(0)) / draws.std(0).clamp_min(1e-9)).abs().max() < 0.1
        assert (belief.variance / draws.var(0) - 1).abs().max() < 0.3  # one large entry is not Gaussian
