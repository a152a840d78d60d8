"""Operations that are written out: the same numbers as torch's, and what their rules then say against samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from calls import close
from torch import nn

import favour
from favour.passes.capture import capture

F64 = torch.float64
W = torch.randn(6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([0, 1, 2, 0, 1, 2])


def sums(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


OPERATIONS = {
    "glu": lambda x: F.glu(x, -1),
    "addcmul": lambda x: torch.addcmul(x, x, x.flip(1), value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x.flip(1), torch.full_like(x, 2.0), value=0.5),
    "lerp": lambda x: torch.lerp(x, x.flip(1), 0.3),
    "lerp, tensor": lambda x: torch.lerp(x, x.flip(1), torch.linspace(0, 1, 6, dtype=F64)),
    "std": lambda x: x.std(-1),
    "std, biased": lambda x: x.std(1, correction=0, keepdim=True),
    "norm": lambda x: x.norm(dim=-1),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=1),
    "norm, absolute": lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize, middle": lambda x: F.normalize(x, dim=1),
    "cosine": lambda x: F.cosine_similarity(x[:, 0], x[:, 1]),
    "pairwise distance": lambda x: F.pairwise_distance(x[:, 0], x[:, 1]),
    "cdist": lambda x: torch.cdist(x, x[:, :2] + 1),
    "matmul": lambda x: torch.linalg.matmul(x, W),
    "vecdot": lambda x: torch.linalg.vecdot(x[:, 0], x[:, 1]),
    "inner": lambda x: torch.inner(x, W.T),
    "tensordot": lambda x: torch.tensordot(x, W, dims=1),
    "three tensors": lambda x: torch.einsum("bid,de,bje->bij", x, W @ W.T, x.flip(1)),
    "moveaxis": lambda x: x.moveaxis(1, 2),
    "fliplr": lambda x: x.fliplr(),
    "RMS norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "RMS norm by division": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5),
    "layer norm by hand": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt(),
    "channel norm by hand": lambda x: (
        (x - x.mean(1, True)) / ((x - x.mean(1, True)).pow(2).mean(1, True) + 1e-5).sqrt()
    ),
    "softmax by hand": sums,
    "mT": lambda x: x.mT @ x,
    "windows": lambda x: x.unfold(2, 3, 1).cumsum(-1).diff(dim=1),
    "diagonals": lambda x: torch.diag_embed(x.diagonal(dim1=1, dim2=2)).triu() + x[:, :5, :5].tril(),
    "rolled": lambda x: x.roll(1, 2).tile(1, 2, 1).repeat_interleave(2, 2).tensor_split(3, 2)[1],
    "added up": lambda x: torch.zeros(x.shape[0], 5, 3, dtype=F64).index_add(2, PLACES, x),
}


class Behind(nn.Module):
    """An operation on a tensor with Gaussian noise."""

    def __init__(self, operation):
        super().__init__()
        self.shift, self.operation = nn.Parameter(torch.zeros(1, 5, 6, dtype=F64)), operation

    def forward(self, x):
        return self.operation(x + self.shift)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_torch_and_agrees_with_sampling(name):
    torch.manual_seed(0)
    model, x = Behind(OPERATIONS[name]), torch.randn(3, 5, 6, dtype=F64)
    posterior = {"shift": torch.full((1, 5, 6), 0.1**2, dtype=F64)}
    close(favour.compile(model, x)(x).mean, OPERATIONS[name](x))
    predict = favour.compile(model, x, posterior=posterior, method="adjoint", rank=30)
    belief = predict(x)
    draws = predict.sample(x, n=4000, generator=torch.Generator().manual_seed(1)).detach()
    spread = draws.std(0).clamp_min(1e-3 * draws.std())
    # One standard error of a mean of 4,000 draws is 0.016 of their spread; the largest of 200 is 3.5 of them.
    assert ((belief.mean - draws.mean(0)).abs() / spread).max() < 0.12
    assert abs(belief.variance.sum() / draws.var(0).sum() - 1) < 0.06


@pytest.mark.parametrize("name", [n for n in OPERATIONS if "norm by" in n])
def test_norms_by_hand_become_the_operation(name):
    model = Behind(OPERATIONS[name])
    targets = [str(n.target) for n in capture(model, torch.randn(3, 5, 6, dtype=F64)).nodes]
    assert any("rms_norm" in t or "layer_norm" in t for t in targets), targets


def test_what_only_looks_like_a_norm_stays():
    other = torch.randn(5, 6, dtype=F64)
    model = Behind(lambda x: x * torch.rsqrt((x + other).pow(2).mean(-1, keepdim=True) + 1e-5))
    targets = [
        str(n.target)
        for n in capture(
            model,
            torch.randn(3, 5, 6, dtype=F64),
        ).nodes
    ]
    assert not any("rms_norm" in t for t in targets)


@pytest.mark.parametrize("twice", [False, True])
def test_a_row_is_at_no_distance_from_itself(twice):
    """Whether the tensor is one, or made by two views."""

    def distances(x):
        return torch.cdist(x.view(-1, 5, 6), x.view(-1, 5, 6)) if twice else torch.cdist(x, x)

    x = torch.randn(3, 5, 6, dtype=F64)
    posterior = {"shift": torch.full((1, 5, 6), 0.1**2, dtype=F64)}
    belief = favour.compile(Behind(distances), x, posterior=posterior, method="adjoint")(x)
    for part in (belief.mean, belief.variance):
        assert torch.equal(part.diagonal(dim1=1, dim2=2), torch.zeros(3, 5, dtype=F64))
    close((belief.mean > 0).sum(), torch.tensor(3 * 20))
