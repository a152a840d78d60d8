"""Every member of `LinearMap` in every rule's case, against the matrix built column by column."""

from __future__ import annotations

import pytest
import torch
from calls import Call, close, dense, every, probe
from cases import BATCH, F64, Case, of_kind
from torch import Tensor

from favour.surrogate import LinearMap, Surrogate, Unavailable
from favour.surrogate.value import Value

MAPPED = ("linear", "dropout", "scalar", "delta", "curved")

# What may answer `Unavailable`, by member: beginnings of case names, and the reason. All else is known.
JACOBIANS = tuple(f"aten.{name}" for name in ["layer_norm", "group_norm", "instance_norm", "rms_norm"])
JACOBIANS += tuple(f"aten.{name}" for name in ["softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"])
COPIES = "_to_copy alias clone contiguous detach lift_fresh_copy to.dtype type_as squeeze.dim"
MOVES = "channel_shuffle cumsum flip repeat roll select_scatter slice_scatter t.default transpose.int"
PLACES = tuple(f"aten.{name}" for name in (COPIES + " " + MOVES).split())
LOOKUPS = ("aten.index.Tensor [an entry for each input]", "aten.gather.", "aten.scatter_add.", "aten.scatter_reduce.")
UNAVAILABLE: dict[str, dict[tuple[str, ...], str]] = {
    "rows": {LOOKUPS: "a lookup that differs from input to input"},
    "between": {LOOKUPS: "a lookup that differs from input to input"},
    "diagonal": {
        PLACES: "the diagonal of Structural is not known",
        JACOBIANS: "the diagonal of a Jacobian in groups",
        ("aten.conv1d.padding [even window]",): "a convolution that changes the shape",
    },
}


def maps(case: Case) -> list[tuple[Value, LinearMap, Surrogate]]:
    return [(x, G, s) for s in Call(case).surrogates() for x, G in s.maps]


def told(case: Case, member: str, answer: object) -> bool:
    """Whether there is an answer; that there is none has to be listed above, with its reason."""
    if not isinstance(answer, Unavailable):
        return True
    reasons = [
        reason
        for names, reason in UNAVAILABLE.get(member, {}).items()
        if any(case.name.startswith(name) for name in names)
    ]
    assert any(answer.reason.startswith(reason) for reason in reasons), f"{member}: {answer.reason}"
    return False


def blocks(G: LinearMap, x: Value) -> Tensor:
    """The matrices (batch, outputs, inputs) of a map that keeps the inputs of a batch apart."""
    matrix = dense(G, x.shape, x.mean.dtype)
    batch = len(x.mean)
    whole = matrix.reshape(batch, -1, batch, x.mean[0].numel())
    found = whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    assert torch.count_nonzero(whole) == torch.count_nonzero(found), "an input reads another"
    return found


@every(*MAPPED)
def test_powers_are_those_of_the_entries(case):
    for x, G, s in maps(case):
        matrix = dense(G, x.shape, x.mean.dtype)
        for n in (1, 2, 3, 4):
            powered = G.power(n)
            if told(case, "power", powered):
                assert isinstance(powered, LinearMap)
                close(dense(powered, x.shape, x.mean.dtype), matrix**n, f"power {n}", 1e-9)
                g = probe(2, *s.mean.shape, dtype=s.mean.dtype)
                back = powered.transpose(g).reshape(2, -1).to(matrix.dtype)
                close(back, g.reshape(2, -1).to(matrix.dtype) @ matrix**n, f"transposed power {n}", 1e-9)


@every(*MAPPED)
def test_hadamard_is_the_product_of_entries(case):
    """With itself, and with itself scaled on either side."""
    for x, G, s in maps(case):
        dtype = x.mean.dtype
        matrix = dense(G, x.shape, dtype)
        outer, inner = probe(*s.mean.shape, dtype=s.mean.dtype), probe(*x.shape, dtype=dtype)
        for name, H, expected in (
            ("itself", G, matrix * matrix),
            ("scaled after", G.scaled_after(outer), matrix * matrix * outer.reshape(-1, 1)),
            ("scaled before", G.scaled_before(inner), matrix * matrix * inner.reshape(1, -1)),
        ):
            if name != "itself":
                close(dense(H, x.shape, dtype) * matrix, expected, f"the map {name}")
            product = G.hadamard(H)
            if told(case, f"hadamard, {name}", product):
                assert isinstance(product, LinearMap)
                close(dense(product, x.shape, dtype), expected, name)


@every(*MAPPED)
def test_rows_are_those_of_other_inputs(case):
    for x, G, _ in maps(case):
        if not case.per_row:
            pytest.skip("a row of the batch is not a call of its own")
        order = torch.tensor([2, 0, 0])[: len(x.mean)]
        theirs = G.rows(lambda t, order=order: t[order], x.mean.new_zeros(0, *x.shape))
        if told(case, "rows", theirs):
            assert isinstance(theirs, LinearMap)
            close(blocks(theirs, x), blocks(G, x)[order])


@every(*MAPPED)
@pytest.mark.parametrize("q", [1, BATCH])
def test_between_two_inputs(case, q):
    """(G_a∘G_b)c for each pair of inputs of a group."""
    for x, G, s in maps(case):
        if len(x.mean) % q:
            pytest.skip("a batch of its own")
        c = probe(q, *x.shape, dtype=x.mean.dtype)
        got = G.between(c, q)
        if not told(case, "between", got):
            continue
        assert isinstance(got, Tensor) and got.shape == (q, *s.mean.shape)
        if not case.per_row:
            continue
        matrices = blocks(G, x)
        for a in range(q):
            for b in range(len(x.mean)):
                partner = b // q * q + a
                entries = matrices[partner] * matrices[b]
                close(got[a, b].reshape(-1), entries @ c[a, b].reshape(-1).to(entries.dtype), f"{a}, {b}")


@every(*MAPPED)
def test_diagonal_is_the_matrix_diagonal(case):
    for x, G, s in maps(case):
        if s.mean.shape != x.shape:
            continue
        found = G.diagonal()
        if told(case, "diagonal", found):
            got = torch.as_tensor(found, dtype=x.mean.dtype).expand(x.shape)
            close(got.reshape(-1), dense(G, x.shape, x.mean.dtype).diagonal())


@every(*MAPPED)
def test_traits_hold(case):
    """What a map says of its matrix is so; `one_per_column` is in test_rules.py."""
    for x, G, s in maps(case):
        matrix = dense(G, x.shape, x.mean.dtype)
        if G.one_per_row and matrix.numel():
            assert torch.count_nonzero(matrix, dim=1).max() <= 1, "an output reads several inputs"
        if not case.per_row or len(s.mean) != len(x.mean):
            continue
        each = blocks(G, x)
        if G.alike:
            assert torch.equal(each, each[:1].expand_as(each)), "inputs have maps of their own"
        if G.thin:
            g = probe(2, 1, *s.mean.shape[1:], dtype=s.mean.dtype)
            wide = G.transpose(g.expand(2, *s.mean.shape))
            close(G.transpose(g).expand_as(wide), wide, "covectors with a batch of one")
        if G.channelwise and x.mean.ndim > 1 and s.mean.ndim > 1:
            channels = each.reshape(len(each), s.mean.shape[1], -1, x.shape[1], x.mean[0, 0].numel())
            across = channels.abs().sum((0, 2, 4))
            assert s.mean.shape[1] == x.shape[1] or not across.any()
            assert torch.count_nonzero(across - across.diag().diag()) == 0, "channels are mixed"


@every(*MAPPED)
def test_low_rank_weights_are_the_best_of_their_rank(case):
    """Against the singular values of the weight's own matrix; maps without a weight stay as they are."""
    for x, G, _ in maps(case):
        cheap = G.low_rank(1)
        if not G.weighted:
            close(dense(cheap, x.shape, F64), dense(G, x.shape, F64)) if x.mean.dtype == F64 else None
            continue
        v = probe(*x.shape).abs()
        close(cheap.square(v), G.square(v), "squares are those of the whole weight")
        g = probe(2, *G.apply(x.mean.new_zeros(1, *x.shape)).shape[1:])
        d = probe(2, *x.shape)
        close((cheap.apply(d) * g).flatten(1).sum(1), (d * cheap.transpose(g)).flatten(1).sum(1), "adjoint")
        # What is kept and what is left are orthogonal: ‖G − G₁‖² = ‖G‖² − ‖G₁‖².
        whole, part = dense(G, x.shape, F64), dense(cheap, x.shape, F64)
        if x.mean.ndim == 2:  # one position: the matrix is the weight
            close((whole - part).square().sum(), whole.square().sum() - part.square().sum(), "best")


def test_everything_listed_as_unavailable_is():
    """A list that allows more than there is would hide what goes missing later."""
    found: dict[str, set[str]] = {"rows": set(), "between": set(), "diagonal": set()}
    for case in of_kind(*MAPPED):
        for x, G, s in maps(case):
            answers = {"between": G.between(x.mean.new_ones(1, *x.shape), 1)}
            answers["rows"] = G.rows(lambda t: t, x.mean.new_zeros(0, *x.shape))
            if s.mean.shape == x.shape:
                answers["diagonal"] = G.diagonal()
            for member, answer in answers.items():
                if isinstance(answer, Unavailable):
                    found[member].add(case.name)
    for member, listed in UNAVAILABLE.items():
        for name in [name for names in listed for name in names]:
            assert any(case.startswith(name) for case in found[member]), f"{member} of {name} is known"
