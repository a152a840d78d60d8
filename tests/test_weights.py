"""Posteriors on whatever reads a weight, and on weights that code computes first, against draws by torch alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import favour

N = 20_000
SPREAD = 0.02  # standard deviation of every weight's draws: second-order effects are below the draws' own error
SHARED = ("tied", "one weight in two layers")  # uses whose covariance sweeps of variances do not know


class Net(nn.Module):
    """A first layer of four outputs, spelled by a case, then a nonlinearity and a known layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.W, self.A, self.B = (nn.Parameter(torch.randn(s)) for s in ((4, 3), (2, 3), (4, 2)))
        self.V, self.K, self.e = (nn.Parameter(torch.randn(s)) for s in ((3, 4), (2, 1, 2), (4,)))
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm, self.prelu, self.bilinear = nn.LayerNorm(4), nn.PReLU(4), nn.Bilinear(3, 3, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.case = ""

    def hidden(self, x: Tensor) -> Tensor:
        return CASES[self.case][1](self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x).tanh())


CASES = {
    "prelu": (["prelu.weight"], lambda m, x: m.prelu(m.first(x))),
    "prelu behind a layer": (["prelu.weight", "first.weight"], lambda m, x: m.prelu(m.first(x))),
    "bilinear": (["bilinear.weight", "bilinear.bias"], lambda m, x: m.bilinear(x, x.flip(1))),
    "weight norm": (
        ["normed.parametrizations.weight.original0", "normed.parametrizations.weight.original1"],
        lambda m, x: m.normed(x),
    ),
    "W @ x": (["W"], lambda m, x: (m.W @ x[:, :, None]).squeeze(-1)),
    "x @ V": (["V"], lambda m, x: x @ m.V),
    "einsum": (["V"], lambda m, x: torch.einsum("bi,io->bo", x, m.V)),
    "softplus": (["W"], lambda m, x: F.linear(x, F.softplus(m.W))),
    "softmax": (["W"], lambda m, x: F.linear(x, m.W.softmax(-1))),
    "exp of scales": (["e"], lambda m, x: m.first(x) * m.e.exp()),
    "scaled rows": (["W", "e"], lambda m, x: F.linear(x, m.W * m.e.sigmoid()[:, None])),
    "transposed": (["V"], lambda m, x: F.linear(x, m.V.t())),
    "low-rank sum": (["A", "B"], lambda m, x: F.linear(x, m.W + 0.5 * m.B @ m.A)),
    "low-rank sum, base too": (["A", "B", "W"], lambda m, x: F.linear(x, m.W + 0.5 * m.B @ m.A)),
    "kernel": (["K"], lambda m, x: F.conv1d(x[:, None], F.softplus(m.K)).flatten(1)),
    "layer norm": (["norm.weight", "norm.bias"], lambda m, x: m.norm(m.first(x))),
    "tied": (["W"], lambda m, x: F.linear(F.linear(x, m.W).tanh() @ m.W, m.first.weight)),
    "one weight in two layers": (["W"], lambda m, x: F.linear(x, m.W.exp()) + F.linear(x.flip(1), m.W.exp())),
}


def posterior_of(
    model: nn.Module, names: list[str], kind: str
) -> tuple[dict[str, favour.Posterior], dict[str, Tensor]]:
    """Posteriors by name, and roots R with RRᵀ their covariance."""
    given, roots = {}, {}
    parameters = dict(model.named_parameters())
    for name in names:
        p = parameters[name]
        root = SPREAD * torch.eye(p.numel(), dtype=p.dtype)
        if kind == "full":
            root = root + SPREAD * torch.randn(p.numel(), p.numel(), dtype=p.dtype) / math.sqrt(p.numel())
        roots[name] = root
        variance = torch.full_like(p, SPREAD**2)
        given[name] = variance.detach() if kind == "diagonal" else favour.Full(root @ root.T, tuple(p.shape))
    return given, roots


def sampled(model: nn.Module, x: Tensor, roots: dict[str, Tensor]) -> Tensor:
    """Outputs under draws of the weights, (n, batch, 2)."""
    means = {name: p.detach() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    draws = {n: (torch.randn(N, len(R), dtype=R.dtype) @ R.T).reshape(N, *means[n].shape) for n, R in roots.items()}

    def run(deviations):
        moved = {**means, **{name: means[name] + d for name, d in deviations.items()}}
        return torch.func.functional_call(model, moved, (x,))

    with torch.no_grad():
        return torch.func.vmap(run)(draws)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:An output with one or more")  # torch's vmap
@pytest.mark.parametrize("kind", ["diagonal", "full"])
@pytest.mark.parametrize("case", CASES)
def test_a_posterior_where_a_weight_is_read(case, kind):
    """Mean within 5 standard errors and .05 standard deviations, covariance within 5 times the draws' error and .03."""
    model = Net().double().eval()
    model.case = case
    torch.manual_seed(2)
    x = torch.randn(3, 3, dtype=torch.float64)
    given, roots = posterior_of(model, CASES[case][0], kind)
    z = sampled(model, x, roots)
    mean, centred = z.mean(0), z - z.mean(0)
    covariance = torch.einsum("nbi,nbj->bij", centred, centred) / (N - 1)
    method = "full" if case in SHARED else "adjoint"
    predict = favour.compile(model, x, posterior=given, method=method, check=False)
    with torch.no_grad():
        belief = predict(x)
    assert ((belief.mean - mean).abs() / z.std(0)).max() < 5 / math.sqrt(N) + 0.05
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    size = covariance.flatten(1).norm(dim=1)
    error = ((trace.square() + size.square()) / N).sqrt()  # of the draws' covariance, in the Frobenius norm
    gap = (belief.covariance_matrix - covariance).flatten(1).norm(dim=1)
    assert (gap < 5 * error + 0.03 * size).all()
