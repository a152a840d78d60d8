"""What holds for every network whatever its weights: the contract of a predictor and of what its rules made.

    of beliefs      finite, PSD, symmetric, the same in every call, alone and in any order of the batch
    of maps         ⟨Gδ, g⟩ = ⟨δ, Gᵀg⟩; powers and products of entries where they are told, column by column
    of noises       what products, Gram matrices, diagonals and columns say of N is one PSD covariance

None of it needs a reference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import favour
from favour.methods.forward import unexplained
from favour.surrogate import LinearMap, Noise, Surrogate

ROUNDING = 1e-9  # relative, in double precision
SINGLE = 1e-4  # in single precision, where an operation's result is
PLACES = 6  # columns of a map that are looked at


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest number."""
    size = max(float(a.abs().max()), float(b.abs().max()), 1e-300) if a.numel() else 1.0
    return float((a - b).abs().max()) / size if a.numel() else 0.0


def rounding(*tensors: Tensor) -> float:
    """How far apart equal numbers may be."""
    return ROUNDING if all(t.dtype == torch.float64 for t in tensors) else SINGLE


def beliefs_of(answer: Any) -> list[favour.Belief]:
    """All beliefs that a predictor answers with."""
    answers = answer if isinstance(answer, (tuple, list)) else [answer]
    return [one for one in answers if isinstance(one, favour.Belief)]


def violations(predict: favour.Predictor, *args: Any, lone: Collection[int] | None = None) -> list[str]:
    """Every promise of a predictor's beliefs that is broken, in a sentence each; `lone`: rows to try alone, or all."""
    count = len(args[0])
    lone = range(count) if lone is None else lone
    backwards = torch.arange(count - 1, -1, -1)
    with torch.no_grad():
        first, again = beliefs_of(predict(*args)), beliefs_of(predict(*args))
        alone = [beliefs_of(predict(*_rows(args, torch.tensor([i])))) for i in lone]
        turned = beliefs_of(predict(*_rows(args, backwards)))
    found: list[str] = []
    for k, belief in enumerate(first):
        found += _of_belief(belief, again[k], dict(zip(lone, [one[k] for one in alone], strict=True)), turned[k])
    return found


def _rows(args: Sequence[Any], rows: Tensor) -> list[Any]:
    return [a[rows] for a in args]


def _of_belief(
    belief: favour.Belief, again: favour.Belief, alone: dict[int, favour.Belief], turned: favour.Belief
) -> list[str]:
    matrix = _matrix(belief)
    allowed = rounding(matrix)
    if not bool(belief.mean.isfinite().all() and matrix.isfinite().all()):
        return ["mean or covariance are not finite"]
    if not matrix.numel():
        return []
    found = []
    if not torch.equal(belief.mean, again.mean) or not torch.equal(matrix, _matrix(again)):
        found.append("a second call gives another answer")
    least = torch.linalg.eigvalsh(matrix).amin(-1)
    size = matrix.diagonal(dim1=1, dim2=2).amax(-1)
    if bool((least < -allowed * size).any()):
        worst = float((least / size).min())
        found.append(f"the covariance is not PSD: an eigenvalue of {worst:.2g} of the largest variance")
    if apart(matrix, matrix.mT) > allowed:
        found.append("the covariance is not symmetric")
    count = len(matrix)
    if apart(belief.variance.reshape(count, -1), matrix.diagonal(dim1=1, dim2=2)) > allowed:
        found.append("the variance is not the covariance's diagonal")
    for name, rows in (
        ("a batch of one differs from its row", alone),
        ("the order of the batch matters", {i: turned[count - 1 - i : count - i] for i in range(count)}),
    ):
        gaps = [max(apart(row.mean[0], belief.mean[i]), apart(_matrix(row)[0], matrix[i])) for i, row in rows.items()]
        if max(gaps) > 100 * allowed:
            found.append(f"{name}: by {max(gaps):.2g}")
    return found


def _matrix(belief: favour.Belief) -> Tensor:
    n = belief.event_shape.numel()
    return belief.covariance_matrix.reshape(len(belief.mean), n, n)


# ------------------------------------------------------------------------------- what rules made


def surrogates(predict: favour.Predictor, *args: Any) -> Iterator[tuple[str, Surrogate]]:
    """Every surrogate of a prediction, with what it is of."""
    program = predict.program
    bound, method = program.bind(program.inputs(args, {}))
    bound.watched = True
    method.run(bound)
    for entry in bound.sweep.tape if bound.sweep is not None else ():
        yield f"{entry.step.node.target} at {entry.step.node.name}", entry.surrogate


def broken_rules(predict: favour.Predictor, *args: Any, seed: int = 0) -> list[str]:
    """Every promise of a map or a noise that is broken."""
    generator = torch.Generator().manual_seed(seed)
    found: list[str] = []
    with torch.no_grad():
        for place, surrogate in surrogates(predict, *args):
            shape = surrogate.mean.shape
            for x, G in surrogate.maps:
                found += [f"{place}: {what}" for what in _of_map(G, x.mean, surrogate.mean, generator)]
            for noise in unexplained(surrogate.noises):
                found += [f"{place}: {what}" for what in _of_noise(noise, shape, surrogate.mean, generator)]
    return found


def _of_map(G: LinearMap, x: Tensor, y: Tensor, generator: torch.Generator) -> list[str]:
    found, allowed = [], rounding(x, y)
    d = torch.randn(3, *x.shape, generator=generator, dtype=x.dtype)
    g = torch.randn(3, *y.shape, generator=generator, dtype=y.dtype)
    forth, back = (G.apply(d) * g).flatten(1).sum(1), (d * G.transpose(g)).flatten(1).sum(1)
    size = (G.apply(d).abs() * g.abs()).flatten(1).sum(1) + (d.abs() * G.transpose(g).abs()).flatten(1).sum(1)
    if bool(((forth - back).abs() > allowed * size).any()):
        found.append(f"the transpose of {G} is not its transpose")
    e = _columns(x, generator)
    column = G.apply(e)
    inner = torch.rand(x.shape, generator=generator, dtype=x.dtype) + 0.5
    other = G.scaled_before(inner)
    theirs = other.apply(e)
    for name, made, expected in (
        ("square", G.power(2), column**2),
        ("third power", G.power(3), column**3),
        ("product with another", G.hadamard(other), column * theirs),
    ):
        if isinstance(made, LinearMap) and apart(made.apply(e), expected) > allowed:
            found.append(f"the {name} of {G} is not that of its entries")
    if isinstance(G.power(2), LinearMap):
        v = torch.rand(x.shape, generator=generator, dtype=x.dtype)
        if apart(G.square(v), G.power(2).apply(v.unsqueeze(0)).squeeze(0)) > allowed:
            found.append(f"variances through {G} do not go by the squares of its entries")
    return found


def _columns(x: Tensor, generator: torch.Generator) -> Tensor:
    """Unit deviations at a few places, the same in every row: rows do not meet."""
    n = x[0].numel()
    places = torch.randperm(n, generator=generator)[:PLACES]
    e = torch.zeros(len(places), len(x), n, dtype=x.dtype)
    e[torch.arange(len(places)), :, places] = 1.0
    return e.reshape(len(places), *x.shape)


def _of_noise(noise: Noise, shape: torch.Size, y: Tensor, generator: torch.Generator) -> list[str]:
    found, allowed = [], rounding(y)
    g = torch.randn(4, *shape, generator=generator, dtype=y.dtype)
    gram, product, diag = noise.gram(g), noise.matmul(g), noise.diag().expand(shape)
    seen = torch.einsum("fbn,gbn->bfg", g.reshape(4, len(y), -1), product.reshape(4, len(y), -1))
    if apart(gram, seen) > allowed:
        found.append("a noise's Gram matrix is not that of its products")
    if apart(gram, gram.mT) > allowed or _negative(gram, allowed):
        found.append("a noise is not PSD")
    e = _columns(y, generator)
    if apart((noise.matmul(e) * e).sum(0), diag * e.sum(0)) > allowed or bool((diag < 0).any()):
        found.append("a noise's variances are not its diagonal")
    return found


def _negative(matrix: Tensor, allowed: float) -> bool:
    values = torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT))
    return bool((values[..., 0] < -allowed * values[..., -1].clamp(min=1e-300)).any())
