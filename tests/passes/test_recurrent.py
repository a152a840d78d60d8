"""Unrolled recurrent layers: the plain output without noise, Jacobians to first order, and trained networks sampled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from networks import digits, moments, relative_error, sampling_error
from torch import Tensor, nn
from torch.func import functional_call

import favour
from favour import Belief, Full, Kronecker, Posterior, Rows
from favour.errors import UnsupportedOperation

F64 = torch.float64
BATCH, T, N, H = 2, 3, 3, 4


class Layer(nn.Module):
    """A recurrent layer on (batch, T, n), with the batch wherever the layer wants it, and one way to read it."""

    def __init__(self, kind: type, read: str, **options: Any) -> None:
        super().__init__()
        self.layer, self.read = kind(N, H, **options), read
        width = (options.get("proj_size") or H) * (2 if options.get("bidirectional") else 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer.batch_first
        y, state = self.layer(x if first else x.transpose(0, 1))
        h = state[0] if isinstance(state, tuple) else state
        if self.read == "last position":
            return y[:, -1, :] if first else y[-1]
        if self.read == "last layer":
            return h[-1]
        if self.read == "all states":
            return (h if not isinstance(state, tuple) else torch.cat([h, state[1]], 2)).permute(1, 0, 2).flatten(1)
        if self.read == "pooled":
            return torch.tanh(self.norm(y)).mean(1 if first else 0)
        return (y if first else y.transpose(0, 1)).flatten(1)


READS = ("last position", "last layer", "all states", "pooled", "everything")
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, projected": (nn.LSTM, {"proj_size": 2, "num_layers": 2}),
    "LSTM, two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM, no bias": (nn.LSTM, {"bias": False}),
    "GRU": (nn.GRU, {}),
    "GRU, two layers, both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "GRU, no bias": (nn.GRU, {"bias": False}),
    "RNN": (nn.RNN, {}),
    "RNN, relu, two layers": (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"}),
}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def build(name: str, read: str, **options: Any) -> Layer:
    torch.manual_seed(0)
    kind, own = KINDS[name]
    if name == "LSTM, projected" and read == "all states":
        read = "everything"  # h and c differ in width
    model = Layer(kind, read, **own, **options).double().eval()
    if "relu" in name:  # keep the units alive
        model.load_state_dict({k: p + 0.5 * ("bias_ih" in k) for k, p in model.state_dict().items()})
    return model


def jacobian(model: nn.Module, name: str, *inputs: Tensor) -> Tensor:
    """d(outputs of one input)/d(parameter), (batch, outputs, entries), by autograd through torch's own layer."""
    value = dict(model.named_parameters())[name].detach()
    rows = [[t[i : i + 1] for t in inputs] for i in range(len(inputs[0]))]
    found = [
        torch.autograd.functional.jacobian(lambda w, r=r: functional_call(model, {name: w}, tuple(r))[0], value)
        for r in rows
    ]
    return torch.stack(found).reshape(len(rows), -1, value.numel()).detach()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_recurrent_layer_of_an_uncertain_input(name, batch_first):
    """Variances of 1e-10: the mean is the plain output, the covariance J Σ Jᵀ, to first order exact."""
    x = randn(BATCH, T, N)
    variance = 1e-10 * torch.rand(x.shape, dtype=F64)
    for read in READS if name == "LSTM" else READS[-1:]:
        model = build(name, read, batch_first=batch_first)
        with torch.no_grad():
            predict = favour.compile(model, x, method="adjoint")
            certain, got = predict(x), predict(Belief(x, variance))
        torch.testing.assert_close(certain.mean, model(x).detach(), rtol=1e-10, atol=1e-10)
        assert certain.variance.max() == 0
        for i in range(BATCH):
            J = torch.autograd.functional.jacobian(lambda r, m=model: m(r)[0], x[i : i + 1]).reshape(-1, T * N)
            expected = J @ variance[i].flatten().diag() @ J.T
            error = (got.covariance_matrix[i] - expected).norm() / expected.norm()
            assert error < 1e-6, (read, error)


@pytest.mark.parametrize("name", KINDS)
def test_recurrent_weight_is_one_draw_for_all_steps(name):
    """Every parameter with a tiny mean-field posterior, against Σ J Σ_w Jᵀ, one by one in the attribution."""
    model, x = build(name, "everything", batch_first=True), randn(BATCH, T, N)
    check_weights(model, x)


def check_weights(model: nn.Module, x: Tensor, **settings: Any) -> None:
    posterior = {name: 1e-10 * torch.rand(value.shape, dtype=F64) for name, value in model.named_parameters()}
    posterior = {name: variance for name, variance in posterior.items() if not name.startswith("norm")}
    with torch.no_grad():
        predict = favour.compile(model, x, method="adjoint", posterior=posterior, **settings)
        got, parts = predict(x).covariance_matrix, predict.attribute(x)
    total = torch.zeros_like(got)
    for name, variance in posterior.items():
        J = jacobian(model, name, x)
        expected = J * variance.flatten() @ J.mT
        own = expected.diagonal(dim1=1, dim2=2)
        assert (parts.sources[name].flatten(1) - own).norm() < 1e-6 * own.norm(), name
        total += expected
    assert (got - total).norm() < 1e-6 * total.norm()


@pytest.mark.parametrize("kind", ["rows", "kronecker", "full", "joint"])
@pytest.mark.parametrize("method, rank", [("adjoint", None), ("dplr", 20), ("full", None)])
def test_recurrent_weight_with_a_correlated_posterior(kind, method, rank):
    model, x = build("RNN", "last position", batch_first=True), randn(2, 3, N)
    for name, bias, n in (("layer.weight_ih_l0", "layer.bias_ih_l0", N), ("layer.weight_hh_l0", "layer.bias_hh_l0", H)):
        root = 1e-5 * randn(H * (n + 1), H * (n + 1))
        covariance = root[: H * n, : H * n] @ root[: H * n, : H * n].T
        gaussian: Any = Full(covariance, (H, n))
        key: Any = name
        J = jacobian(model, name, x)
        if kind == "rows":
            gaussian = Rows(1e-10 * torch.rand(H, n, dtype=F64), 1e-5 * randn(1, H, n))
        elif kind == "kronecker":
            A, B = 1e-5 * randn(n, n), randn(H, H)
            gaussian = Kronecker(A @ A.T, B @ B.T)
        elif kind == "joint":
            gaussian, key = Full(root @ root.T, (H, n + 1)), (name, bias)
            both = [j.reshape(2, -1, H, s) for j, s in ((J, n), (jacobian(model, bias, x), 1))]
            J = torch.cat(both, 3).flatten(2)
        with torch.no_grad():
            got = favour.compile(model, x, method=method, rank=rank, posterior=Posterior({key: gaussian}))(x)
        expected = J @ gaussian.covariance() @ J.mT
        assert (got.covariance_matrix - expected).norm() < 1e-5 * expected.norm(), name


class Cells(nn.Module):
    def __init__(self, kind: type, **options: Any) -> None:
        super().__init__()
        self.cell, self.drop = kind(N, H, **options), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for t in range(x.shape[1]):
            state = self.cell(self.drop(x[:, t]), state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


@pytest.mark.parametrize(
    "kind, options",
    [
        (nn.LSTMCell, {}),
        (nn.GRUCell, {}),
        (nn.RNNCell, {}),
        (nn.RNNCell, {"nonlinearity": "relu"}),
        (nn.GRUCell, {"bias": False}),
    ],
)
def test_recurrent_cells(kind, options):
    torch.manual_seed(0)
    model, x = Cells(kind, **options).double().eval(), randn(BATCH, T, N)
    with torch.no_grad():
        silent = favour.compile(model, x, dropout={"drop": 0.0})(x)
        torch.testing.assert_close(silent.mean, model(x), rtol=1e-10, atol=1e-10)
    check_weights(model, x, dropout={"drop": 0.0})
    assert favour.compile(model, x)(x).variance.min() > 0


class Seq2Seq(nn.Module):
    """The encoder's last state, batch second, starts the decoder."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        options = {"num_layers": 2, "batch_first": batch_first}
        self.encoder, self.decoder = nn.LSTM(N, H, **options), nn.LSTM(2, H, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.encoder.batch_first
        _, state = self.encoder(x if first else x.transpose(0, 1))
        out, _ = self.decoder(y if first else y.transpose(0, 1), state)
        return (out if first else out.transpose(0, 1)).flatten(1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_state_of_one_layer_starts_another(batch_first):
    torch.manual_seed(0)
    model, x, y = Seq2Seq(batch_first).double().eval(), randn(BATCH, T, N), randn(BATCH, 3, 2)
    name = "encoder.weight_hh_l1"
    variance = 1e-10 * torch.rand(4 * H, H, dtype=F64)
    with torch.no_grad():
        got = favour.compile(model, (x, y), method="adjoint", posterior={name: variance})(x, y)
    J = jacobian(model, name, x, y)
    expected = J * variance.flatten() @ J.mT
    assert (got.covariance_matrix - expected).norm() < 1e-6 * expected.norm()
    torch.testing.assert_close(got.mean, model(x, y).detach(), rtol=1e-8, atol=1e-8)


def test_initial_state_as_an_argument():
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.GRU(N, H, batch_first=True), nn.Dropout(0.2)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            y, last = self.layer(self.drop(x), h.unsqueeze(0))
            return y[:, 1] + last.squeeze(0)

    torch.manual_seed(0)
    model, x, h = Given().double().eval(), randn(BATCH, T, N), randn(BATCH, H)
    predict = favour.compile(model, (x, h), dropout={"drop": 0.0})
    torch.testing.assert_close(predict(x, h).mean, model(x, h), rtol=1e-10, atol=1e-10)
    variance = 1e-10 * torch.rand(h.shape, dtype=F64)
    got = favour.compile(model, (x, h), dropout={"drop": 0.0}, method="adjoint")(x, Belief(h, variance))
    for i in range(BATCH):
        J = torch.autograd.functional.jacobian(lambda s, i=i: model(x[i : i + 1], s)[0], h[i : i + 1]).reshape(H, H)
        torch.testing.assert_close(got.covariance_matrix[i], J * variance[i] @ J.T, rtol=1e-5, atol=1e-16)


def test_dropout_between_layers_is_found_and_silenced():
    torch.manual_seed(0)
    model, x = nn.Sequential(build("GRU", "pooled", batch_first=False)), randn(BATCH, T, N)
    model[0].layer = nn.GRU(N, H, 3, dropout=0.3).double()
    predict = favour.compile(model, x)
    assert predict.graph.dropout_modules == ["0.layer"]
    assert predict(x).variance.min() > 0
    assert len({node.name for node in predict.graph.nodes}) == len(predict.graph.nodes)
    silent = favour.compile(model, x, dropout={"0.layer": 0.0})
    torch.testing.assert_close(silent(x).mean, model.eval()(x), rtol=1e-10, atol=1e-10)


def test_saved_recurrent_predictor(tmp_path):
    model, x = nn.Sequential(nn.Dropout(0.1), build("LSTM, two layers, both ways", "pooled")), randn(BATCH, T, N)
    predict = favour.compile(model, x)
    predict.save(tmp_path / "recurrent.favour")
    torch.testing.assert_close(
        favour.load(tmp_path / "recurrent.favour")(x).covariance_matrix, predict(x).covariance_matrix
    )


def test_recurrent_network_compiles_whole():
    model = nn.Sequential(nn.Dropout(0.1), build("RNN", "last position", batch_first=True)).float()
    x = torch.randn(BATCH, 2, N)
    predict = favour.compile(model, x, method="adjoint", posterior={"1.layer.weight_hh_l0": torch.full((H, H), 0.01)})

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        belief = predict(x)
        return belief.mean, belief.covariance_matrix

    with torch.no_grad():
        got = torch.compile(both, fullgraph=True, backend="eager")(x)
    for a, b in zip(got, both(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------- errors


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(N, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        return self.encoder(packed)[1][0][-1]


def test_packed_sequence_is_refused():
    with pytest.raises(UnsupportedOperation, match=r"LSTM `encoder` is given a PackedSequence.*lengths - 1"):
        favour.compile(Packed(), torch.randn(2, T, N))


@pytest.mark.parametrize("shape", [(T, BATCH, N), (T, N)])
def test_layer_that_would_run_over_the_batch_is_refused(shape):
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.1), nn.GRU(N, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.drop(x))[0]

    with pytest.raises(UnsupportedOperation, match=r"GRU `layer` \(batch_first=False\).*run over the batch"):
        favour.compile(First(), torch.randn(shape))


def test_state_with_the_batch_second_has_it_in_front():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.1), nn.GRU(N, H, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(self.drop(x))

    model, x = Both().eval(), torch.randn(2, T, N)
    output, state = favour.compile(model, x)(x)
    assert state.mean.shape == (2, 1, H)
    torch.testing.assert_close(state.mean[:, 0], output.mean[:, -1])
    torch.testing.assert_close(state.variance[:, 0], output.variance[:, -1])


# ------------------------------------------------------------- against sampling

SAMPLES = 4_000


class Rows8(nn.Module):
    """Digits as sequences of 8 rows, embedded; dropout behind the embedding, between the layers and before the head."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Linear(8, 32), nn.Dropout(0.1), nn.Dropout(0.1)
        self.layer, self.head = kind(32, 24, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(self.first(torch.relu(self.embed(x.unflatten(1, (8, 8))))))
        return self.head(self.last(y[:, -1]))


@cache
def trained(kind: type) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    images, labels, test, _ = digits()
    model = Rows8(kind)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(150):
        rows = torch.randint(0, len(images), (64,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimiser.step()
    return model.eval(), test[:4]


def errors(kind: type, settings: dict[str, Any]) -> tuple[float, float, float]:
    """Of the mean (in standard deviations), of the covariance (relative), and what the sample alone makes of that."""
    model, x = trained(kind)
    with torch.no_grad():
        predict = favour.compile(model, x, method="adjoint", **settings)
        belief = predict(x)
        draws = predict.sample(x, n=SAMPLES, generator=torch.Generator().manual_seed(0))
    mean, matrix = moments(draws)
    off = ((belief.mean - mean) / draws.std(0)).abs().mean().item()
    return off, relative_error(belief.covariance_matrix, matrix), sampling_error(matrix, SAMPLES)


SILENT = {"first": 0.0, "layer": 0.0, "last": 0.0}
NOISES: dict[str, dict[str, Any]] = {
    "dropout of the input": {"dropout": {"layer": 0.0, "last": 0.0}},
    "dropout between the layers": {"dropout": {"first": 0.0, "last": 0.0}},
    "dropout before the head": {"dropout": {"first": 0.0, "layer": 0.0}},
    "dropout everywhere": {},
    "input weights": {"dropout": SILENT, "weights": ("layer.weight_ih_l0", "layer.weight_ih_l1")},
    "state weights": {"dropout": SILENT, "weights": ("layer.weight_hh_l0", "layer.weight_hh_l1")},
}

# Model errors beside the sampling error, of the covariance and of the mean in standard deviations. Dropout removes
# whole entries, which is no small change to a gate: the further back it lies, the less a linear map says of it. Weights
# read by every step are correlated with the state they meet, which is left out (rank 0 knows no covariances).
STATED: dict[str, tuple[float, float]] = {
    "dropout of the input": (0.27, 0.17),
    "dropout between the layers": (0.15, 0.06),
    "dropout before the head": (0.02, 0.02),
    "dropout everywhere": (0.1, 0.09),
    "input weights": (0.18, 0.15),
    "state weights": (0.1, 0.13),
}
SAMPLED = [
    *((nn.LSTM, name) for name in ("dropout everywhere", "input weights", "state weights")),
    *((nn.GRU, name) for name in ("dropout between the layers", "dropout everywhere")),
    *((nn.RNN, name) for name in STATED),
]


@pytest.mark.parametrize("kind, name", SAMPLED, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_recurrent_network_against_sampling(kind, name):
    settings = dict(NOISES[name])
    weights = settings.pop("weights", ())
    settings["posterior"] = {
        n: (0.2 * p.detach().abs().mean()).square().expand(p.shape).clone()
        for n, p in trained(kind)[0].named_parameters()
        if n in weights
    }
    of_covariance, of_mean = STATED[name]
    off, relative, by_sampling = errors(kind, settings)
    assert relative < 2 * by_sampling + of_covariance, (relative, by_sampling)
    assert off < 0.02 + of_mean, off


def test_forgetting_the_correlation_of_steps_would_fail():
    model, x = trained(nn.RNN)
    belief = favour.compile(model, x, method="diag")(x)
    _, matrix = moments(favour.sample(model, x, SAMPLES, generator=torch.Generator().manual_seed(0)))
    assert relative_error(belief.covariance_matrix, matrix) > 0.4
