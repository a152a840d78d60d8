"""The predictor: what it computes, what it follows, how it moves, and what a file of it may do."""

import copy
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import favour
from favour import Belief

float64 = torch.float64


def mlp(dtype: torch.dtype = float64, p: float = 0.2) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 5), nn.ReLU(), nn.Dropout(p), nn.Linear(5, 2)
    ).to(dtype)


def inputs(batch: int = 4, features: int = 3, dtype: torch.dtype = float64) -> Tensor:
    return torch.randn(batch, features, dtype=dtype)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same(a: Belief, b: Belief, tolerance: float = 1e-12) -> None:
    close(a.mean, b.mean, tolerance)
    close(a.covariance_matrix, b.covariance_matrix, tolerance)


METHODS = [("adjoint", None), ("adjoint", 2), ("dplr", 2), ("dplr", 8), ("full", None), ("diag", None)]
each_method = pytest.mark.parametrize(("method", "rank"), METHODS, ids=lambda v: str(v))


# ---------------------------------------------------------------------- values


@each_method
def test_predict_without_noise_is_the_model(method: str, rank: int | None) -> None:
    model = mlp(p=0.0)
    x = inputs()
    belief = favour.compile(model, x, method=method, rank=rank)(x)
    assert torch.equal(belief.mean, model(x))
    assert belief.covariance_matrix.abs().max() == 0


@each_method
def test_predict_row_by_row_equals_batch(method: str, rank: int | None) -> None:
    model, x = mlp(), inputs(5)
    predict = favour.compile(model, x, method=method, rank=rank)
    whole = predict(x)
    for i in range(5):
        same(predict(x[i : i + 1]), whole[i])


@each_method
def test_predict_empty_batch(method: str, rank: int | None) -> None:
    model = mlp()
    belief = favour.compile(model, inputs(), method=method, rank=rank)(inputs(0))
    assert belief.mean.shape == (0, 2)
    assert belief.covariance_matrix.shape == (0, 2, 2)


@each_method
def test_predict_is_deterministic(method: str, rank: int | None) -> None:
    model, x = mlp(), inputs()
    one = favour.compile(model, x, method=method, rank=rank)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    two = favour.compile(model, inputs(2).mul(0), method=method, rank=rank)
    same(one(x), two(x), 0)
    same(one(x), one(x), 0)
    torch.set_rng_state(state)


def test_predict_does_not_touch_the_global_generator() -> None:
    model, x = mlp(), inputs()
    state = torch.get_rng_state()
    favour.compile(model, x, method="dplr", rank=2)(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("method", ["adjoint", "dplr", "diag"])
def test_predict_lower_precision(dtype: torch.dtype, tolerance: float, method: str) -> None:
    model, x = mlp(), inputs()
    exact = favour.compile(model, x, method=method)(x)
    belief = favour.compile(copy.deepcopy(model).to(dtype), x.to(dtype), method=method)(x.to(dtype))
    assert belief.mean.dtype == dtype and belief.covariance_matrix.dtype == dtype
    assert belief.covariance_matrix.isfinite().all()
    close(belief.mean.double(), exact.mean, tolerance)
    scale = exact.variance.max()
    close(belief.covariance_matrix.double() / scale, exact.covariance_matrix / scale, tolerance)


def test_predict_linear_network_in_closed_form() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.25), nn.Linear(5, 3)).double()
    x = inputs(3, 4)
    h, W = model[0](x), model[2].weight
    covariance = torch.einsum("ij,bj,kj->bik", W, h.square() / 3, W)
    for method in ("adjoint", "full", "dplr"):
        belief = favour.compile(model, x, method=method)(x)
        close(belief.mean, model[2](h))
        close(belief.covariance_matrix, covariance)
    close(favour.compile(model, x, method="diag")(x).variance, covariance.diagonal(dim1=1, dim2=2))


# ------------------------------------------------------------- uncertain inputs


def random_belief(batch: int, n: int) -> tuple[Belief, Tensor]:
    root = torch.randn(batch, n, n, dtype=float64)
    covariance = root @ root.mT
    return Belief(inputs(batch, n), covariance=covariance), covariance


@pytest.mark.parametrize("method", ["adjoint", "dplr", "full"])
def test_predict_belief_through_linear_network(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    belief, covariance = random_belief(3, 3)
    J = model[1].weight @ model[0].weight
    result = favour.compile(model, inputs(), method=method, rank=4)(belief)
    close(result.mean, model(belief.mean))
    close(result.covariance_matrix, J @ covariance @ J.T, 1e-10)


@pytest.mark.parametrize("kind", ["diagonal", "factor", "dense", "point"])
def test_predict_belief_of_each_structure(kind: str) -> None:
    mean, diag, factor = inputs(3), inputs(3).square(), torch.randn(2, 3, 3, dtype=float64)
    belief = {
        "diagonal": Belief(mean, diag=diag),
        "factor": Belief(mean, diag=diag, factor=factor),
        "dense": random_belief(3, 3)[0],
        "point": Belief.point(mean),
    }[kind]
    model = nn.Linear(3, 2).double()
    for method in ("adjoint", "full", "dplr"):
        result = favour.compile(model, mean, method=method)(belief)
        close(result.covariance_matrix, model.weight @ belief.covariance_matrix @ model.weight.T, 1e-10)


def test_predict_belief_through_relu_network_against_samples() -> None:
    """Marginals after one ReLU are exact for a Gaussian input; the number of draws bounds the deviation."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double()
    belief, _ = random_belief(2, 3)
    result = favour.compile(model, inputs(), method="full")(belief)
    n = 200_000
    draws = model(belief.sample((n,), generator=torch.Generator().manual_seed(0)))
    error = draws.std(0) / n**0.5
    assert ((draws.mean(0) - result.mean).abs() < 5 * error).all()
    fourth = (draws - draws.mean(0)).pow(4).mean(0)
    assert ((draws.var(0) - result.variance).abs() < 5 * (fourth / n).sqrt()).all()


def test_predict_point_belief_is_a_tensor() -> None:
    model, x = mlp(), inputs()
    predict = favour.compile(model, x)
    same(predict(Belief.point(x)), predict(x))


def test_predict_two_inputs_each_uncertain() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) - 2 * self.b(y)

    model = Both().double()
    (x, sx), (y, sy) = random_belief(3, 3), random_belief(3, 4)
    A, B = model.a.weight, -2 * model.b.weight
    for method in ("adjoint", "full"):
        predict = favour.compile(model, (x.mean, y.mean), method=method)
        close(predict(x, y).covariance_matrix, A @ sx @ A.T + B @ sy @ B.T, 1e-10)
        close(predict(x, y.mean).covariance_matrix, A @ sx @ A.T, 1e-10)
        close(predict(x.mean, y).covariance_matrix, B @ sy @ B.T, 1e-10)
        assert predict(x.mean, y.mean).variance.max() == 0


def test_predict_input_used_twice() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x)

    model = Residual().double()
    x, sigma = random_belief(2, 3)
    J = torch.eye(3, dtype=float64) + model.layer.weight
    for method in ("adjoint", "full"):
        close(favour.compile(model, x.mean, method=method)(x).covariance_matrix, J @ sigma @ J.T, 1e-10)


def test_predict_split_branches_keep_their_covariance() -> None:
    """Pieces of one uncertain tensor come together again: their covariance must not be lost on the way."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 6)
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.first(x).chunk(2, dim=1)
            return self.a(left) + self.b(right)

    model = Split().double()
    x, sigma = random_belief(3, 3)
    J = torch.cat([model.a.weight, model.b.weight], 1) @ model.first.weight
    for method, rank in (("adjoint", 0), ("full", None), ("dplr", 6)):
        belief = favour.compile(model, x.mean, method=method, rank=rank)(x)
        close(belief.covariance_matrix, J @ sigma @ J.T, 1e-10)


# ------------------------------------------------------------------- inner layers


def test_predict_at_an_inner_layer() -> None:
    model, x = mlp(), inputs()
    whole = favour.compile(model, x, method="full")
    for at, length in (("0", 1), ("3", 4), ("4", 5)):
        inner = favour.compile(model, x, at=at, method="full")(x)
        same(inner, favour.compile(model[:length], x, method="full")(x))
    same(favour.compile(model, x, at="6", method="full")(x), whole(x))


def test_predict_at_a_container() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(2, 1, dtype=float64)

        def forward(self, x: Tensor):
            return {"score": self.head(self.body(x))}

    model, x = Outer(), inputs()
    same(favour.compile(model, x, at="body")(x), favour.compile(model.body, x)(x))


def test_predict_at_an_unknown_module_lists_the_known() -> None:
    with pytest.raises(favour.errors.UnknownName, match=r"'hidden'.*'0'.*'6'"):
        favour.compile(mlp(), inputs(), at="hidden")


# -------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("method", "rank"), [("adjoint", None), ("adjoint", 2), ("dplr", 2), ("diag", None)])
@pytest.mark.parametrize("activation", ["price", "matched", "taylor"])
def test_gradients_equal_finite_differences(method: str, rank: int | None, activation: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.3), nn.Linear(3, 3), nn.Softplus(), nn.Linear(3, 2))
    model = model.double()
    x = inputs(2, 2)
    predict = favour.compile(model, x, method=method, rank=rank, activation=activation)
    names = [name for name, _ in model.named_parameters()]

    def f(x: Tensor, *weights: Tensor):
        state = {name.replace(".", "/"): w for name, w in zip(names, weights, strict=True)}
        belief = torch.func.functional_call(predict, {f"store.{k}": v for k, v in state.items()}, (x,))
        return belief.mean, belief.covariance_matrix

    predict.to(torch.float32).to(torch.float64)  # its own copies, which functional_call may replace
    weights = [w.detach().clone().requires_grad_() for w in model.parameters()]
    assert torch.autograd.gradcheck(f, (x.requires_grad_(), *weights), atol=1e-6, rtol=1e-4)


def test_gradients_reach_the_models_own_parameters() -> None:
    model, x = mlp(), inputs().requires_grad_()
    belief = favour.compile(model, x.detach())(x)
    (belief.mean.sum() + belief.variance.log().sum()).backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_gradients_of_bayesian_spreads() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(3, 4), nn.Tanh(), favour.nn.BayesLinear(4, 2)).double()
    favour.compile(model, inputs())(inputs()).variance.sum().backward()
    for layer in (model[0], model[2]):
        assert layer.weight_log_std.grad.abs().max() > 0
        assert layer.bias_log_std.grad.abs().max() > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_predict_without_gradients(mode) -> None:
    model, x = mlp(), inputs()
    predict = favour.compile(model, x, method="dplr", rank=2)
    want = predict(x)
    with mode():
        got = predict(x)
        same(got, want.detach())
        assert not got.mean.requires_grad


def test_compile_inside_inference_mode_then_train() -> None:
    """Nothing that is kept from the first call may be an inference tensor."""
    model, x = mlp(), inputs()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for method, rank in (("adjoint", 2), ("dplr", 2)):
        with torch.inference_mode():
            predict = favour.compile(model, x, method=method, rank=rank, weight_rank=2)
            predict(x)
        x.requires_grad_()
        predict(x).variance.sum().backward()


# ------------------------------------------------------------ following the model


def test_predict_follows_an_optimiser() -> None:
    model, x = mlp(), inputs()
    for method, rank in (("adjoint", None), ("dplr", 2)):
        predict = favour.compile(model, x, method=method, rank=rank)
        before = predict(x)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        model(x).square().sum().backward()
        optimiser.step()
        same(predict(x), favour.compile(model, x, method=method, rank=rank)(x))
        assert (predict(x).mean - before.mean).abs().max() > 1e-3
        with torch.no_grad():  # squares are cached here, and must be refreshed
            cached = predict(x)
            model[3].weight.mul_(2)
            same(predict(x), favour.compile(model, x, method=method, rank=rank)(x))
            assert (predict(x).variance - cached.variance).abs().max() > 1e-4


@pytest.mark.parametrize("assign", [False, True])
def test_predict_follows_load_state_dict(assign: bool) -> None:
    model, other, x = mlp(), mlp(), inputs()
    predict = favour.compile(model, x)
    model.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=assign)
    with torch.no_grad():
        same(predict(x), favour.compile(other, x)(x))
        model[0].weight.add_(1)
        same(predict(x), favour.compile(model, x)(x))


def test_predict_follows_replaced_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2)).double()
    x = inputs()
    predict = favour.compile(model, x)
    model[3].weight = nn.Parameter(torch.randn(2, 4, dtype=float64))
    model[1].running_mean = torch.randn(4, dtype=float64)
    model(x)  # updates the running statistics in place
    same(predict(x), favour.compile(model, x)(x))


def test_predict_follows_bayesian_spreads() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(3, 2)).double()
    x = inputs()
    predict = favour.compile(model, x)
    before = predict(x).variance.detach().clone()
    with torch.no_grad():
        model[0].weight_log_std.add_(0.5 * torch.log(torch.tensor(4.0)))
        model[0].bias_log_std.add_(0.5 * torch.log(torch.tensor(4.0)))
    close(predict(x).variance, 4 * before, 1e-6)


def test_predict_to_float64_copies() -> None:
    model, x = mlp(torch.float32), inputs(dtype=torch.float32)
    predict = favour.compile(model, x, method="dplr", rank=2, dropout={"2": torch.full((6,), 0.3)})
    moved = predict.to(float64)
    assert moved is predict
    assert all(p.dtype == torch.float32 for p in model.parameters())
    belief = predict(x.double())
    assert belief.mean.dtype == float64 and belief.covariance_matrix.dtype == float64
    reference = favour.compile(
        copy.deepcopy(model).double(), x.double(), method="dplr", rank=2, dropout={"2": torch.full((6,), 0.3)}
    )
    same(belief, reference(x.double()), 1e-9)
    with torch.no_grad():
        model[0].weight.zero_()
    same(predict(x.double()), belief, 0)  # the copies are its own now
    with pytest.raises(favour.errors.InvalidType, match="float64"):
        predict(x)


def test_predict_to_float64_with_posterior_and_bayesian_layers() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    posterior = {"2.weight": torch.full((2, 4), 0.01)}
    predict = favour.compile(model, inputs(dtype=torch.float32), posterior=posterior).to(float64)
    x = inputs()
    reference = favour.compile(
        copy.deepcopy(model).double(), x, posterior={k: v.double() for k, v in posterior.items()}
    )
    same(predict(x), reference(x), 1e-7)
    assert predict.sample(x, n=3).dtype == float64


def test_predict_to_the_same_place_keeps_the_link() -> None:
    model, x = mlp(), inputs()
    predict = favour.compile(model, x).to(float64).to("cpu").double().cpu()
    with torch.no_grad():
        model[6].bias.add_(1)
    same(predict(x), favour.compile(model, x)(x))


def test_predict_parameters_are_the_models() -> None:
    model = mlp()
    predict = favour.compile(model, inputs())
    assert {id(p) for p in predict.parameters()} == {id(p) for p in model.parameters()}
    assert not any(module is model for module in predict.modules())


def test_predict_train_and_eval_change_nothing() -> None:
    model, x = mlp(), inputs()
    predict = favour.compile(model, x)
    same(predict.train()(x), predict.eval()(x), 0)
    assert model.training


# ----------------------------------------------------------------- torch.compile


COMPILED = [("adjoint", None), ("dplr", 2), ("diag", None)]


@pytest.mark.parametrize(("method", "rank"), COMPILED)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_compile_equals_eager(method: str, rank: int | None, fullgraph: bool) -> None:
    torch._dynamo.reset()
    model, x = mlp(), inputs()
    predict = favour.compile(model, x, method=method, rank=rank)
    with torch.no_grad():
        want = predict(x)
        compiled = torch.compile(predict, backend="aot_eager", fullgraph=fullgraph)
        same(compiled(x), want, 1e-10)
        model[3].weight.mul_(1.5)  # read in place by the compiled graph
        model[0].bias.add_(0.1)
        same(compiled(x), predict(x), 1e-10)
        assert (predict(x).variance - want.variance).abs().max() > 1e-4


def test_torch_compile_bayesian_layers_and_fused_code() -> None:
    torch._dynamo.reset()

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = favour.nn.BayesLinear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h * torch.sigmoid(h) + torch.relu(h))

    model, x = Written().double(), inputs()
    predict = favour.compile(model, x)
    with torch.no_grad():
        compiled = torch.compile(predict, backend="aot_eager", fullgraph=True)
        same(compiled(x), predict(x), 1e-10)
        model.a.weight_log_std.add_(1)
        same(compiled(x), predict(x), 1e-10)


def test_torch_compile_gradients() -> None:
    torch._dynamo.reset()
    model, x = mlp(), inputs().requires_grad_()
    predict = favour.compile(model, x.detach())
    compiled = torch.compile(predict, backend="aot_eager", fullgraph=True)
    (eager,) = torch.autograd.grad(predict(x).variance.sum(), x)
    (graph,) = torch.autograd.grad(compiled(x).variance.sum(), x)
    close(graph, eager, 1e-10)


def test_torch_compile_belief_in() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    predict = favour.compile(model, inputs())
    compiled = torch.compile(predict, backend="aot_eager")
    x = inputs()
    with torch.no_grad():
        belief = Belief(x, diag=x.square())
        same(compiled(belief), predict(belief), 1e-10)


def test_torch_compile_other_batch_sizes() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 2)).double()
    predict = favour.compile(model, inputs())
    compiled = torch.compile(predict, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for batch in (4, 7, 1):
            x = inputs(batch)
            same(compiled(x), predict(x), 1e-10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while inductor is imported
def test_torch_compile_inductor() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2)).double()
    x = inputs()
    predict = favour.compile(model, x)
    with torch.no_grad():
        same(torch.compile(predict, fullgraph=True)(x), predict(x), 1e-9)


# ------------------------------------------------------------------------- files


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(3, 3), nn.Linear(3, 3), nn.Dropout(0.2)
        self.b.weight = self.a.weight
        self.register_buffer("shift", torch.randn(3))
        self.plain = torch.randn(3)

    def forward(self, x: Tensor):
        return {"y": self.b(self.drop(torch.tanh(self.a(x)))) + self.shift * self.plain, "n": x.shape[0]}


def build(kind: str) -> tuple[nn.Module, dict]:
    if kind == "plain":
        return mlp(), {}
    if kind == "dplr":
        return mlp(), {"method": "dplr", "rank": 2, "start": "random", "seed": 3}
    if kind == "bayes":
        layers = [
            favour.nn.BayesLinear(3, 4),
            nn.Tanh(),
            favour.nn.RowBayesLinear(4, 3),
            favour.nn.FullBayesLinear(3, 2),
        ]
        return nn.Sequential(*layers, favour.nn.Dropout(torch.tensor([0.1, 0.5]))).double(), {}
    if kind == "tied":
        return Tied().double(), {"posterior": {"b.weight": torch.full((3, 3), 0.02, dtype=float64)}}
    if kind == "rates":
        return mlp(), {"dropout": {"2": torch.linspace(0, 0.9, 6, dtype=float64), "5": 0}, "at": "3"}
    posterior = favour.Posterior(
        {"0.weight": torch.full((6, 3), 0.01, dtype=float64)},
        latents={"3.weight": torch.randn(2, 5, 6, dtype=float64), "6.bias": torch.randn(2, 2, dtype=float64)},
        means={"6.weight": torch.randn(2, 5, dtype=float64)},
    )
    return mlp(), {"posterior": posterior}


@pytest.mark.parametrize("kind", ["plain", "dplr", "bayes", "tied", "rates", "posterior"])
def test_save_and_load_round_trip(kind: str, tmp_path: Path) -> None:
    model, options = build(kind)
    x = inputs()
    predict = favour.compile(model, x, **options)
    predict.save(tmp_path / "p.favour")
    loaded = favour.load(tmp_path / "p.favour")
    want, got = predict(x), loaded(x)
    if kind == "tied":
        assert got["n"] == want["n"] == 4
        want, got = want["y"], got["y"]
    same(got, want)
    assert want.variance.max() > 0
    a, b = (p.sample(x, n=3, generator=torch.Generator().manual_seed(0)) for p in (predict, loaded))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert {k: p.requires_grad for k, p in predict.store.named_parameters()} == {
        k: p.requires_grad for k, p in loaded.store.named_parameters()
    }
    loaded.save(tmp_path / "again.favour")
    again = favour.load(tmp_path / "again.favour")(x)
    same(again["y"] if kind == "tied" else again, want)
    assert sorted(os.listdir(tmp_path)) == ["again.favour", "p.favour"]


def test_loaded_predictor_is_independent_of_the_model(tmp_path: Path) -> None:
    model, x = mlp(), inputs()
    predict = favour.compile(model, x)
    predict.save(tmp_path / "p")
    loaded = favour.load(tmp_path / "p")
    with torch.no_grad():
        model[0].weight.zero_()
    assert (loaded(x).mean - predict(x).mean).abs().max() > 1e-3
    assert loaded.to(torch.float32)(x.float()).mean.dtype == torch.float32
    with pytest.raises(favour.errors.ShapeMismatch, match=r"\(4, 5\)"):
        favour.load(tmp_path / "p")(inputs(4, 5))


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "p.favour"
    favour.compile(mlp(), inputs()).save(path)
    return path


@pytest.mark.parametrize("keep", [0, 10, 0.3, 0.9, -1])
def test_load_truncated_file(keep: float, tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(favour.errors.CorruptFile, match=r"p\.favour") as caught:
        favour.load(path)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("garbage", [b"not a file", bytes(range(256)) * 40, b"PK\x03\x04" + b"x" * 100])
def test_load_garbage(garbage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.favour"
    path.write_bytes(garbage)
    with pytest.raises(favour.errors.CorruptFile):
        favour.load(path)


def test_load_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        favour.load(tmp_path / "nothing")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("form", ["pickle", "torch", "inside"])
def test_load_malicious_pickle_executes_nothing(form: str, tmp_path: Path) -> None:
    trace, path = tmp_path / "executed", tmp_path / "p.favour"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Bomb(trace)))
    elif form == "torch":
        torch.save({"format": "favour-predictor", "version": 1, "graph": Bomb(trace)}, path)
    else:  # a sound file, one entry of which is replaced
        good = io.BytesIO(saved(tmp_path).read_bytes())
        with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
            for item in source.namelist():
                data = pickle.dumps(Bomb(trace)) if item.endswith("data.pkl") else source.read(item)
                target.writestr(item, data)
    with pytest.raises(favour.errors.CorruptFile):
        favour.load(path)
    assert not trace.exists()


def tampered(tmp_path: Path, change) -> Path:
    """A sound file with its content changed by `change(content, graph)`."""
    path = saved(tmp_path)
    content = torch.load(path, weights_only=True)
    graph = json.loads(content["graph"])
    change(content, graph)
    if "graph" in content:
        content["graph"] = json.dumps(graph)
    torch.save(content, path)
    return path


def _set(where: str, value):
    def change(content, graph):
        content[where] = value

    return change


def _node(key: str, value):
    def change(content, graph):
        next(n for n in graph["nodes"] if n["kind"] == "call")[key] = value

    return change


def _remove(where: str):
    def change(content, graph):
        del content[where]

    return change


def _out_spec(text: str):
    def change(content, graph):
        graph["out_spec"] = text

    return change


# How pytree writes a defaultdict: reading it back imports the module that it names.
IMPORTING = {
    "type": "collections.defaultdict",
    "context": json.dumps(
        {"default_factory_module": "antigravity", "default_factory_name": "fly", "dict_context": ["a"]}
    ),
    "children_spec": [{"type": None, "context": None, "children_spec": []}],
}
ENUMERATION = {
    "type": "builtins.dict",
    "context": json.dumps([{"__enum__": True, "fqn": "antigravity:fly", "name": "up"}]),
    "children_spec": [{"type": None, "context": None, "children_spec": []}],
}

CHANGES = {
    "version missing": _remove("version"),
    "version of another type": _set("version", "one"),
    "version from the future": _set("version", 99),
    "format": _set("format", "something else"),
    "no graph": _remove("graph"),
    "no store": _set("store", {}),
    "no settings": _remove("settings"),
    "settings unknown": _set("settings", '{"colour": 3}'),
    "settings invalid": _set("settings", '{"method": "magic"}'),
    "posterior": _set("posterior", "{}"),
    "not json": _set("posterior", "{"),
    "store of another type": _set("store", [1, 2]),
    "unknown operation": _node("target", "aten.no_such_thing.default"),
    "operation on files": _node("target", "aten.from_file.default"),
    "operation outside aten": _node("target", "debugprims.load_tensor.default"),
    "python function": _node("target", "python.system"),
    "unknown node": _node("args", [{"node": "nobody"}]),
    "unknown kind of argument": _node("args", [{"code": "print()"}]),
    "strange argument": _node("args", {"a": 1, "b": 2}),
    "unknown dtype": _node("dtype", "float63"),
    "torch function as dtype": _node("dtype", "load"),
    "strange shape": _node("shape", 3),
    "structure": _out_spec("nonsense"),
    "structure with an import": _out_spec(json.dumps([1, IMPORTING])),
    "structure with an enumeration": _out_spec(json.dumps([1, ENUMERATION])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_load_tampered_file(name: str, tmp_path: Path) -> None:
    path = tampered(tmp_path, CHANGES[name])
    with pytest.raises(favour.errors.CorruptFile):
        favour.load(path)


def test_load_symbolic_size_is_not_evaluated_as_code(tmp_path: Path) -> None:
    trace = tmp_path / "executed"

    def change(content, graph):
        for node in graph["nodes"]:
            if node["kind"] == "call" and node["shape"]:
                node["shape"][0] = f"__import__('pathlib').Path({str(trace)!r}).touch()"

    path = tampered(tmp_path, change)
    with pytest.raises(favour.FavourError):
        favour.load(path).sample(inputs(), n=1)
    assert not trace.exists()


def test_failed_save_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        favour.compile(mlp(), inputs()).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.favour"]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, while it is copied
@pytest.mark.parametrize("how", ["moved", "loaded", "copied"])
def test_compiles_before_any_eager_call(how, tmp_path):
    # Plans cannot be made while torch.compile traces, so a predictor that was moved, loaded or copied has them already.
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.25), nn.Linear(6, 3))
    predict = favour.compile(model, torch.randn(2, 4))
    x = torch.randn(5, 4, dtype=torch.float64 if how == "moved" else torch.float32)
    if how == "moved":
        fresh = predict.double()
    elif how == "loaded":
        predict.save(tmp_path / "predictor.favour")
        fresh = favour.load(tmp_path / "predictor.favour")
    else:
        fresh = copy.deepcopy(predict)
    belief = torch.compile(fresh, fullgraph=True, backend="eager")(x)
    p = torch.compile(fresh.probabilities, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(belief.covariance_matrix, fresh(x).covariance_matrix)
    torch.testing.assert_close(p, fresh.probabilities(x))


def test_a_predictor_says_what_it_does():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)), torch.randn(2, 4)
    assert "takes adjoint, 2.7 forward passes by products alone" in repr(favour.compile(model, x))
    words = repr(favour.compile(model, x, method="dplr", rank=1))
    assert "method='dplr', rank=1" in words and "iterations" not in words
    assert "directions=(tensor of shape (2, 3))" in repr(favour.compile(model, x, directions=torch.eye(3)[:2]))
