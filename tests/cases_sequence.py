"""Named cases for products, norms, softmax, embeddings and indexing; see `cases`.

One more kind, `curved`: nonlinear in several entries at once. Such a rule has a Jacobian and second-order terms; its
own tests hold those against sampling, and the properties all maps share are tested with the others.
"""

from __future__ import annotations

from typing import Any

import torch
from cases import BATCH, Batched, Uncertain, c, case, linear, rand, randn, refused, x


def curved(overload: str, build: Any, label: str = "", **more: Any) -> None:
    case(overload, "curved", build, label, **more)


# Products

linear("aten.matmul.default", lambda: (x(2, 4), randn(4, 3)), "known right")
linear("aten.matmul.default", lambda: (randn(3, 2), x(2, 4)), "known left")
linear("aten.matmul.default", lambda: (x(2, 4), c(4, 3)), "known right, batched")
linear("aten.matmul.default", lambda: (c(5, 3, 2), x(1, 2, 4)), "known left, broadcast")
linear("aten.matmul.default", lambda: (x(2, 4), randn(4)), "vector")
linear("aten.matmul.default", lambda: (x(4), randn(4, 3)), "rows")
linear("aten.mm.default", lambda: (x(4), randn(4, 3)))
linear("aten.bmm.default", lambda: (x(2, 4), c(4, 3)))
linear("aten.baddbmm.default", lambda: (x(1, 3), c(2, 4), x(4, 3)), alpha=0.5, beta=2)
linear("aten.baddbmm.default", lambda: (x(2, 3), c(2, 4), c(4, 3)), "uncertain bias only")
linear("aten.einsum.default", lambda: ("bij,jk->bik", [x(2, 4), randn(4, 3)]))
linear("aten.einsum.default", lambda: ("kj, bij -> bik", [randn(3, 4), x(2, 4)]), "known first")
linear("aten.einsum.default", lambda: ("b...i,i->b...", [x(2, 3, 4), randn(4)]), "dots")
linear("aten.einsum.default", lambda: ("bi,ij", [x(2), randn(2, 4)]), "no arrow")
linear("aten.einsum.default", lambda: ("bij->bj", [x(2, 4)]), "one tensor")
curved("aten.matmul.default", lambda: (x(2, 4), x(4, 3)), "two")
curved("aten.matmul.default", lambda: (x(5, 2, 4), x(1, 4, 3)), "two, broadcast")
curved("aten.bmm.default", lambda: (x(2, 4), x(4, 3)), "two")
curved("aten.baddbmm.default", lambda: (x(2, 3), x(2, 4), x(4, 3)), "three", alpha=0.5)
curved("aten.einsum.default", lambda: ("bid,bjd->bij", [x(2, 4), x(3, 4)]), "two")
curved("aten.mul.Tensor", lambda: (x(3), x(3)), "two")
curved("aten.mul.Tensor", lambda: (x(1, 3), x(2, 1)), "two, broadcast")
refused("aten.matmul.default", lambda: (randn(2, BATCH), x(4)), "over the batch")
refused("aten.mm.default", lambda: (x(3), x(3)), "over the batch")
refused("aten.einsum.default", lambda: ("bij,bjk->bk", [x(2, 3), x(3, 4)]), "a sum of one operand")
refused("aten.einsum.default", lambda: ("bi,b,b->bi", [x(2), c(), c()]), "three tensors")
refused("aten.einsum.default", lambda: ("bii,i->bi", [x(2, 2), randn(2)]), "a diagonal")


def far(*event: int) -> Uncertain:
    """Means away from zero, for divisors."""
    shape = (BATCH, *event)
    return Uncertain(2 + rand(shape), 0.02 * rand(shape) + 0.01, 0.1 * randn(2, *shape))


curved("aten.div.Tensor", lambda: (c(3), far(3)), "by an uncertain tensor")
curved("aten.div.Tensor", lambda: (x(3), far(3)), "two")
curved("aten.div.Tensor", lambda: (x(2, 3), far(2, 1)), "two, broadcast")

# Norms

curved("aten.layer_norm.default", lambda: (x(5), [5], randn(5), randn(5), 1e-3))
curved("aten.layer_norm.default", lambda: (x(2, 3, 2), [3, 2]), "two axes, no weight")
curved("aten.rms_norm.default", lambda: (x(2, 5), [5], randn(5), 1e-3))
curved("aten.rms_norm.default", lambda: (x(5), [5]), "no weight")
curved("aten.group_norm.default", lambda: (x(4, 3), 2, randn(4), randn(4), 1e-3))
curved("aten.group_norm.default", lambda: (x(4, 2, 2), 1), "one group, no weight")
curved("aten.instance_norm.default", lambda: (x(2, 5), randn(2), randn(2), None, None, True, 0.1, 1e-3, False))
linear(
    "aten.instance_norm.default",
    lambda: (x(2, 5), randn(2), randn(2), randn(2), rand(2) + 0.2, False, 0.1, 1e-3, False),
    "running statistics",
)

# Softmax

for _name in ("softmax.int", "log_softmax.int"):
    curved(f"aten.{_name}", lambda: (x(4), -1))
    curved(f"aten.{_name}", lambda: (x(3, 2), 1), "middle")
    refused(f"aten.{_name}", lambda: (x(4), 0), "over the batch")
for _name in ("_softmax", "_log_softmax"):
    curved(f"aten.{_name}.default", lambda: (x(2, 4), -1, False))
curved("aten._safe_softmax.default", lambda: (x(2, 4), -1))

# Indexing

linear("aten.index.Tensor", lambda: (x(4, 3), [None, torch.tensor([2, 0, 2])]))
linear("aten.index.Tensor", lambda: (x(4, 3), [None, torch.tensor([2, 0]), torch.tensor([[1], [2]])]), "two axes")
linear(
    "aten.index.Tensor",
    lambda: (x(4, 3), [torch.arange(BATCH), torch.tensor([1, 3, 0])]),
    "an entry for each input",
    per_row=False,
)
refused("aten.index.Tensor", lambda: (x(4), [torch.tensor([2, 0])]), "over the batch")
refused("aten.index.Tensor", lambda: (x(4), [None, torch.tensor([True, False, True, True])]), "mask")
refused("aten.index.Tensor", lambda: (x(4, 3, 2), [None, torch.tensor([1]), None, torch.tensor([0])]), "separated")
linear("aten.gather.default", lambda: (x(4), 1, Batched(torch.tensor([[0, 0, 3], [1, 2, 1], [3, 3, 3]]))))
linear("aten.gather.default", lambda: (x(2, 4), -1, Batched(torch.tensor([[[1], [2]]]).expand(BATCH, 2, 1))), "inner")
refused("aten.gather.default", lambda: (x(4), 0, torch.zeros(1, 4, dtype=torch.long)), "over the batch")
refused("aten.embedding.default", lambda: (x(4), torch.tensor([1, 2])), "a computed table")

# Rearrangement

for _name in ("mT", "mH", "adjoint"):
    linear(f"aten.{_name}.default", lambda: (x(2, 3),))
linear("aten.movedim.intlist", lambda: (x(2, 3, 4), [1, 3], [3, -2]))
linear("aten.swapdims.default", lambda: (x(2, 3), -1, 1))
linear("aten.positive.default", lambda: (x(3),))
linear("aten.broadcast_to.default", lambda: (x(1, 2), [BATCH, 3, 2]), per_row=False)
linear("aten.roll.default", lambda: (x(4, 3), [1, -2], [1, 2]))
refused("aten.roll.default", lambda: (x(4), [1]), "through the batch")
refused("aten.roll.default", lambda: (x(4), [1], [0]), "over the batch")
linear("aten.rot90.default", lambda: (x(2, 3), 1, [1, 2]))
refused("aten.rot90.default", lambda: (x(2), 1, [0, 1]), "over the batch")
linear("aten.repeat_interleave.self_int", lambda: (x(2, 3), 2, 1))
refused("aten.repeat_interleave.self_int", lambda: (x(2), 2), "flattened")
linear("aten.tile.default", lambda: (x(2, 3), [2, 2]))
refused("aten.tile.default", lambda: (x(2), [2, 1]), "over the batch")
for _name in ("triu", "tril"):
    linear(f"aten.{_name}.default", lambda: (x(3, 4), 1))
    refused(f"aten.{_name}.default", lambda: (x(3),), "over the batch")
linear("aten.cumsum.default", lambda: (x(4, 2), 1))
refused("aten.cumsum.default", lambda: (x(4), 0), "over the batch")
linear("aten.diff.default", lambda: (x(4, 2), 1, -2))
refused("aten.diff.default", lambda: (x(4), 2), "second order")
linear("aten.diagonal.default", lambda: (x(3, 4), 1, 1, 2))
refused("aten.diagonal.default", lambda: (x(3),), "over the batch")
linear("aten.diag_embed.default", lambda: (x(2, 3),))
linear("aten.unfold.default", lambda: (x(2, 6), 2, 3, 2), "overlapping")
linear("aten.unfold.default", lambda: (x(6, 2), 1, 2, 3), "apart")
linear("aten.tensor_split.sections", lambda: (x(5), 2, 1))
linear("aten.tensor_split.indices", lambda: (x(5, 2), [1, -1], 1))
linear("aten.hstack.default", lambda: ([x(2), c(1), x(3)],))
linear("aten.broadcast_tensors.default", lambda: ([x(1, 3), c(1, 3), x(2, 1)],))
linear("aten.scatter_add.default", lambda: (x(3), 1, Batched(torch.tensor([[0, 0], [1, 2], [2, 2]])), x(2)))
groups = Batched(torch.tensor([[0, 0], [1, 2], [2, 2]]))
curved("aten.scatter_reduce.two", lambda: (c(3), 1, groups, x(2), "amax"), "largest", include_self=False)
curved("aten.scatter_reduce.two", lambda: (c(3), 1, groups, x(2), "amin"), "smallest", include_self=False)
linear("aten.scatter_reduce.two", lambda: (c(3), 1, groups, x(2), "sum"), "sum")
refused("aten.scatter_reduce.two", lambda: (c(3), 1, groups, x(2), "prod"), "prod")
refused("aten.scatter_reduce.two", lambda: (x(3), 1, groups, x(2), "amax"), "an uncertain start")
linear("aten.scatter_add.default", lambda: (c(3), 1, Batched(torch.tensor([[0, 0], [1, 2], [2, 2]])), x(2)), "known")
linear("aten.index_add.default", lambda: (x(3), 1, torch.tensor([2, 0, 2, 1]), x(4)), alpha=0.5)
linear("aten.index_add.default", lambda: (x(3, 2), -2, torch.tensor([2, 0]), c(2, 2)), "known")

# Curved reductions, and a parameter

curved("aten.logsumexp.default", lambda: (x(4), [-1]))
curved("aten.logsumexp.default", lambda: (x(3, 2), [1], True), "kept")
refused("aten.logsumexp.default", lambda: (x(3, 2), [1, 2]), "two axes")
curved("aten.var.dim", lambda: (x(3, 4), [1]))
curved("aten.var.dim", lambda: (x(4), [-1], False, True), "biased, kept")
curved("aten.var.correction", lambda: (x(2, 5), [-1]), correction=0)
refused("aten.var.dim", lambda: (x(4), [0]), "over the batch")
refused("favour.drawn.default", lambda: (x(4), c(1)), "a computed tensor")
