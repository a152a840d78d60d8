"""ivon-opt, bayesian-torch, torchbnn and Pyro against their own samples."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from test_adapters import DRAWS, agrees, drawn, iris, network, peer, same, state
from torch import Tensor, nn
from torch.testing import assert_close

import favour
from favour import adapters
from favour.errors import InvalidType, InvalidValue, UnknownName, UnsupportedOperation

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


# ------------------------------------------------------------------------ IVON


def ivon_trained(groups: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    ivon = peer("ivon")
    model = network()
    given: Any = model.parameters()
    if groups:
        given = [{"params": list(model[4].parameters()), "ess": 400.0}, {"params": list(model[0].parameters())}]
    optimizer = ivon.IVON(given, lr=0.1, ess=150.0, beta2=0.99, weight_decay=1e-2, hess_init=0.5)
    x, y = iris()
    for _ in range(200):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("groups", [False, True])
def test_ivon_agrees_with_its_samples(groups):
    model, optimizer = ivon_trained(groups)
    before, x = state(model), iris()[0][::10]
    hessians = [group["hess"].clone() for group in optimizer.param_groups]
    adapted = adapters.adapt(optimizer, model)
    samples = []
    for _ in range(DRAWS):
        with optimizer.sampled_params(), torch.no_grad():
            samples.append(model(x))
    same(model, before)
    agrees(adapted, x, torch.stack(samples))
    same(model, before)
    for group, hessian in zip(optimizer.param_groups, hessians, strict=True):
        assert_close(group["hess"], hessian, rtol=0, atol=0)
    assert adapted.model is model and ("2.weight" in adapted.posterior.names) is not groups


def test_ivon_errors():
    ivon = peer("ivon")
    model = network()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=150.0)
    with pytest.raises(InvalidValue, match="has made no step"):
        adapters.adapt(optimizer, model)
    model, optimizer = ivon_trained()
    with pytest.raises(UnknownName, match="pass the very model"):
        adapters.adapt(optimizer, network())
    with pytest.raises(InvalidType, match=r"adapt\(obj, model\)"):
        adapters.adapt(optimizer)
    with pytest.raises(InvalidType, match=r"pass the `ivon\.IVON`"):
        adapters.from_ivon(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.param_groups[0]["hess"] -= 10.0
    with pytest.raises(InvalidValue, match="not positive"):
        adapters.adapt(optimizer, model)


# ------------------------------------------------- bayesian-torch and torchbnn


class ByHand(nn.Module):
    """Layers that return (output, kl), their kl summed up, as bayesian-torch's own examples do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = peer("bayesian_torch.layers")
        linear = getattr(layers, f"Linear{kind}")
        self.first, self.last = linear(4, 12, bias=False), linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        total: Any = 0
        h, kl = self.first(x)
        total += kl
        h, kl = self.last(torch.relu(h))
        return h, total + kl


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[:300], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(y[:300])


def learned(model: nn.Module, x: Tensor, y: Tensor, steps: int = 120) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        F.cross_entropy(output[0] if isinstance(output, tuple) else output, y).backward()
        optimizer.step()
    return model


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """The library's samples: a forward pass is a draw."""
    with torch.inference_mode():
        results = [model(x) for _ in range(DRAWS)]
    return torch.stack([r[0] if isinstance(r, tuple) else r for r in results]).clone()


def described(model: nn.Module, x: Tensor) -> adapters.Adapted:
    """The belief describes the model's samples, and the model stays as it is."""
    samples = outputs(model, x)
    before, flags = state(model), [m.training for m in model.modules()]
    adapted = adapters.adapt(model)
    agrees(adapted, x, samples)
    same(model, before)
    assert [m.training for m in model.modules()] == flags
    return adapted


@pytest.mark.parametrize("kind", ["Reparameterization", "Flipout"])
def test_bayesian_torch_agrees_with_its_samples(kind):
    torch.manual_seed(0)
    x, y = iris()
    model = learned(ByHand(kind), x, y)
    adapted = described(model, x[::10])
    assert "model.first.bias" not in adapted.posterior.names
    assert isinstance(adapted.model(x), Tensor)
    assert_close(adapted.posterior.gaussian("model.first.weight").variance(), F.softplus(model.first.rho_weight) ** 2)


def test_bayesian_torch_convolutions_agree_with_their_samples():
    """`dnn_to_bnn` makes layers that return their output alone."""
    convert = peer("bayesian_torch.models.dnn_to_bnn").dnn_to_bnn
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Sequential(nn.Conv2d(4, 10, 4, groups=2, bias=False), nn.Flatten()),
    )
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -4.0}
    convert(model, prior | {"type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    x, y = digits()
    adapted = described(learned(model, x, y), x[:4])
    assert "2.0.bias" not in adapted.posterior.names and "2.0.weight" in adapted.posterior.names


def test_bayesian_torch_transposed_convolution():
    """The replacement computes what the layer does at its means."""
    layers = peer("bayesian_torch.layers")
    torch.manual_seed(0)
    for layer, shape in (
        (layers.ConvTranspose2dReparameterization(4, 2, 3, stride=2, output_padding=1, groups=2), (2, 4, 3, 3)),
        (layers.Conv1dFlipout(2, 3, 3, dilation=2), (2, 2, 9)),
        (layers.Conv3dReparameterization(1, 2, 2, 0, 1, 0, -3.0), (2, 1, 3, 3, 3)),
    ):
        x, adapted = torch.randn(shape), adapters.adapt(layer)
        for rho in (layer.rho_kernel, layer.rho_bias):
            nn.init.constant_(rho, -60.0)
        assert_close(adapted.model(x), layer(x)[0])


def test_layers_without_a_replacement_are_refused_together():
    layers = peer("bayesian_torch.layers")
    model = nn.ModuleDict({"a": layers.LSTMReparameterization(3, 4), "b": layers.LSTMFlipout(3, 4)})
    with pytest.raises(UnsupportedOperation, match=r"`a` is a LSTMReparameterization.*`b` is a LSTMFlipout"):
        adapters.adapt(model)
    with pytest.raises(InvalidValue, match="no bayesian-torch layers"):
        adapters.from_bayesian_torch(network())
    with pytest.raises(InvalidType, match=r"pass a torch\.nn\.Module"):
        adapters.from_bayesian_torch(3)  # type: ignore[arg-type]


def torchbnn_network(bnn: Any) -> nn.Module:
    return nn.Sequential(
        bnn.BayesConv2d(0, 0.05, 1, 4, 3, stride=2, padding=1),
        bnn.BayesBatchNorm2d(0, 0.05, 4),
        nn.ReLU(),
        nn.Flatten(),
        bnn.BayesLinear(0, 0.05, 64, 10, bias=False),
    )


def test_torchbnn_agrees_with_its_samples():
    bnn = peer("torchbnn")
    torch.manual_seed(0)
    x, y = digits()
    model = learned(torchbnn_network(bnn), x, y).eval()
    adapted = described(model, x[:4])
    assert "4.bias" not in adapted.posterior.names and isinstance(adapted.model[1], nn.BatchNorm2d)


def test_torchbnn_errors():
    bnn = peer("torchbnn")
    model = torchbnn_network(bnn)
    bnn.utils.freeze(model)
    with pytest.raises(InvalidValue, match=r"`0` is frozen.*unfreeze"):
        adapters.adapt(model)
    with pytest.raises(UnsupportedOperation, match=r"`0` is a BayesConv2d.*zero padding"):
        adapters.adapt(nn.Sequential(bnn.BayesConv2d(0, 0.1, 1, 1, 3, padding_mode="circular")))
    with pytest.raises(InvalidValue, match="no torchbnn layers"):
        adapters.from_torchbnn(network())


def test_a_layer_under_two_names_is_replaced_once():
    """One layer is one draw, wherever it hangs."""
    bnn = peer("torchbnn")
    layer = bnn.BayesLinear(0, 0.1, 3, 3)
    adapted = adapters.adapt(nn.ModuleDict({"a": layer, "b": layer}))
    assert adapted.model["a"] is adapted.model["b"] and adapted.posterior.names == ("a.weight", "a.bias")


# ------------------------------------------------------------------------ Pyro


@functools.cache
def pyro_network(constrained: bool = False) -> tuple[Any, Any]:
    """A regression whose noise is a latent site too, and its trained guide."""
    pyro = peer("pyro")
    dist, PyroModule, PyroSample = pyro.distributions, pyro.nn.PyroModule, pyro.nn.PyroSample

    class Regression(PyroModule):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = PyroModule[nn.Linear](4, 8)
            self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([8, 4]).to_event(2))
            self.last = PyroModule[nn.Linear](8, 2)
            self.last.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 8]).to_event(2))
            self.last.bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            mean = self.last(torch.tanh(self.hidden(x)))
            noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
            with pyro.plate("data", x.shape[0]):
                pyro.sample("observed", dist.Normal(mean, noise).to_event(1), obs=y)
            return mean * noise if constrained else mean

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    model = Regression()
    guide = pyro.infer.autoguide.AutoNormal(model, init_scale=0.05)
    x = iris()[0]
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), pyro.infer.Trace_ELBO())
    for _ in range(100):
        svi.step(x, x[:, 2:])
    return model, guide


def test_pyro_agrees_with_its_samples():
    pyro = peer("pyro")
    model, guide = pyro_network()
    x = iris()[0][::10]
    before, learned_guide, store = state(model), state(guide), dict(pyro.get_param_store().items())
    adapted = adapters.adapt(guide, model)
    with pyro.plate("draws", DRAWS), torch.no_grad():  # the guide's own draws, all at once
        sites = guide()
    weights = {f"sites.{name}": value for name, value in sites.items() if name != "noise"}
    agrees(adapted, x, drawn(adapted.model, weights, x))
    same(model, before)
    same(guide, learned_guide)
    assert list(pyro.get_param_store()) == list(store)
    assert adapted.posterior.names == ("sites.hidden.weight", "sites.last.weight", "sites.last.bias")


def test_pyro_program_computes_what_the_model_does():
    """With every site conditioned on a draw of the guide, Pyro's own run gives the same output."""
    pyro = peer("pyro")
    model, guide = pyro_network()
    x = iris()[0][:7]
    adapted = adapters.adapt(guide, model)
    with torch.no_grad():
        values = guide()
        expected = pyro.condition(model, data=values)(x)
        weights = {f"sites.{name}": value for name, value in values.items() if name != "noise"}
        assert_close(torch.func.functional_call(adapted.model, weights, (x,)), expected)


def test_pyro_errors():
    pyro = peer("pyro")
    model, guide = pyro_network(constrained=True)
    with pytest.raises(UnsupportedOperation, match="depends on the sites `noise`"):
        adapters.adapt(guide, model)
    with pytest.raises(InvalidValue, match="never been run"):
        adapters.adapt(pyro.infer.autoguide.AutoNormal(model), model)
    with pytest.raises(InvalidType, match="AutoNormal"):
        adapters.from_pyro(pyro.infer.autoguide.AutoDelta(model), model)
    with pytest.raises(InvalidType, match="pass the PyroModule"):
        adapters.from_pyro(guide, lambda x: x)  # type: ignore[arg-type]


def test_beliefs_of_adapted_models_survive_saving(tmp_path):
    """A predictor over an eigenbasis or shared columns is stored like any other."""
    torch.manual_seed(0)
    model, x = network(), iris()[0][:4]
    basis, other = torch.linalg.qr(torch.randn(12, 12))[0], torch.linalg.qr(torch.randn(4, 4))[0]
    posterior = favour.Posterior({"0.weight": favour.Rotated(0.01 * torch.rand(12, 4), other, basis)})
    predict = favour.compile(model, x, posterior=posterior)
    predict.save(tmp_path / "predictor.favour")
    with torch.no_grad():
        assert_close(favour.load(tmp_path / "predictor.favour")(x).covariance_matrix, predict(x).covariance_matrix)
