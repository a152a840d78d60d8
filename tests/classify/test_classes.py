"""A softmax or sigmoid inside the model is taken once: against the same network without it, and against samples."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import favour
from favour.belief import Belief
from favour.errors import AmbiguousOutputs, InvalidValue, UnsupportedOperation
from favour.rating.models import PredictorRater

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(3))


class Network(nn.Module):
    """Logits with a spread worth averaging over, and what is done to them."""

    def __init__(self, end=lambda z: z, outputs=3, p=0.3):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.first, self.drop, self.last = nn.Linear(4, 64), nn.Dropout(p), nn.Linear(64, outputs)
        self.end = end
        with torch.no_grad():
            for layer, size in ((self.first, 1.0), (self.last, 0.4)):
                layer.weight.copy_(size * torch.randn(layer.weight.shape, generator=g))
                layer.bias.copy_(torch.randn(layer.bias.shape, generator=g))

    def forward(self, x):
        return self.end(self.last(self.drop(self.first(x).relu())))


@functools.cache  # no test changes a predictor
def compiled(end=lambda z: z, outputs=3):
    return favour.compile(Network(end, outputs), X[:2])


@functools.cache
def sampled(end):
    z = compiled(end).sample(X, n=20_000, generator=torch.Generator().manual_seed(0))
    return z.softmax(-1).mean(0)


def by_hand(z):
    return torch.exp(z) / torch.exp(z).sum(-1, keepdim=True)


SOFTMAXES = {
    "softmax": lambda z: z.softmax(-1),
    "module": nn.Softmax(dim=1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "exp of log_softmax": lambda z: F.log_softmax(z, -1).exp(),
    "log of softmax": lambda z: (z.softmax(-1) + 1e-9).log(),
    "clamped": lambda z: z.softmax(-1).clamp(1e-6, 1 - 1e-6),
    "by hand": by_hand,
    "double": lambda z: F.softmax(z.double(), -1),
    "reshaped": lambda z: z.view(-1, 3, 1).softmax(1).squeeze(2),
    "transposed": lambda z: z.unsqueeze(1).transpose(1, 2).softmax(1).flatten(1),
    "temperature": lambda z: (z / 1.5).softmax(-1),
    "less logsumexp": lambda z: (z - z.logsumexp(-1, keepdim=True)).exp(),
    "log by hand": lambda z: z - torch.logsumexp(z, 1, True),
}
BEFORE = {"temperature": lambda z: z / 1.5}
PLAIN = compiled.__wrapped__.__defaults__[0]


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("estimator", ["auto", "nodes", "head"])
def test_a_softmax_in_the_graph_is_taken_once(name, estimator):
    before = BEFORE.get(name, PLAIN)
    want = compiled(before).probabilities(X, estimator=estimator)
    predict = compiled(SOFTMAXES[name])
    for kind in (None, "softmax", "probabilities"):
        p = predict.probabilities(X, kind=kind, estimator=estimator)
        torch.testing.assert_close(p, want.to(p.dtype), atol=2e-5, rtol=2e-4)
    truth = sampled(before)
    if name != "temperature" or estimator == "nodes":  # a head of eight draws
        assert (predict.probabilities(X, estimator=estimator) - truth).abs().max() < 0.03


SIGMOIDS = {
    "sigmoid": torch.sigmoid,
    "log_sigmoid": F.logsigmoid,
    "clamped": lambda z: z.sigmoid().clamp(1e-7, 1 - 1e-7),
}


@pytest.mark.parametrize("name", SIGMOIDS)
@pytest.mark.parametrize(("outputs", "kind"), [(1, "binary"), (3, "multilabel"), (3, "ordinal")])
def test_a_sigmoid_in_the_graph_is_taken_once(name, outputs, kind):
    want = compiled(outputs=outputs).probabilities(X, kind=kind)
    predict = compiled(SIGMOIDS[name], outputs)
    torch.testing.assert_close(predict.probabilities(X, kind=kind), want, atol=2e-5, rtol=2e-4)
    if kind != "ordinal":
        torch.testing.assert_close(predict.probabilities(X), want, atol=2e-5, rtol=2e-4)


def test_a_sigmoid_of_one_number_per_input():
    predict = compiled(lambda z: z.squeeze(1).sigmoid(), 1)
    torch.testing.assert_close(
        predict.probabilities(X), compiled(outputs=1).probabilities(X, kind="binary"), atol=2e-5, rtol=2e-4
    )


class Other(Network):
    """Probabilities that are no single link's."""

    def __init__(self, end, outputs):
        super().__init__(outputs=outputs)
        self.end = end
        with torch.no_grad():  # a spread that the rules of such operations can follow
            self.last.weight.mul_(0.2)


GIVEN = {  # what becomes of six logits, and how many numbers that is
    "product of softmaxes": lambda z: (z[:, :2].softmax(-1)[:, :, None] * z[:, 2:5].softmax(-1)[:, None]).flatten(1),
    "mean of softmaxes": lambda z: (z[:, :3].softmax(-1) + z[:, 3:].softmax(-1)) / 2,
    "stacked softmaxes": lambda z: torch.stack([z[:, :3].softmax(-1), z[:, 3:].softmax(-1)], 1).mean(1),
    "normalised": lambda z: F.normalize(F.softplus(z), p=1, dim=-1),
    "quotient": lambda z: (z.square() + 2) / (z.square() + 2).sum(-1, keepdim=True),
    "gated": lambda z: torch.einsum("be,bec->bc", z[:, :2].softmax(-1), z[:, 2:].view(-1, 2, 2).softmax(-1)),
    "halves": lambda z: torch.cat([z[:, :1].sigmoid(), 1 - z[:, :1].sigmoid()], -1),
}


@pytest.mark.parametrize("name", GIVEN)
def test_other_probabilities_are_used_as_they_are(name):
    predict = favour.compile(Other(GIVEN[name], 6), X[:2])
    belief = predict(X)
    p = predict.probabilities(X)
    torch.testing.assert_close(p.sum(-1), torch.ones(len(X)))
    torch.testing.assert_close(p, belief.mean, atol=0.06, rtol=0)
    truth = predict.sample(X, n=20_000, generator=torch.Generator().manual_seed(0)).mean(0)
    assert (p - truth).abs().max() < 0.08
    with pytest.raises(UnsupportedOperation, match="no logits"):
        predict.logits(X)
    if name != "normalised" and name != "quotient" and name != "gated":
        with pytest.raises(UnsupportedOperation, match="no logits"):
            predict.draws(X)


def test_one_probability_of_two_classes():
    predict = favour.compile(Other(lambda z: z.softmax(-1)[:, 1], 2), X[:2])
    p = predict.probabilities(X)
    assert p.shape == (12, 2)
    torch.testing.assert_close(p[:, 1], predict(X).mean)
    product = favour.compile(Other(lambda z: z[:, :3].sigmoid() * z[:, 3:].sigmoid(), 6), X[:2])
    torch.testing.assert_close(product.probabilities(X), product(X).mean)
    torch.testing.assert_close(product.probabilities(X, kind="multilabel"), product(X).mean)
    with pytest.raises(InvalidValue, match="do not sum to one"):
        product.probabilities(X, kind="softmax")


def test_a_kind_that_does_not_fit_the_link_is_refused():
    with pytest.raises(InvalidValue, match="ends in a sigmoid"):
        compiled(torch.sigmoid).probabilities(X, kind="softmax")
    with pytest.raises(InvalidValue, match="ends in a softmax"):
        compiled(SOFTMAXES["softmax"]).probabilities(X, kind="multilabel")


def test_masked_logits_are_not_made_a_belief_of():
    mask = torch.tensor([False, False, True])
    predict = favour.compile(Other(lambda z: z.masked_fill(mask, float("-inf")).softmax(-1), 3), X[:2])
    p = predict.probabilities(X)
    assert p.isfinite().all()
    assert (p[:, 2] == 0).all()
    two = favour.compile(Other(lambda z: z[:, :2].softmax(-1), 3), X[:2]).probabilities(X)
    torch.testing.assert_close(p[:, :2], two, atol=0.05, rtol=0)


def test_logits_outside_the_graphs_that_are_meant():
    # Linear outputs, whatever their values, are logits; so are those of other operations that do not sum to one.
    model = Network()
    with torch.no_grad():
        model.last.weight.zero_()
        model.last.bias.copy_(torch.tensor([0.2, 0.3, 0.5]))
    predict = favour.compile(model, X[:2])
    want = model.last.bias.softmax(-1).expand(12, 3)
    torch.testing.assert_close(predict.probabilities(X), want)
    scaled = compiled(lambda z: 3 * z.tanh())
    p = scaled.probabilities(X, estimator="nodes")
    torch.testing.assert_close(p, favour.probabilities(scaled(X)))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_logits_draws_and_scores_know_the_link(name):
    bare, predict = compiled(), compiled(SOFTMAXES[name])
    torch.testing.assert_close(predict.logits(X).mean, bare(X).mean)
    torch.testing.assert_close(predict.logits(X).covariance_matrix, bare(X).covariance_matrix)
    torch.testing.assert_close(predict.draws(X), bare.draws(X))
    torch.testing.assert_close(bare.logits(X).covariance_matrix, bare(X).covariance_matrix)


def test_a_predictor_that_moves_learns_or_is_saved_keeps_its_link(tmp_path):
    model = Network(SOFTMAXES["softmax"])
    predict = favour.compile(model, X[:2])
    want = predict.probabilities(X)
    predict.save(tmp_path / "p.favour")
    torch.testing.assert_close(favour.load(tmp_path / "p.favour").probabilities(X), want)
    with torch.no_grad():
        model.last.bias += torch.tensor([2.0, 0.0, 0.0])
    moved = predict.probabilities(X)
    assert (moved[:, 0] > want[:, 0]).all()
    torch.testing.assert_close(moved, favour.compile(model, X[:2]).probabilities(X))
    predict.double()
    torch.testing.assert_close(predict.probabilities(X.double()).float(), moved, atol=1e-5, rtol=1e-4)


def test_compiled_code_takes_the_softmax_once():
    predict = compiled(SOFTMAXES["softmax"])
    fast = torch.compile(lambda x: predict.probabilities(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(X), predict.probabilities(X), atol=1e-5, rtol=1e-4)


def test_many_classes_with_a_softmax():
    model = nn.Sequential(nn.Linear(4, 400), nn.Dropout(0.2), nn.Linear(400, 300))
    want = favour.compile(model, X[:2], task="classification").probabilities(X)
    predict = favour.compile(nn.Sequential(*model, nn.Softmax(-1)), X[:2], task="classification")
    torch.testing.assert_close(predict.probabilities(X), want, atol=1e-5, rtol=1e-3)


# ---- bare beliefs


def test_a_bare_belief_that_sums_to_one_is_not_taken_for_logits():
    belief = compiled(SOFTMAXES["softmax"])(X)
    with pytest.warns(AmbiguousOutputs, match="sum to one"):
        p = favour.probabilities(belief)
    torch.testing.assert_close(p, belief.mean)
    torch.testing.assert_close(favour.probabilities(belief, kind="probabilities"), belief.mean)
    told = favour.probabilities(belief, kind="softmax")
    assert (told - belief.mean).abs().max() > 0.05
    with pytest.warns(AmbiguousOutputs, match="sigmoid already"):
        favour.probabilities(compiled(torch.sigmoid)(X), kind="multilabel")
    with pytest.warns(AmbiguousOutputs, match="a softmax is taken"):
        favour.probabilities(compiled(torch.sigmoid)(X))
    favour.probabilities(compiled(torch.sigmoid)(X), kind="softmax")
    with pytest.raises(InvalidValue, match="no probabilities"):
        favour.probabilities(compiled()(X), kind="probabilities")


UNDECLARED = {  # nothing in the graph says that these sum to one, nor do the propagated means of all of them
    "difference of exponentials": lambda z: (z / 4 - (z / 4).exp().sum(-1, keepdim=True).log()).exp(),
    "through a product": lambda z: (z / 4).exp() * torch.exp(-(z / 4).logsumexp(-1, keepdim=True)),
    "cut and divided": lambda z: F.relu(z + 4) / (F.relu(z + 4).sum(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_values_of_the_network_tell_where_the_graph_does_not(name):
    predict = favour.compile(Other(UNDECLARED[name], 3), X[:2])
    p = predict.probabilities(X)
    torch.testing.assert_close(p.sum(-1), torch.ones(12))
    truth = predict.sample(X, n=4000, generator=torch.Generator().manual_seed(0)).mean(0)
    twice = favour.probabilities(predict(X), kind="softmax")
    assert (p - truth).abs().max() < 0.5 * (twice - truth).abs().max()
    with pytest.raises(UnsupportedOperation, match="no softmax or sigmoid"):
        predict.logits(X)
    with pytest.raises(UnsupportedOperation, match="no softmax or sigmoid"):
        predict.jsd(X)


def test_scores_suspect_means_that_nearly_sum_to_one_or_lie_between_zero_and_one():
    with pytest.raises(InvalidValue, match="taken a softmax already"):
        favour.scores.jsd(favour.compile(Other(SOFTMAXES["clamped"], 3), X[:2])(X))
    with pytest.warns(AmbiguousOutputs, match="sigmoid already"):
        favour.scores.jsd(compiled(torch.sigmoid)(X))


def test_bare_logits_are_not_suspected():
    g = torch.Generator().manual_seed(0)
    for _ in range(200):  # warnings are errors
        favour.probabilities(Belief(torch.randn(2, 2, generator=g), diag=torch.ones(2, 2)))
    favour.probabilities(Belief.point(torch.zeros(0, 3)))


def test_scores_refuse_probabilities_and_take_their_draws():
    bare, predict = compiled(), compiled(SOFTMAXES["softmax"])
    for score in (favour.scores.jsd, favour.scores.entropy, favour.scores.entropy_split, favour.scores.kl):
        with pytest.raises(InvalidValue, match=r"predict\.logits"):
            score(predict(X))
        score(predict.logits(X))
    g = torch.Generator().manual_seed(0)
    z = bare.sample(X, n=500, generator=g)
    torch.testing.assert_close(favour.scores.entropy(z.softmax(-1)), favour.scores.entropy(z), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(favour.scores.jsd(z.softmax(-1)), favour.scores.jsd(z), atol=1e-5, rtol=1e-3)


# ---- what is made of a predictor


@pytest.mark.parametrize(("name", "link"), [("softmax", "softmax"), ("log_softmax", "softmax"), ("sigmoid", "binary")])
def test_exported_and_rated_probabilities_know_the_link(tmp_path, name, link):
    outputs = 3 if link == "softmax" else 1
    end = SOFTMAXES[name] if link == "softmax" else SIGMOIDS[name]
    predict, bare = compiled(end, outputs), compiled(outputs=outputs)
    want = favour.load_exported(favour.export(bare, tmp_path / "bare.pt2", kind=link))(X)
    model = favour.load_exported(favour.export(predict, tmp_path / "model.pt2"))
    have = model(X)
    assert model.link == link
    assert "probabilities" in model.outputs[0].meaning
    for key in ("probabilities", "jsd"):
        torch.testing.assert_close(torch.tensor(have[key]), torch.tensor(want[key]), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(torch.tensor(have["mean"]), predict(X).mean, atol=1e-5, rtol=1e-4)
    rated, wanted = PredictorRater(predict), PredictorRater(bare, link)
    for key in ("probabilities", "jsd"):
        have, want = rated(X.numpy())[key], wanted(X.numpy())[key]
        torch.testing.assert_close(torch.tensor(have), torch.tensor(want), atol=1e-5, rtol=1e-3)
    assert rated.kind == link


def test_exported_and_rated_probabilities_without_logits(tmp_path):
    predict = favour.compile(Other(GIVEN["product of softmaxes"], 6), X[:2])
    model = favour.load_exported(favour.export(predict, tmp_path / "model.pt2"))
    answer, rated = model(X), PredictorRater(predict)(X.numpy())
    for found in (answer, rated):
        torch.testing.assert_close(torch.tensor(found["probabilities"]), predict.probabilities(X), atol=1e-5, rtol=1e-4)
        assert "jsd" not in found
    with pytest.raises(InvalidValue, match="ends in a sigmoid"):
        favour.export(compiled(torch.sigmoid), tmp_path / "other.pt2", kind="softmax")


def test_two_outputs_one_of_them_with_a_softmax(tmp_path):
    predict = favour.compile(Network(lambda z: (z, z.softmax(-1))), X[:2])
    path = favour.export(predict, tmp_path / "two.pt2", output="1")
    p = torch.tensor(favour.load_exported(path)(X)["probabilities"])
    torch.testing.assert_close(p, favour.probabilities(predict(X)[0]), atol=1e-5, rtol=1e-3)
    plain, without = predict.logits(X)
    torch.testing.assert_close(without.mean, plain.mean)


def test_streamed_probabilities_know_the_link():
    predict = compiled(SOFTMAXES["softmax"])
    (found,) = predict.stream([X], results=["probabilities"], progress=False)
    torch.testing.assert_close(found["probabilities"], predict.probabilities(X))
