"""What forward sweeps carry beside variances, through every rule's case, against dense matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from calls import Call, close, covariance, dense, every
from cases import F64, Case, of_kind, rand, randn
from torch import Tensor

from favour.surrogate import Cumulants, LoneCumulants, Scaling, Surrogate, Unavailable
from favour.surrogate.channels import ChannelCovariance, Fallen
from favour.surrogate.value import Value

# Channel covariances survive scalings and maps that keep channels apart. Elsewhere they end, for one of these reasons.
ENDS = ("two uncertain tensors meet", "the operation draws for many entries at once", "mixes channels", "mixes entries")


def fallen(case: Case) -> tuple[Call, dict[int, tuple[Value, Tensor]]]:
    """The case with channels that fall together, and the dense covariance (batch, n, n) of every argument."""
    call = Call(case)
    known: dict[int, tuple[Value, Tensor]] = {}
    torch.manual_seed(3)
    for value in call.values.values():
        if value.mean.ndim < 3 or value.mean.dtype != F64:
            continue
        u = 0.5 * randn(2, *value.shape)
        value.replace(u.square().sum(0) + rand(value.shape), {})
        value.carried = (Fallen(u, None),)
        batch, channels = value.shape[:2]
        columns = u.flatten(3)
        within = torch.einsum("kbcp,kbcq->bcpq", columns, columns)
        blocks = torch.zeros(batch, channels, within.shape[2], channels, within.shape[3], dtype=F64)
        for c in range(channels):
            blocks[:, c, :, c] = within[:, c]
        n = value.mean[0].numel()
        whole = blocks.reshape(batch, n, n)
        rest = value.variance.flatten(1) - whole.diagonal(dim1=1, dim2=2)
        known[id(value)] = value, whole + rest.diag_embed()
    return call, known


def rows(matrix: Tensor, batch: int) -> Tensor:
    return matrix.reshape(batch, matrix.shape[0] // batch, batch, -1).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def linear_part(s: Surrogate, known: dict[int, tuple[Value, Tensor]]) -> Tensor:
    """Cov[y] of one uncertain argument by matrices, and the noises."""
    ((x, G),) = s.maps
    M = rows(dense(G, x.shape, F64), len(x.mean))
    total = M @ known[id(x)][1] @ M.mT
    for noise in s.noises:
        total = total + covariance(noise, s.mean.shape)
    return total


@every("linear")
def test_variances_through_maps_that_keep_channels_apart(case):
    call, known = fallen(case)
    for s in call.surrogates():
        if len(s.maps) != 1 or id(s.maps[0][0]) not in known or len(s.mean) != len(s.maps[0][0].mean):
            continue
        ((x, G),) = s.maps
        (one,) = x.carried
        got = one.through(x.variance, G)
        if got is not None:
            close(got.flatten(1), linear_part(s, known).diagonal(dim1=1, dim2=2))
        elif G.channelwise and not isinstance(G, Scaling):
            pytest.fail("a map that keeps channels apart carries their columns")


@every("linear", "dropout", "scalar", "delta", "curved")
def test_channel_covariance_is_that_of_matrices_or_ends_with_a_reason(case):
    call, known = fallen(case)
    for s in call.surrogates():
        if not s.maps or id(s.maps[0][0]) not in known:
            continue
        told = ChannelCovariance.after(s)
        if isinstance(told, Unavailable):
            assert any(reason in told.reason for reason in ENDS), told
            continue
        if told is None:
            assert s.mean.ndim <= 2, "it ended and nobody was told"
            continue
        if len(s.maps) != 1 or len(s.mean) != len(s.maps[0][0].mean):
            continue
        cov = linear_part(s, known)
        batch, channels, space = s.mean.shape[0], s.mean.shape[1], s.mean.shape[2:]
        places = list(itertools.product(*map(range, space)))
        cov = cov.reshape(batch, channels, len(places), channels, len(places)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        u = told.columns()
        assert u is not None and u.shape[1:] == s.mean.shape
        flat = u.flatten(3)
        rest = cov - torch.einsum("kbcp,kbcq->bcpq", flat, flat)
        assert torch.linalg.eigvalsh(rest).min() > -1e-9, "columns tell more than there is"
        if told.whole:
            off = rest - rest.diagonal(dim1=-2, dim2=-1).diag_embed()
            close(off, torch.zeros_like(off), "columns tell all but a diagonal")
            for lag in itertools.product(*[range(1 - n, n) for n in space]):
                if not any(lag):
                    continue
                expected = torch.zeros(batch, channels, len(places), dtype=F64)
                for t, place in enumerate(places):
                    there = tuple(a + d for a, d in zip(place, lag, strict=True))
                    if there in places:
                        expected[..., t] = cov[..., t, places.index(there)]
                close(told.at(lag).flatten(2), expected, f"lag {lag}")


@every("linear", "dropout", "curved")
@pytest.mark.parametrize("kind", [Cumulants, LoneCumulants])
def test_cumulants_are_carried_by_powers_of_entries(case, kind):
    """κₙ(Gx)_i = Σ_j G_ijⁿ κₙ(x_j), summed over all that is read; noises add theirs, and what no map tells ends."""
    call = Call(case)
    torch.manual_seed(4)
    for value in call.values.values():
        value.carried = (kind(randn(value.shape).to(value.mean.dtype), randn(value.shape).to(value.mean.dtype)),)
    for s in call.surrogates():
        told = kind.after(s)
        terms = [noise.cumulants() for noise in s.noises if noise.cumulants is not None]
        ended = s.second is not None and s.second.ends_cumulants
        for x, G in [] if ended else s.maps:
            powers = G.power(3), G.power(4)
            if (kind is LoneCumulants and not G.near_diagonal) or any(isinstance(p, Unavailable) for p in powers):
                continue
            matrix, (known,) = dense(G, x.shape, x.mean.dtype), x.carried
            moved = (matrix**n @ k.reshape(-1).to(matrix.dtype) for n, k in ((3, known.third), (4, known.fourth)))
            terms.append(tuple(k.reshape(s.mean.shape) for k in moved))
        if not terms:
            assert told is None or isinstance(told, Unavailable), told
            continue
        assert isinstance(told, kind), told
        for n, got in ((3, told.third), (4, told.fourth)):
            close(got, sum(k[n - 3] for k in terms), f"κ{n}", 1e-9)


def test_cases_carry_channels():
    """At least these kinds of operation are met by the tests above with something to carry."""
    survive = set()
    for case in of_kind("linear", "dropout", "scalar", "curved"):
        call, known = fallen(case)
        for s in call.surrogates():
            if s.maps and id(s.maps[0][0]) in known and isinstance(ChannelCovariance.after(s), ChannelCovariance):
                survive.add(case.overload)
    assert survive >= {
        "aten.batch_norm.default",
        "aten.avg_pool2d.default",
        "aten.max_pool2d.default",
        "aten.mul.Tensor",
        "aten.upsample_nearest2d.vec",
        "aten.dropout.default",
    }, survive
