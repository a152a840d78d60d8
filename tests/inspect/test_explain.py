"""`Predictor.explain`: rules, variances that can be computed by hand, and what had no closed form."""

import pytest
import torch
from torch import nn

import favour


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh()]
    layers += [nn.LayerNorm(8), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double()


def compiled(model, x, **options):
    return favour.compile(model, x, check=False, **options)


def test_operations_are_listed_with_their_rules(model):
    found = compiled(model, torch.randn(4, 3).double(), method="adjoint").explain()
    assert [(o.operation, o.place) for o in found.operations] == [
        ("dropout", "1"),
        ("linear", "2"),
        ("tanh", "3"),
        ("layer_norm", "4"),
        ("linear", "5"),
        ("relu", "6"),
        ("linear", "7"),
    ]
    assert [o.exactness for o in found.operations] == [
        "exact",
        "exact",
        "moment-matched",
        "linearised",
        "exact",
        "moment-matched",
        "exact",
    ]
    assert found.plain == 1
    assert all(o.before is None and o.after is None for o in found.operations)


def test_variances_are_those_before_and_after(model):
    x = torch.randn(5, 3).double()
    found = compiled(model, x, method="diag").explain(x)
    y = model[0](x).detach()
    assert found.operations[0].before == 0
    assert found.operations[0].after == pytest.approx(float((y.square() * 0.2 / 0.8).mean()))
    linear = found.operations[1]
    assert linear.before == found.operations[0].after
    variance = nn.functional.linear(y.square() * 0.2 / 0.8, model[2].weight.detach().square())
    assert linear.after == pytest.approx(float(variance.mean()))
    belief = compiled(model, x, method="diag")(x)
    assert found.operations[-1].after == pytest.approx(float(belief.variance.detach().mean()))


def test_what_secants_could_not_have_is_said(model):
    told = compiled(model, torch.randn(4, 3).double(), method="adjoint", secant=True).explain().left_out
    assert not any("second derivatives" in reason for reason in told)
    layers = [nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.MaxPool1d(2), nn.Linear(4, 2)]
    pooled, x = nn.Sequential(*layers).double(), torch.randn(4, 2, 3).double()
    left_out = compiled(pooled, x, method="adjoint", secant=True).explain().left_out
    second = [names for reason, names in left_out.items() if "second derivatives" in reason]
    assert second == [("max_pool1d",)]
    assert not compiled(pooled, x, method="adjoint", secant=False).explain().left_out


def test_it_prints_on_one_screen():
    torch.manual_seed(0)
    layers = [layer for _ in range(30) for layer in (nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1))]
    text = str(compiled(nn.Sequential(*layers), torch.randn(2, 4)).explain(torch.randn(2, 4)))
    lines = text.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 200
    assert "29 × linear" in text
    assert "30 × dropout" in text
    assert "moment-matched approximates" in text


def test_the_html_is_escaped(model):
    model.register_module("<b>", nn.Softplus())
    page = compiled(model, torch.randn(4, 3).double(), secant=False).explain()._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") == 7
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


def test_whole_numbers_and_saved_predictors_are_explained_without_inputs(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(6, 2))
    predict = compiled(model, torch.tensor([[1, 2], [3, 4]]))
    predict.save(tmp_path / "saved.favour")
    there = favour.load(tmp_path / "saved.favour").explain()
    assert str(there) == str(predict.explain())
    assert [o.operation for o in there.operations] == ["dropout", "flatten", "linear"]
