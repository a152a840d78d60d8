"""What happens to a predictor when its model is changed behind its back: followed, refused, or said."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import favour
from favour.errors import ChangedModel, InvalidValue, StalePredictor


def make_net(p=0.2):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 3)]
    return nn.Sequential(*layers)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def afresh(model, **options):
    """What a predictor made now says: it has nothing old to remember."""
    return favour.compile(copy.deepcopy(model), X, **options)(X)


def assert_follows(predict, model, **options):
    belief, expected = predict(X), afresh(model, **options)
    torch.testing.assert_close(belief.mean, expected.mean)
    torch.testing.assert_close(belief.covariance_matrix, expected.covariance_matrix)


# ------------------------------------------------------------------------------------------------- written values


def by_data(p):
    p.data.mul_(0.5)


def by_numpy(p):
    p.detach().numpy()[:] *= 0.5


def by_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector / 4, model.parameters())


def by_swapped_data(p):
    p.data = p.data * 0.5


def by_average(model):
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, b, n: 0.3 * b)
    average.update_parameters(model)
    for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
        p.data.copy_(q.data * 0.7)


WRITES = {
    "data": lambda m: [by_data(p) for p in m.parameters()],
    "numpy": lambda m: [by_numpy(p) for p in m.parameters()],
    "vector_to_parameters": by_vector,
    "swapped data": lambda m: [by_swapped_data(p) for p in m.parameters()],
    "average": by_average,
    "one weight": lambda m: by_numpy(m[3].weight),
    "one entry": lambda m: m[3].weight.detach().numpy().__setitem__((7, 5), 40.0),
    "state dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "new parameter": lambda m: setattr(m[3], "weight", nn.Parameter(torch.ones(32, 32))),
}


DERIVED = [{"method": "dplr"}, {"secant": True}, {"weight_rank": 4}]  # each keeps something else of the weights


@pytest.mark.parametrize(
    ("write", "options"), [(write, {}) for write in WRITES] + [("numpy", options) for options in DERIVED], ids=str
)
def test_weights_written_behind_torchs_back_are_followed(write, options):
    model = make_net()
    predict = favour.compile(model, X, **options)
    predict(X)
    WRITES[write](model)
    with torch.no_grad():
        assert_follows(predict, model, **options)


def test_probabilities_draws_and_samples_follow_written_weights():
    model = make_net()
    predict = favour.compile(model, X)
    before = predict.probabilities(X), predict.draws(X)
    by_vector(model)
    other = favour.compile(copy.deepcopy(model), X)
    torch.testing.assert_close(predict.probabilities(X), other.probabilities(X))
    torch.testing.assert_close(predict.draws(X), other.draws(X))
    assert not torch.allclose(before[0], predict.probabilities(X))
    g = torch.Generator()
    drawn = predict.sample(X, n=3, generator=g.manual_seed(0))
    torch.testing.assert_close(drawn, other.sample(X, n=3, generator=g.manual_seed(0)))


def test_a_write_to_a_variance_is_followed():
    model = favour.nn.BayesLinear(4, 3)
    predict = favour.compile(model, X)
    predict(X)
    for p in model.parameters():
        p.data.add_(0.3)
    assert_follows(predict, model)


def test_a_few_entries_of_a_large_weight_are_taken_over_by_refresh():
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 2))
    x = torch.randn(2, 400)
    predict = favour.compile(model, x)
    predict(x)
    model[1].weight.detach().numpy()[17, 5:8] = 3.0
    predict.refresh()
    expected = favour.compile(copy.deepcopy(model), x)(x)
    torch.testing.assert_close(predict(x).covariance_matrix, expected.covariance_matrix)


def test_nan_written_behind_torchs_back_is_refused():
    model = make_net()
    predict = favour.compile(model, X)
    predict(X)
    model[3].weight.detach().numpy()[3, 3] = np.nan
    with pytest.raises(InvalidValue, match=r"`3\.weight`"):
        predict(X)


# ---------------------------------------------------------------------------------------------- changed structure


def hooked(model):
    model[1].register_forward_hook(lambda module, args, output: output * 2)


def test_a_hook_of_all_modules_is_refused():
    """torch's global hooks are in no module's own list."""
    predict = favour.compile(make_net(), X)
    before = predict(X).mean
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 2 * output if isinstance(module, nn.ReLU) else None
    )
    try:
        with pytest.raises(StalePredictor, match="hooks of all modules"):
            predict(X)
    finally:
        hook.remove()
    torch.testing.assert_close(predict(X).mean, before)


def method_replaced(model):
    model[1].forward = lambda x: x.tanh()


class Settings:
    def __init__(self):
        self.scale, self.steps = 2.0, 1


class Scaled(nn.Module):
    """Reads what it computes with from attributes of every kind."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.table = {"scales": [1.0, 2.0]}
        self.shift = torch.zeros(3)
        self.settings = Settings()

    def forward(self, x):
        return self.net(x) * self.table["scales"][1] * self.settings.scale + self.shift


ATTRIBUTES = {
    "entry of a list in a dict": (lambda m: m.table["scales"].__setitem__(1, 5.0), "`table` of the model itself"),
    "another tensor": (
        lambda m: setattr(m, "shift", torch.ones(3)),
        "`shift` of the model itself names another tensor",
    ),
    "field of an object": (
        lambda m: setattr(m.settings, "scale", 5.0),
        "`settings` of the model itself: `scale` was 2.0",
    ),
    "another object": (lambda m: setattr(m, "settings", None), "`settings` of the model itself was a Settings"),
    "number to tensor": (lambda m: m.settings.__dict__.update(scale=torch.ones(3)), "`settings` of the model itself"),
}


@pytest.mark.parametrize("change", ATTRIBUTES)
def test_changed_attributes_of_every_kind_are_refused_until_refreshed(change):
    model = Scaled()
    predict = favour.compile(model, X)
    predict(X)
    alter, message = ATTRIBUTES[change]
    alter(model)
    if change == "another object":
        model.settings = type("Other", (), {"scale": 3.0})()
    with pytest.raises(StalePredictor, match=message):
        predict(X)
    predict.refresh()
    assert_follows(predict, model)


GAIN = 1.0


class Hidden(nn.Module):
    """Keeps modules and tensors where torch does not see them, and reads a global and an outer variable."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = make_net()
        self.heads = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))]
        self.tables = {"scale": torch.ones(3)}

    def forward(self, x):
        return self.heads[0](self.net(x)) * self.tables["scale"] * GAIN


HIDDEN = {
    "module in a list": (lambda m, _: m.heads.__setitem__(0, nn.Linear(3, 3)), "`heads` of the model itself"),
    "rate of a module in a list": (lambda m, _: setattr(m.heads[0][1], "p", 0.5), r"`p` of `heads\[0\].1` was 0.1"),
    "tensor in a dict": (lambda m, _: m.tables.update(scale=torch.full((3,), 2.0)), "`tables` of the model itself"),
    "global": (lambda m, patch: patch.setitem(globals(), "GAIN", 3.0), "`GAIN` of `Hidden.forward`'s surroundings"),
    "forward of the class": (
        lambda m, patch: patch.setattr(Hidden, "forward", lambda self, x: 2 * self.net(x)),
        "`Hidden.forward` is another function",
    ),
}


@pytest.mark.parametrize("change", HIDDEN)
def test_changes_that_torch_does_not_see_are_refused_until_refreshed(change, monkeypatch):
    model = Hidden()
    predict = favour.compile(model, X)
    predict(X)
    alter, message = HIDDEN[change]
    alter(model, monkeypatch)
    with pytest.raises(StalePredictor, match=message):
        predict(X)
    predict.refresh()
    assert_follows(predict, model)


def test_weights_of_modules_in_lists_are_followed():
    model = Hidden()
    predict = favour.compile(model, X)
    predict(X)
    model.heads[0][0].weight.data.mul_(3)
    model.tables["scale"].numpy()[:] = 2
    assert_follows(predict, model)


NAN = float("nan")


def test_a_constant_that_is_nan_has_not_changed():
    class Filled(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.dropout(super().forward(x.nan_to_num(NAN)), 0.2)

    predict, x = favour.compile(Filled(3, 2), torch.randn(4, 3), check=False), torch.randn(4, 3)
    assert predict(x).mean.shape == (4, 2)


def test_attributes_that_do_not_matter_change_nothing():
    model = Scaled()
    predict = favour.compile(model, X)
    before = predict(X).mean
    model.settings.steps = 7  # a counter
    model.net[0].last = torch.ones(2)
    torch.testing.assert_close(predict(X).mean, before)
    model.shift.add_(1)  # the tensor itself is followed
    torch.testing.assert_close(predict(X).mean, before + 1)


CHANGES = {
    "rate": (lambda m: setattr(m[2], "p", 0.5), "`p` of `2` was 0.2 and is 0.5"),
    "module": (lambda m: m.__setitem__(1, nn.Tanh()), "module `1` was a ReLU and is a Tanh"),
    "layer taken out": (lambda m: m.__delitem__(5), "module `5` was a Dropout and is a Linear"),
    "hook": (hooked, "hooks of `1` were added or removed"),
    "forward replaced": (method_replaced, "`1`"),
}
ASKS = {
    "predict": lambda p: p(X),
    "probabilities": lambda p: p.probabilities(X),
    "sample": lambda p: p.sample(X, n=2),
    "joint": lambda p: p.joint(X),
    "draws": lambda p: p.draws(X),
    "attribute": lambda p: p.attribute(X),
    "joint_outputs": lambda p: p.joint_outputs(X),
    "save": lambda p: p.save("never-written.favour"),
}


@pytest.mark.parametrize(
    ("change", "asked"),
    [(change, "predict") for change in CHANGES] + [("rate", asked) for asked in list(ASKS)[1:]],
)
def test_changed_structure_is_refused_until_refreshed(change, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ask = ASKS[asked]
    model = make_net()
    predict = favour.compile(model, X)
    alter, message = CHANGES[change]
    alter(model)
    with pytest.raises(StalePredictor) as error:
        ask(predict)
    assert message in str(error.value)
    assert "predict.refresh()" in str(error.value)
    predict.refresh()
    ask(predict)
    assert_follows(predict, model)


def test_a_hook_that_only_looks_and_training_flags_change_nothing():
    model = make_net()
    predict = favour.compile(model, X)
    model[1].register_forward_hook(lambda module, args, output: None)
    model[1].note = "kept by a tool of the user's"
    before = predict(X).mean
    model.train()
    torch.testing.assert_close(predict(X).mean, before)
    model.eval()
    torch.testing.assert_close(predict(X).mean, before)


def test_a_model_that_cannot_be_captured_any_more_is_answered_with_a_warning():
    model = make_net()
    predict = favour.compile(model, X)
    before = predict(X).mean

    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model[1] = Branching()
    with pytest.warns(ChangedModel, match="of the model as it was"):
        after = predict(X).mean
    torch.testing.assert_close(after, before)


def test_check_compares_the_live_model_first():
    scale = [1.0]

    def scaled(z):
        return z * scale[0]

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            return scaled(self.net(x))

    predict = favour.compile(Scaled(), X)
    assert "does not describe the model" not in favour.check(predict, X, 50).reason
    scale[0] = 3.0  # behind a function that `forward` calls: neither modules nor what forward names has changed
    found = favour.check(predict, X, 50)
    assert found.verdict == "don't"
    assert "does not describe the model" in found.reason
    predict.refresh()
    assert "does not describe the model" not in favour.check(predict, X, 50).reason


def test_a_moved_predictor_no_longer_follows():
    model = make_net()
    predict = favour.compile(model, X).to(torch.float64)
    before = predict(X.double()).mean
    model[2].p = 0.9
    by_vector(model)
    torch.testing.assert_close(predict(X.double()).mean, before)


def test_draws_of_a_model_that_changed_are_of_the_model_as_it_is():
    model = make_net()
    g = torch.Generator()
    favour.sample(model, X, 2)
    hooked(model)
    drawn = favour.sample(model, X, 2, generator=g.manual_seed(0))
    torch.testing.assert_close(drawn, favour.sample(copy.deepcopy(model), X, 2, generator=g.manual_seed(0)))


def test_what_watches_a_model_does_not_keep_it_alive():
    model = make_net()
    favour.sample(model, X, 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("change", ["double", "half", "one", "shape"])
def test_tensors_of_another_type_or_shape_are_refused(change):
    """They are the same objects with other data: nothing but their type shows it."""
    model = make_net()
    predict = favour.compile(model, X)
    weight = model[3].weight
    {
        "double": model.double,
        "half": model.half,
        "one": lambda: setattr(weight, "data", weight.data.double()),
        "shape": lambda: setattr(weight, "data", torch.ones(31, 32)),
    }[change]()
    with pytest.raises(StalePredictor, match=r"was torch\.float32"):
        predict(X)
    if change != "shape":
        with pytest.raises(StalePredictor, match="Compile the model again"):
            predict.refresh()
