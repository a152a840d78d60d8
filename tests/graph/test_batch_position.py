"""Models whose batch is not in front, whose code counts inputs, or that have no batch: beliefs against samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import favour

DRAWS = 2000


class TimeDistributed(nn.Module):
    """A small convolutional network on every frame."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.2))
        self.last = nn.Linear(3 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frame(x.flatten(0, 1))
        return self.last(y.reshape(x.shape[0], x.shape[1], -1)).mean(1)


class Heads(nn.Module):
    """Attention with its heads folded into the batch, three projections stacked in front."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.last = nn.Linear(6, 18), nn.Dropout(0.1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.inner(x).reshape(batch, length, 3, 2, 3).permute(2, 0, 3, 1, 4).flatten(1, 2).unbind(0)
        weights = self.drop(torch.bmm(q, k.transpose(1, 2)).softmax(-1))
        y = torch.bmm(weights, v).view(batch, 2, length, 3).transpose(1, 2).reshape(batch, length, 6)
        return self.last(self.drop(y)).mean(1)


class PositionsFirst(nn.Module):
    """torch's attention as it is by default, between transpositions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(6, 2, dropout=0.1), nn.Linear(6, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x.transpose(0, 1))
        y = y + self.attention(y, y, y, need_weights=False)[0]
        return self.last(y.mean(0))


class Channels(nn.Module):
    """Every channel alone, as PatchTST has them, and a count of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.drop, self.last = nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, length = x.shape
        y = x.reshape(batch * channels, 1, length).unfold(-1, 4, 2).squeeze(1)
        y = self.last(self.drop(torch.relu(self.patch(y))).flatten(1))
        return y.view(len(x), channels, 2).sum(1)


class Graph(nn.Module):
    """Two rounds of sums over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 6), nn.Linear(6, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges

        def summed(h: Tensor) -> Tensor:
            return torch.zeros_like(h).index_add(0, target, h[source])

        return summed(self.second(self.drop(torch.relu(summed(self.first(x))))))


class Neighbours(nn.Module):
    """Self-loops replaced, indices made as wide as messages, degrees normalised in place, largest messages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 6), nn.Linear(6, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes = x.size(0)
        edges = edges[:, edges[0] != edges[1]]
        source, target = torch.cat([edges, torch.arange(nodes).expand(2, -1)], 1)
        degree = x.new_zeros(nodes).scatter_add_(0, target, x.new_ones(target.size(0)))
        weight = degree.pow_(-0.5)[target].view(-1, 1)

        h = torch.relu(self.first(x))
        messages = self.drop(h)[source] * weight
        wide = target.view(-1, 1).expand_as(messages)
        summed = x.new_zeros(nodes, 6).scatter_add_(0, wide, messages)
        wide = target.view(-1, 1).expand(-1, messages.size(1))
        largest = x.new_zeros(nodes, 6).scatter_reduce_(0, wide, messages.detach(), "amax", include_self=False)
        return self.second(summed + 0.1 * largest)


MODELS = {
    TimeDistributed: (3, 3, 1, 4, 4),
    Heads: (3, 4, 6),
    PositionsFirst: (3, 4, 6),
    Channels: (3, 3, 6),
}


def drawn(model: nn.Module, *inputs: Tensor, copies: bool = True) -> Tensor:
    """(DRAWS, batch, outputs) from torch's own dropout, norms frozen."""
    model = model.eval()
    for module in model.modules():
        if "Dropout" in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
            module.training = True
    with torch.no_grad():
        if not copies:
            return torch.stack([model(*inputs) for _ in range(DRAWS)])
        wide = [x.repeat(DRAWS, *[1] * (x.ndim - 1)) for x in inputs]
        return model(*wide).unflatten(0, (DRAWS, -1))


def within_sampling_error(mean: Tensor, variance: Tensor, samples: Tensor) -> None:
    """Means within 5 standard errors and a tenth of a deviation, the sum of variances within 10% and its own error."""
    deviation = samples.std(0)
    assert bool(((mean - samples.mean(0)).abs() <= (5 * DRAWS**-0.5 + 0.1) * deviation + 1e-6).all())
    torch.testing.assert_close(variance.sum(), samples.var(0).sum(), rtol=0.1 + 5 * (2 / DRAWS) ** 0.5, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_beliefs_of_models_that_move_the_batch_agree_with_samples(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(MODELS[kind])
    belief = favour.compile(model.eval(), x, check=False)(x)
    within_sampling_error(belief.mean, belief.variance, drawn(model, x))


def test_a_graph_of_nodes_is_one_event() -> None:
    torch.manual_seed(0)
    model, x, edges = Graph(), torch.randn(5, 4), torch.randint(0, 5, (2, 12))
    predict = favour.compile(model.eval(), (x, edges), batched=False, check=False)
    belief = predict(x, edges)
    assert belief.mean.shape == (1, 5, 2)
    samples = drawn(model, x, edges, copies=False)
    within_sampling_error(belief.mean[0], belief.variance[0], samples)
    other = torch.randint(0, 5, (2, 12))
    torch.testing.assert_close(predict(x, other).mean[0], model.eval()(x, other), atol=0.5, rtol=0.5)
    covariance = torch.cov(samples.flatten(1).T)
    assert (belief.covariance_matrix[0] - covariance).norm() < (0.05 + 5 * DRAWS**-0.5) * covariance.norm()


def test_sizes_that_follow_from_values_in_one_event() -> None:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 2, 4, 1], [1, 2, 0, 2, 3, 1]])
    model, x = Neighbours(), torch.randn(5, 4)
    predict = favour.compile(model.eval(), (x, edges), batched=False)
    samples = drawn(model, x, edges, copies=False)
    within_sampling_error(predict(x, edges).mean[0], predict(x, edges).variance[0], samples)
    assert favour.check(predict, (x, edges), n=500).verdict == "trust it"


class Groups(nn.Module):
    """Multiplies the messages of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.drop(self.first(x))
        return torch.ones(5, 2).scatter_reduce(0, target.view(-1, 1).expand_as(h), h, "prod")


def test_products_of_groups_are_refused_in_one_line() -> None:
    with pytest.raises(favour.errors.UnsupportedOperation, match="reduce='prod'") as found:
        favour.compile(Groups().eval(), (torch.randn(5, 4), torch.tensor([0, 0, 1, 2, 2])), batched=False)
    assert len(str(found.value)) < 300


def test_what_is_saved_of_one_event_predicts_the_same(tmp_path) -> None:
    torch.manual_seed(0)
    model, x, edges = Graph(), torch.randn(5, 4), torch.randint(0, 5, (2, 12))
    predict = favour.compile(model.eval(), (x, edges), batched=False, check=False)
    predict.save(tmp_path / "graph.favour")
    torch.testing.assert_close(
        favour.load(tmp_path / "graph.favour")(x, edges).variance, predict(x, edges).variance, rtol=1e-6, atol=1e-8
    )


class Mixing(nn.Module):
    """Subtracts the mean of the batch, and folds it."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.drop = nn.Linear(4, 2), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x - x.mean(0)).transpose(0, 1)
        return self.last(y).sum(0)


def test_a_model_that_mixes_its_inputs_is_refused_on_one_screen() -> None:
    with pytest.raises(favour.errors.UnsupportedOperation, match="mixes rows of dimension 0") as found:
        favour.compile(Mixing().eval(), torch.randn(3, 5, 4))
    assert str(found.value).count("\n") < 25
    belief = favour.compile(Mixing().eval(), torch.randn(3, 5, 4), batched=False, check=False)(torch.randn(3, 5, 4))
    assert belief.mean.shape == (1, 3, 2)


def test_arrays_and_lists_stand_for_tensors() -> None:
    layers = nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)
    assert favour.compile(nn.Sequential(*layers), [[1.0, 2, 3]], check=False)([[0, 1.0, 2]]).mean.shape == (1, 2)
    model, x = nn.Sequential(*layers).double(), torch.randn(2, 3).double()
    predict = favour.compile(model, x, check=False)
    for given in (x.numpy(), x.float().numpy(), x.tolist()):
        torch.testing.assert_close(predict(given).variance, predict(x).variance, rtol=1e-5, atol=1e-6)
