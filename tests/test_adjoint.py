"""The reverse sweep against `full`, and what is built on it: directions, attribution, memory, precision, auto."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import favour
from favour.errors import InvalidValue
from favour.methods.directions import softmax_directions
from favour.nn import BayesLinear, FullBayesLinear, RowBayesLinear

F64 = torch.float64
# At least as large as every layer here: the forward sweep is then exact, so that `full` and `adjoint` consult the same
# second moments.
EXACT = 10_000


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.a(x)))
        x = x + self.drop(torch.tanh(self.b(x)))
        return self.head(x + torch.relu(self.b(x)))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 5)
        self.head, self.drop = nn.Linear(8, 3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        joined = torch.cat([torch.relu(self.left(h)), self.drop(self.right(h)).sigmoid()], dim=1)
        return self.head(joined) + h[:, :3]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b2 = nn.Linear(6, 6)
        self.b2.weight = self.b.weight
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        return self.head(torch.relu(self.b2(torch.relu(self.b(h)))))


class TiedBayes(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 6), layer(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        return self.head(torch.relu(self.b(torch.relu(self.b(h)))) + torch.tanh(self.b(0.5 * h)))


def sequential() -> nn.Module:
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 7), nn.GELU(), nn.Dropout(0.1), nn.Linear(7, 3)]
    return nn.Sequential(*layers)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequential,
    "residual": Residual,
    "branches": Branches,
    "tied weights": Tied,
    "mean-field layer used three times": lambda: TiedBayes(lambda n, m: BayesLinear(n, m, initial_std=0.1)),
    "row layer used three times": lambda: TiedBayes(lambda n, m: RowBayesLinear(n, m, initial_std=0.1)),
    "full layer used three times": lambda: TiedBayes(lambda n, m: FullBayesLinear(n, m, initial_std=0.1)),
    "mean-field": lambda: nn.Sequential(BayesLinear(4, 6), nn.ReLU(), BayesLinear(6, 3)),
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().to(F64).eval().requires_grad_(False)


def inputs(n: int = 5) -> Tensor:
    return torch.randn(n, 4, dtype=F64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NETWORKS)
def test_adjoint_equals_full(name: str) -> None:
    model, x = network(name), inputs()
    full = favour.compile(model, x, method="full")(x)
    reverse = favour.compile(model, x, method="adjoint", rank=EXACT)(x)
    torch.testing.assert_close(reverse.mean, full.mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(reverse.covariance_matrix, full.covariance_matrix, rtol=1e-9, atol=1e-12)


def test_adjoint_equals_full_for_uncertain_input() -> None:
    model = network("residual")
    g = torch.Generator().manual_seed(2)
    mean, diag = torch.randn(3, 4, dtype=F64, generator=g), torch.rand(3, 4, dtype=F64, generator=g)
    belief = favour.Belief(mean, diag, torch.randn(2, 3, 4, dtype=F64, generator=g))
    full = favour.compile(model, mean, method="full")(belief)
    reverse = favour.compile(model, mean, method="adjoint", rank=EXACT)(belief)
    torch.testing.assert_close(reverse.covariance_matrix, full.covariance_matrix, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("rank", [0, 2])
def test_adjoint_is_positive_semidefinite(name: str, rank: int) -> None:
    x = inputs(20)
    matrix = favour.compile(network(name), x, method="adjoint", rank=rank)(x).covariance_matrix
    torch.testing.assert_close(matrix, matrix.mT)
    assert torch.linalg.eigvalsh(matrix).min() >= -1e-12 * matrix.abs().max()


# ------------------------------------------------------------------------------------------------ directions


def test_softmax_directions_match_eigenvectors() -> None:
    logits = 2 * torch.randn(30, 12, dtype=F64, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    J = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    for k in (1, 3, 6):
        V = softmax_directions(logits, k, iterations=60)
        captured = torch.einsum("kbi,bij,kbj->b", V, J, V)
        best = torch.linalg.eigvalsh(J)[:, -k:].sum(1)
        torch.testing.assert_close(captured, best, rtol=2e-2, atol=0)
        few = softmax_directions(logits, k)
        assert (torch.einsum("kbi,bij,kbj->b", few, J, few) / best).mean() > 0.95
        gram = torch.einsum("kbi,lbi->bkl", few, few)
        torch.testing.assert_close(gram, torch.eye(k, dtype=F64).expand_as(gram), rtol=0, atol=1e-10)


def test_softmax_directions_of_a_certain_class_stay_orthonormal() -> None:
    logits = torch.tensor([[200.0, 0.0, -5.0, -9.0], [0.0, 0.0, 0.0, 0.0]])
    V = softmax_directions(logits, 3)
    gram = torch.einsum("kbi,lbi->bkl", V, V)
    torch.testing.assert_close(gram, torch.eye(3).expand_as(gram), rtol=0, atol=1e-5)


def test_directions_are_exact_where_they_look() -> None:
    model, x = network("residual"), inputs()
    whole = favour.compile(model, x, method="adjoint")(x)
    part = favour.compile(model, x, directions=2, secant=False)(x)
    Q = part.directions
    assert Q is not None and Q.shape == (2, 5, 3)
    seen = torch.einsum("kbi,bij,lbj->bkl", Q, part.covariance_matrix, Q)
    exact = torch.einsum("kbi,bij,lbj->bkl", Q, whole.covariance_matrix, Q)
    torch.testing.assert_close(seen, exact, rtol=1e-10, atol=1e-12)


def _many_scores(bayesian: bool) -> tuple[nn.Module, Tensor, dict[str, Tensor] | None]:
    """40 class scores whose last layer has a common shift, and a posterior for that layer."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 15), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(15, 40)).double().eval().requires_grad_(False)
    model[-1].weight += 0.5 * torch.rand(15, dtype=torch.float64)
    posterior = {"6.weight": 0.1 * torch.rand(40, 15, dtype=torch.float64)} if bayesian else None
    return model, torch.randn(3, 6, dtype=torch.float64), posterior


@pytest.mark.parametrize("bayesian", [False, True])
def test_auto_with_many_scores_covers_the_common_shift(bayesian: bool) -> None:
    model, x, posterior = _many_scores(bayesian)
    belief = favour.compile(model, x, posterior=posterior, task="classification", secant=False)(x)
    whole = favour.compile(model, x, method="adjoint", posterior=posterior)(x).covariance_matrix
    Q = belief.directions
    assert Q is not None and Q.shape == (9, 3, 40)
    # M by dense algebra from the marginals of the last hidden layer.
    hidden = favour.compile(model[:6], x, method="diag")(x)
    W = model[6].weight
    M = W @ torch.diag_embed(hidden.variance) @ W.T
    if posterior is not None:
        M = M + torch.diag_embed((hidden.variance + hidden.mean.square()) @ posterior["6.weight"].T)
    w = M.sum(-1)
    rest = M.diagonal(dim1=-2, dim2=-1) - w.square() / w.sum(-1, keepdim=True)
    assert bool((rest >= 0).all())
    q = Q.permute(1, 2, 0)
    torch.testing.assert_close(q.mT @ q, torch.eye(9, dtype=q.dtype).expand(3, 9, 9))
    P = torch.eye(40, dtype=q.dtype) - q @ q.mT
    torch.testing.assert_close(belief.covariance_matrix, q @ (q.mT @ whole @ q) @ q.mT + P @ torch.diag_embed(rest) @ P)
    missed = P @ (w / w.norm(dim=-1, keepdim=True)).unsqueeze(-1)  # all of w but the share of 1 that keeps zeros apart
    assert float(missed.norm(dim=(-2, -1)).max()) < 2e-3
    softmax_only = favour.compile(model, x, posterior=posterior, directions=9, secant=False)(x).covariance_matrix
    assert bool(
        ((belief.covariance_matrix - whole).norm(dim=(-2, -1)) < (softmax_only - whole).norm(dim=(-2, -1))).all()
    )


def test_auto_with_many_scores_behind_something_else_has_no_shift() -> None:
    model, x, _ = _many_scores(False)
    scores = nn.Sequential(model, nn.LogSoftmax(-1))
    belief = favour.compile(scores, x, task="classification")(x)
    torch.testing.assert_close(belief.covariance_matrix, favour.compile(scores, x, directions=9)(x).covariance_matrix)


def test_auto_with_many_scores_of_a_layer_without_any_shift() -> None:
    model, x, _ = _many_scores(False)
    model[-1].weight.zero_()
    belief = favour.compile(model, x, task="classification")(x)
    torch.testing.assert_close(belief.covariance_matrix, torch.zeros(3, 40, 40, dtype=torch.float64))


def test_auto_with_many_scores_keeps_columns_and_compiles() -> None:
    model, x, _ = _many_scores(False)
    predict = favour.compile(model, x, rank=3, task="classification")
    belief = predict(x)
    assert belief.directions is not None and belief.directions.shape[0] == 9
    traced = torch.compile(predict, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(traced.covariance_matrix, belief.covariance_matrix)


@pytest.mark.parametrize("method", ["adjoint", "diag"])
def test_a_compiled_batch_of_one_equals_an_eager_one(method: str) -> None:
    model, x, _ = _many_scores(False)
    predict = favour.compile(model, x, method=method)
    traced = torch.compile(predict, fullgraph=True, dynamic=False, backend="aot_eager")(x[:1])
    torch.testing.assert_close(traced.covariance_matrix, predict(x).covariance_matrix[:1])


def test_a_mean_over_places_compiles() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.drop(self.a(x)).mean(1))

    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    predict = favour.compile(Pooled().double(), x)
    traced = torch.compile(predict, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(traced.covariance_matrix, predict(x).covariance_matrix)


def test_weight_rank_sends_covectors_through_short_weights() -> None:
    """Σ = J_q N J_qᵀ, N the variances behind the dropout and J_q the rest of the network with rank-q weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.Dropout(0.3), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten(), nn.Linear(24, 5)]
    model = nn.Sequential(*layers).double().eval().requires_grad_(False)
    x = torch.randn(3, 2, 7, 7, dtype=torch.float64)
    noise = favour.compile(model[:2], x, method="diag")(x).variance.flatten(1)

    def short(weight: Tensor, q: int) -> Tensor:
        U, s, V = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        return (U[:, :q] * s[:q] @ V[:q]).reshape(weight.shape)

    basis = torch.eye(100, dtype=torch.float64).reshape(100, 4, 5, 5)
    for q in (2, 3, 5):
        rows = torch.nn.functional.conv2d(basis, short(model[2].weight, q), stride=2).flatten(1)  # (100, 24)
        J = short(model[4].weight, q) @ rows.T
        belief = favour.compile(model, x, method="adjoint", weight_rank=q)(x)
        torch.testing.assert_close(belief.covariance_matrix, J @ torch.diag_embed(noise) @ J.T)
        torch.testing.assert_close(belief.mean, model(x))
    whole = favour.compile(model, x, method="adjoint")(x)
    long = favour.compile(model, x, method="adjoint", weight_rank=6)(x)
    torch.testing.assert_close(long.covariance_matrix, whole.covariance_matrix)


def test_directions_given_as_contrast() -> None:
    model, x = network("residual"), inputs()
    contrast = torch.tensor([[1.0, -1.0, 0.0]], dtype=F64)
    belief = favour.compile(model, x, directions=contrast, secant=False)(x)
    whole = favour.compile(model, x, method="adjoint")(x).covariance_matrix
    variance = torch.einsum("ki,bij,kj->b", contrast, whole, contrast)
    torch.testing.assert_close(torch.einsum("ki,bij,kj->b", contrast, belief.covariance_matrix, contrast), variance)


def test_directions_beyond_the_outputs_are_all_outputs() -> None:
    model, x = network("residual"), inputs()
    whole = favour.compile(model, x, method="adjoint")(x).covariance_matrix
    every = favour.compile(model, x, directions=9, secant=False)(x).covariance_matrix
    torch.testing.assert_close(every, whole)


@pytest.mark.parametrize(
    ("directions", "error"),
    [
        (torch.ones(1, 7), ValueError),
        (torch.ones(2, 3), ValueError),
        (0, ValueError),
        (1.5, TypeError),
    ],
)
def test_directions_bad(directions: object, error: type[Exception]) -> None:
    x = inputs()
    with pytest.raises(error) as caught:
        favour.compile(network("residual"), x, directions=directions)
    assert isinstance(caught.value, favour.FavourError) and "directions" in str(caught.value)


# ----------------------------------------------------------------------------------------------- attribution


def test_attribution_adds_up_to_the_variance() -> None:
    model, x = network("branches"), inputs()
    predict = favour.compile(model, x, method="adjoint")
    parts = predict.attribute(x)
    torch.testing.assert_close(parts.variance, predict(x).variance)
    assert all(bool((share >= 0).all()) for share in parts.sources.values())
    assert "drop" in parts.sources
    assert sum(parts.fractions().values()) == pytest.approx(1)


def test_attribution_is_what_silencing_the_others_leaves() -> None:
    """In a linear network the sources do not interact: each one's share is its variance alone, to first order in p."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 2)).to(F64)
    x = inputs()
    shares = favour.compile(model, x, method="adjoint").attribute(x).sources
    alone = favour.compile(model, x, method="adjoint", dropout={"3": 0})(x).variance
    torch.testing.assert_close(shares["1"], alone)


def test_attribution_names_parameters() -> None:
    model, x = network("mean-field"), inputs()
    sources = favour.compile(model, x).attribute(x).sources
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} <= set(sources)


def test_attribution_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    x = inputs()
    parts = favour.compile(network("branches"), x).attribute(x)
    ax = parts.plot(row=0, output=1, most=2)
    assert len(ax.patches) == 3 and ax.get_xlabel()
    widths = [patch.get_width() for patch in ax.patches]
    assert sum(widths) == pytest.approx(100)


# ---------------------------------------------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """Bytes of tensor storage alive at the worst moment, counted from what operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen and storage._cdata not in given:  # not a view of a weight
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result


def wide() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 300), nn.ReLU(), nn.Dropout(0.2)]
    for _ in range(3):
        layers += [nn.Linear(300, 300), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(300, 10)).eval().requires_grad_(False)


SWEEPS = [
    {"method": "adjoint"},
    {"method": "adjoint", "rank": 4},
    {"method": "adjoint", "directions": 3},
    {"method": "dplr", "rank": 2},
    {"method": "dplr", "rank": 8},
    {"method": "diag"},
]


@pytest.mark.parametrize("settings", SWEEPS)
@pytest.mark.parametrize("budget", [2**20, 8 * 2**20])
def test_memory_stays_within_the_budget(settings: dict, budget: int) -> None:
    model, x = wide(), torch.randn(512, 4)
    free = favour.compile(model, x[:2], **settings)(x)
    predict = favour.compile(model, x[:2], memory=budget, **settings)
    with Peak() as peak:
        belief = predict(x)
    results = 512 * (10 + 100) * 4 * 3  # the beliefs, in slices and joined
    assert peak.most <= budget + results
    torch.testing.assert_close(belief.covariance_matrix, free.covariance_matrix, rtol=1e-4, atol=1e-6)


def test_a_certain_trunk_is_not_kept() -> None:
    """Before the first noise, a pass holds what the network's own would."""
    torch.manual_seed(0)
    trunk = [layer for _ in range(12) for layer in (nn.Linear(200, 200), nn.Tanh())]
    model = nn.Sequential(*trunk, nn.Linear(200, 8), nn.Dropout(0.2), nn.Linear(8, 2)).eval().requires_grad_(False)
    x = torch.randn(512, 200)
    predict = favour.compile(model, x[:2], method="adjoint")
    predict(x)  # what is kept between calls
    with torch.no_grad(), Peak() as plain:
        model(x)
    with Peak() as peak:
        predict(x)
    assert peak.most <= 1.3 * plain.most


def test_what_the_reverse_sweep_has_read_goes() -> None:
    """Many covectors at the wide first layers meet no tape of the others any more."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(300, 300), nn.Dropout(0.2))]
    model = nn.Sequential(*layers, nn.Linear(300, 4)).eval().requires_grad_(False)
    x = torch.randn(64, 300)
    kept = favour.compile(model, x[:2], method="adjoint")
    kept.attribute(x)
    kept(x)
    with Peak() as apart:
        kept.attribute(x)  # reads the tape of every output's source, which stays
    with Peak() as peak:
        kept(x)
    assert peak.most < apart.most


def test_memory_of_one_input_is_met_by_groups_of_covectors() -> None:
    model, x = wide(), torch.randn(2, 4)
    free = favour.compile(model, x, method="adjoint")(x)
    tight = favour.compile(model, x, method="adjoint", memory=4 * (4 * 3010 + 3 * 300 * 4))(x)
    torch.testing.assert_close(tight.covariance_matrix, free.covariance_matrix, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [*SWEEPS, {"method": "dplr", "rank": 2, "weight_rank": 8}])
def test_no_batch_of_square_matrices_is_made(settings: dict) -> None:
    """Nothing of the size of a layer's covariance, (batch, n, n), and nothing of the size of all its columns."""
    model, x = wide(), torch.randn(16, 4)
    predict = favour.compile(model, x[:2], **settings)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    with Sizes():
        predict(x)
    assert 0 < largest < 16 * 300 * 300 / 8


# ------------------------------------------------------------------------------- precision, inner layers, auto


def test_precision_bf16_changes_little() -> None:
    model, x = wide(), torch.randn(64, 4)
    exact = favour.compile(model, x[:2], method="adjoint")(x)
    short = favour.compile(model, x[:2], method="adjoint", precision="bf16")(x)
    torch.testing.assert_close(short.mean, exact.mean, rtol=1e-2, atol=1e-3)
    error = (short.covariance_matrix - exact.covariance_matrix).norm() / exact.covariance_matrix.norm()
    assert 0 < error < 0.02


def test_precision_tf32_is_switched_on_for_the_sweeps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wide(), torch.randn(8, 4)
    predict = favour.compile(model, x[:2], method="adjoint", precision="tf32")
    seen: list[tuple[int, bool]] = []
    linear = nn.functional.linear

    def spy(d: Tensor, *rest: Tensor | None) -> Tensor:
        seen.append((len(rest), torch.backends.cuda.matmul.allow_tf32))
        return linear(d, *rest)

    before = torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(nn.functional, "linear", spy)
    belief = predict(x)
    assert torch.backends.cuda.matmul.allow_tf32 == before
    assert {flag for arguments, flag in seen if arguments == 1} == {True}  # variances and covectors: no bias
    assert {flag for arguments, flag in seen if arguments == 2} == {before}  # the mean
    plain = favour.compile(model, x[:2], method="adjoint")(x)
    torch.testing.assert_close(belief.covariance_matrix, plain.covariance_matrix, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("method", ["adjoint", "dplr", "full", "diag"])
def test_inner_layer_by_any_method(method: str) -> None:
    model, x = network("sequential"), inputs()
    belief = favour.compile(model, x, method=method, at="4", rank=None if method in ("full", "diag") else 20)(x)
    cut = favour.compile(
        nn.Sequential(*list(model)[:5]), x, method=method, rank=None if method in ("full", "diag") else 20
    )
    torch.testing.assert_close(belief.mean, cut(x).mean)
    torch.testing.assert_close(belief.covariance_matrix, cut(x).covariance_matrix)


def scorer(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, outputs))


def test_auto_takes_all_outputs_while_they_are_few_and_directions_of_very_many_class_scores() -> None:
    x = torch.randn(3, 4)
    few = favour.compile(scorer(10), x, task="classification")(x)
    assert few.directions is None and few.covariance_matrix.shape == (3, 10, 10)
    many = favour.compile(scorer(1000), x, task="classification")(x)
    assert many.directions is not None and many.directions.shape[0] < 20
    more = favour.compile(scorer(4000), x, task="classification")(x)
    assert more.directions is not None and more.directions.shape[0] == many.directions.shape[0]


@pytest.mark.parametrize("settings", [{"effort": "best"}, {"rank": 8}, {"effort": "best", "rank": 8}], ids=str)
def test_asking_for_more_of_few_outputs_is_no_reason_to_compress(settings) -> None:
    """A deep network, of which a rank or pairs cost more than all outputs together do."""
    layers = [m for _ in range(8) for m in (nn.Linear(320, 320), nn.ReLU(), nn.Dropout(0.2))]
    model, x = nn.Sequential(*layers, nn.Linear(320, 10)), torch.randn(2, 320)
    predict = favour.compile(model, x, check=False, **settings)
    assert predict.method.name == "adjoint" and predict.method.rank == settings.get("rank", 0)


def test_auto_takes_no_softmax_directions_of_outputs_that_nobody_called_class_scores() -> None:
    """300 numbers of a regression: the whole covariance, where eight directions lost most of it."""
    x = torch.randn(3, 4)
    belief = favour.compile(scorer(300), x)(x)
    assert belief.directions is None
    torch.testing.assert_close(
        belief.covariance_matrix, favour.compile(scorer(300), x, method="adjoint")(x).covariance_matrix
    )


def test_auto_says_what_is_lost_where_all_outputs_are_too_many() -> None:
    x = torch.randn(3, 4)
    model = nn.Sequential(scorer(1000), nn.ReLU(), nn.Linear(1000, 1000))
    with pytest.warns(favour.errors.ReducedCovariance, match=r"1000 outputs .* a rank of 4 is kept"):
        belief = favour.compile(model, x)(x)
    assert belief.directions is None and belief.factor.shape[0] == 4
    favour.compile(model, x, method="dplr")  # asked for by name: nothing to say
    assert favour.compile(model, x, task="classification")(x).directions is not None


def test_probabilities_of_very_many_class_scores_follow_directions_whatever_the_task() -> None:
    x = torch.randn(3, 4)
    model = nn.Sequential(scorer(1000), nn.ReLU(), nn.Linear(1000, 1000)).double()
    with pytest.warns(favour.errors.ReducedCovariance):
        plain = favour.compile(model, x.double())
    told = favour.compile(model, x.double(), task="classification")
    torch.testing.assert_close(plain.probabilities(x.double()), told.probabilities(x.double()))


def test_a_task_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'classification'"):
        favour.compile(scorer(3), torch.randn(3, 4), task="clasification")


@pytest.mark.filterwarnings("ignore::favour.errors.ReducedCovariance")
def test_auto_of_an_image_like_output_takes_draws_and_says_so() -> None:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(4, 200), nn.Linear(200, 2500), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.drop(torch.relu(self.a(x)))).unflatten(1, (50, 50))

    x = torch.randn(3, 4)
    with pytest.warns(favour.errors.ReducedCovariance, match=r"2500 outputs .* samples are taken: \d+ draws"):
        predict = favour.compile(Picture(), x)
    assert predict(x).mean.shape == (3, 50, 50) and predict.method.name == "pooled"
    assert favour.compile(Picture(), x, rank=2)(x).factor.shape[0] == 2  # what only `dplr` has


def test_directions_by_input_compile_with_an_example_of_their_batch():
    model, x = (
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 5)).double(),
        torch.randn(7, 4).double(),
    )
    directions = torch.randn(2, 7, 5, dtype=torch.float64)
    belief = favour.compile(model, x, method="adjoint", directions=directions)(x)
    full = favour.compile(model, x, method="adjoint")(x).covariance_matrix
    for i in range(7):
        basis = torch.linalg.qr(directions[:, i].T)[0]
        torch.testing.assert_close(basis.T @ belief.covariance_matrix[i] @ basis, basis.T @ full[i] @ basis)
