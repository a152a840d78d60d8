"""Every rule against dense matrices and total variance: one body per property, all cases."""

from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import pytest
import reference
import torch
from calls import MODES, Call, close, covariance, dense, every, probe
from cases import CASES, F64, of_kind
from hypothesis import given
from hypothesis import strategies as st

from favour.errors import InvalidValue, UnsupportedOperation
from favour.rules import RULES
from favour.rules.__main__ import page
from favour.rules.registry import rule
from favour.rules.shape import broadcast
from favour.surrogate import (
    DenseNoise,
    DiagonalNoise,
    LatentNoise,
    Noise,
    Surrogate,
    compose,
    diagonal_latent,
    factor_noise,
    identity,
    scaling,
)
from favour.surrogate.value import Value

# Operations whose matrix is disjoint or not by values that the rule does not look at.
BY_VALUE = ("linear", "addmm", "index_select", "index", "gather", "where", "masked_fill")
# What importing favour registers, and not what tests and doctests add later.
REGISTERED = {str(overload): entry for overload, entry in RULES.items()}
PAGE = page()


# ------------------------------------------------------------------ coverage


def test_every_rule_has_a_case():
    covered = {case.overload for case in CASES}
    missing, extra = sorted(REGISTERED.keys() - covered), sorted(covered - REGISTERED.keys())
    assert not missing and not extra, f"no case in tests/cases.py: {missing}; a case and no rule: {extra}"


def test_case_names_are_distinct():
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


@every()
def test_declared_exactness_fits_the_case(case):
    allowed = {
        "linear": {"exact", "moment-matched", "linearised"},  # a product is linear in one operand
        "curved": {"moment-matched", "linearised"},
        "dropout": {"exact"},
        "draw": {"exact"},
        "scalar": {"moment-matched"},
        "delta": {"linearised", "moment-matched"},  # a power may be either
        "refused": {"exact", "moment-matched", "linearised", "refused"},
    }
    assert RULES[case.op].exactness in allowed[case.kind]


@every("refused")
def test_refusal_names_the_place(case):
    with pytest.raises(UnsupportedOperation, match=r"layer|dimension 0|aten\.elu"):
        Call(case).surrogates()


def test_a_second_rule_needs_override():
    overload = torch.ops.aten.relu.default
    with pytest.raises(InvalidValue, match=r"aten\.relu\.default.*override=True"):
        rule(overload)(lambda ctx, x: Surrogate(x.mean))


def test_operations_page_is_up_to_date():
    path = Path(__file__).parents[2] / "docs" / "operations.md"
    assert path.read_text(encoding="utf-8") == PAGE, "run `python -m favour.rules > docs/operations.md`"


# ------------------------------------------------------------- mean and maps


@every("linear", "dropout", "draw")
def test_map_equals_the_dense_matrix(case):
    call = Call(case)
    surrogates = call.surrogates()
    assert len(surrogates) == len(call.results())
    for i, surrogate in enumerate(surrogates):
        for key, value in call.values.items():
            expected = call.matrix(i, key)
            total = torch.zeros_like(expected)
            for x, G in surrogate.maps:
                if x is value:
                    total = total + dense(G, value.shape, value.mean.dtype)
            close(total, expected, f"result {i}")


@every("linear", "dropout", "draw", "scalar", "delta", "curved")
def test_no_covariance_gives_the_operation_on_the_mean(case):
    for mode in MODES if case.kind in ("scalar", "delta") else ("price",):
        call = Call(case, certain=True, mode=mode)
        for surrogate, expected in zip(call.surrogates(), call.results(), strict=True):
            assert surrogate.mean.shape == expected.shape
            assert surrogate.mean.dtype == expected.dtype
            close(surrogate.mean, expected, mode, 1e-13)
            for noise in surrogate.noises if case.kind not in ("dropout", "draw") else ():
                assert torch.count_nonzero(noise.diag()) == 0, f"{mode}: noise without any uncertainty"


@every("linear")
def test_mean_does_not_depend_on_the_covariance(case):
    call = Call(case)
    for surrogate, expected in zip(call.surrogates(), call.results(), strict=True):
        close(surrogate.mean, expected)
        assert surrogate.noises == []


@every("linear", "dropout", "draw", "scalar", "delta", "curved")
def test_transpose_is_the_adjoint_of_apply(case):
    for surrogate in Call(case).surrogates():
        for x, G in surrogate.maps:
            d = probe(2, *x.shape, dtype=x.mean.dtype)
            g = probe(2, *surrogate.mean.shape, dtype=surrogate.mean.dtype)
            forward, back = G.apply(d), G.transpose(g)
            assert forward.shape == g.shape and forward.dtype == g.dtype
            assert back.shape == d.shape and back.dtype == d.dtype
            left = (forward.double() * g.double()).flatten(1).sum(1)
            close(left, (d.double() * back.double()).flatten(1).sum(1))


@every("linear", "dropout", "draw", "scalar", "delta", "curved")
def test_square_is_the_squared_matrix(case):
    for surrogate in Call(case).surrogates():
        for x, G in surrogate.maps:
            v = probe(*x.shape, dtype=x.mean.dtype).abs()
            matrix = dense(G, x.shape, x.mean.dtype)
            got = G.square(v)
            assert got.shape == surrogate.mean.shape and got.dtype == surrogate.mean.dtype
            close(got.reshape(-1), matrix.square() @ v.reshape(-1).to(matrix.dtype))


@every("linear", "dropout", "draw", "scalar", "delta", "curved")
def test_disjoint_means_one_output_for_each_input(case):
    for surrogate in Call(case).surrogates():
        for x, G in surrogate.maps:
            most = torch.count_nonzero(dense(G, x.shape, x.mean.dtype), dim=0).max()
            if G.one_per_column:
                assert most <= 1, f"declared disjoint, but an input feeds {most} outputs"
            elif case.overload.split(".")[1] not in BY_VALUE:
                assert most > 1, "disjoint, and not declared so"


@every("linear", "dropout", "draw", "scalar", "delta", "curved")
def test_batching_equals_looping(case):
    if not case.per_row:
        pytest.skip("a row of the batch is not a call of its own")
    together = Call(case).surrogates()
    for row in range(cases.BATCH):
        for whole, alone in zip(together, Call(case, row=row).surrogates(), strict=True):
            rows = slice(row, row + 1)
            close(alone.mean, whole.mean[rows], f"mean of row {row}")
            for (x, G), (one, H) in zip(whole.maps, alone.maps, strict=True):
                d = probe(2, *x.shape, dtype=x.mean.dtype)
                close(H.apply(d[:, rows]), G.apply(d)[:, rows], f"map of row {row}")
                close(H.square(one.variance), G.square(x.variance)[rows], f"square of row {row}")
            for noise, part in zip(whole.noises, alone.noises, strict=True):
                close(part.diag(), noise.diag()[rows], f"noise of row {row}")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_broadcast_of_any_shape(sizes, lead):
    out = [2] * lead + [size for size, _ in sizes]
    shape = torch.Size([1 if thin else size for size, thin in sizes])
    G = broadcast(shape, out)
    expected = reference.dense_matrix(lambda t: t.expand(out).clone(), torch.zeros(shape, dtype=F64))
    if expected.numel():
        close(dense(G, shape, F64), expected)
        g = probe(3, *out)
        close(G.transpose(g).reshape(3, -1), g.reshape(3, -1) @ expected)
        assert not G.one_per_column or torch.count_nonzero(expected, dim=0).max() <= 1


def test_compose_and_identity():
    shape, out = torch.Size([3, 1]), (3, 4)
    factor = probe(*out)
    G = compose(scaling(factor), broadcast(shape, out))
    matrix = dense(broadcast(shape, out), shape, F64) * factor.reshape(-1, 1)
    close(dense(G, shape, F64), matrix)
    close(G.square(probe(*shape).abs()).shape, out)
    v = torch.rand(shape, dtype=F64)
    close(G.square(v).reshape(-1), matrix.square() @ v.reshape(-1))
    assert not G.one_per_column and compose(identity(), scaling(2.0)).one_per_column


# -------------------------------------------------------------------- noises


def noises() -> dict[str, tuple[Noise, torch.Size]]:
    torch.manual_seed(0)
    root = torch.randn(3, 4, 4, dtype=F64)
    low = torch.randn(3, 4, 2, dtype=F64)
    columns = torch.randn(5, 3, 2, 2, dtype=F64)
    B = torch.randn(3, 4, 6, dtype=F64)
    latent = LatentNoise(
        lambda z: torch.einsum("bnk,fbk->fbn", B, z.flatten(2)),
        lambda g: torch.einsum("bnk,fbn->fbk", B, g).unflatten(-1, (2, 3)),
        B.square().sum(-1),
        (2, 3),
    )
    event, image = torch.Size([3, 4]), torch.Size([3, 2, 2])
    return {
        "diagonal": (DiagonalNoise(torch.rand(event, dtype=F64)), event),
        "diagonal image": (DiagonalNoise(torch.rand(image, dtype=F64)), image),
        "one number": (DiagonalNoise(torch.rand(3, dtype=F64)), torch.Size([3])),
        "dense": (DenseNoise(root @ root.mT), event),
        "dense, singular": (DenseNoise(low @ low.mT), event),
        "dense, scaled": (DenseNoise((root @ root.mT)[:1], torch.rand(3, dtype=F64)), event),
        "dense, scaled by 0": (DenseNoise((root @ root.mT)[:1], torch.zeros(3, dtype=F64)), event),
        "latent": (latent, event),
        "factor": (factor_noise(columns, "key", ""), image),
        "factor of rank 0": (factor_noise(columns[:0], "key", ""), image),
        "diagonal latent": (diagonal_latent(torch.randn(image, dtype=F64), "key", ""), image),
    }


NOISY = {case.name: case for case in of_kind("dropout", "draw", "scalar", "delta", "curved")}


@pytest.mark.parametrize("name", [*noises(), *NOISY])
def test_noise_is_one_psd_covariance(name):
    if name in NOISY:
        surrogate = Call(NOISY[name]).surrogates()[0]
        found = [(noise, surrogate.mean.shape) for noise in surrogate.noises]
    else:
        found = [noises()[name]]
    for noise, shape in found:
        N = covariance(noise, shape)  # (batch, n, n)
        batch, n = N.shape[:2]
        close(N, N.mT, "symmetry")
        assert noise.diag().shape == shape
        close(noise.diag().reshape(batch, n), N.diagonal(dim1=1, dim2=2), "diag")
        least, largest = torch.linalg.eigvalsh(N).aminmax()
        assert least >= -1e-12 * max(1.0, largest.item()), f"eigenvalue {least}"
        g = probe(3, *shape)
        flat = g.reshape(3, batch, n)
        close(noise.gram(g), torch.einsum("fbn,bnm,gbm->bfg", flat, N, flat), "gram")
        columns = noise.columns()
        assert columns.shape[1:] == shape
        flat = columns.reshape(-1, batch, n)
        close(torch.einsum("kbn,kbm->bnm", flat, flat), N, "columns")


@every("dropout")
def test_dropout_adds_the_total_variance(case):
    if "alpha" in case.overload:
        pytest.skip("drops to another value than 0: see test_channel_dropout.py")
    call = Call(case)
    (surrogate,) = call.surrogates()
    x, p, live = (call.values.get(id(leaf), leaf) for leaf in call.leaves)
    mean = x.mean if isinstance(x, Value) else x.tensor
    variance = x.variance if isinstance(x, Value) else torch.zeros_like(mean)
    got = torch.zeros_like(mean)
    for part, G in surrogate.maps:
        got = got + G.square(part.variance)
    for noise in surrogate.noises:
        got = got + noise.diag()
    for row in range(len(mean)):
        rates = np.broadcast_to(p, mean.shape[1:]).flatten() if live else 0.0
        start = mean[row].reshape(-1).numpy(), np.diag(variance[row].reshape(-1).numpy())
        expected = reference.dropout(*start, rates)
        close(surrogate.mean[row].reshape(-1), expected[0])
        close(got[row].reshape(-1), np.diag(expected[1]).copy(), f"row {row}")
