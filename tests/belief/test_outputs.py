"""Inputs and outputs as people pass them: several outputs together, pixels, changing sizes, containers and masks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import favour
from favour.graph.sizes import size_of
from favour.methods.memory import Peak
from favour.progress import Progress, _Plain

F64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def covariance(a: Tensor, b: Tensor) -> Tensor:
    """Between draws (n, batch, *event) of two outputs, (batch, n_a, n_b)."""
    a, b = (t.reshape(*t.shape[:2], -1) - t.reshape(*t.shape[:2], -1).mean(0) for t in (a, b))
    return torch.einsum("nbi,nbj->bij", a, b) / (len(a) - 1)


# ------------------------------------------------------------------------------------------------ joint outputs


@dataclass
class Detection:
    box: Tensor
    score: Tensor
    label: Tensor
    extra: dict


torch.export.register_dataclass(Detection)


class Heads(nn.Module):
    """Three heads on one hidden layer, one of them a single number, one an image, and an integer output."""

    def __init__(self, kind: str = "dict", nonlinear: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.nonlinear = kind, nonlinear
        self.body, self.drop = nn.Linear(3, 6), nn.Dropout(0.2)
        self.box, self.score = nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x: Tensor):
        h = self.drop(self.body(x))
        h = torch.relu(h) if self.nonlinear else h
        box, score, picture = self.box(h), self.score(h).squeeze(1), h.unflatten(1, (1, 2, 3))
        if self.kind == "tuple":
            return box, (score, picture), x.argmax(1)
        if self.kind == "dataclass":
            return Detection(box, score, x.argmax(1), {"picture": picture})
        return {"box": box, "score": score, "label": x.argmax(1), "extra": {"picture": picture}}


def parts_of(result, kind: str):
    if kind == "tuple":
        return result[0], result[1][0], result[2], result[1][1]
    if kind == "dataclass":
        return result.box, result.score, result.label, result.extra["picture"]
    return result["box"], result["score"], result["label"], result["extra"]["picture"]


NAMES = {
    "tuple": ["0", "1.0", "1.1"],
    "dict": ["box", "score", "extra.picture"],
    "dataclass": ["box", "score", "extra.picture"],
}


@pytest.mark.parametrize("kind", NAMES)
def test_joint_outputs_structure(kind: str) -> None:
    model, x = Heads(kind).double(), randn(5, 3)
    predict = favour.compile(model, x, method="adjoint")
    joint = predict.joint_outputs(x)
    assert sorted(joint.names) == sorted(NAMES[kind])
    assert joint.belief.mean.shape == (5, 4 + 1 + 6)
    marginal, alone = parts_of(joint.outputs, kind), parts_of(predict(x), kind)
    assert type(joint.outputs) is type(predict(x))
    for i in (0, 1, 3):
        close(marginal[i].mean, alone[i].mean)
        close(marginal[i].covariance_matrix, alone[i].covariance_matrix)
    assert torch.equal(marginal[2], x.argmax(1))
    drawn = parts_of(joint.sample((7, 2)), kind)
    assert [tuple(d.shape) for d in drawn] == [(7, 2, 5, 4), (7, 2, 5), (5,), (7, 2, 5, 1, 2, 3)]


@pytest.mark.parametrize("settings", [{"method": "adjoint"}, {"method": "full"}, {"method": "dplr", "rank": 40}, {}])
def test_joint_outputs_of_a_linear_model_in_closed_form(settings: dict) -> None:
    """Dropout on h and linear heads: Cov(a, b) = A diag(h²p/q) Bᵀ."""
    model, x = Heads(nonlinear=False).double().eval(), randn(4, 3)
    joint = favour.compile(model, x, **settings).joint_outputs(x)
    spread = torch.diag_embed(model.body(x).square() * 0.2 / 0.8)
    A, B, eye = model.box.weight, model.score.weight, torch.eye(6, dtype=F64)
    close(joint.cross_covariance("box", "score"), A @ spread @ B.T)
    close(joint.cross_covariance("score", "box"), B @ spread @ A.T)
    close(joint.cross_covariance("box", "extra.picture"), A @ spread @ eye)
    close(joint.cross_covariance("box", "box"), A @ spread @ A.T)


def test_joint_outputs_against_samples() -> None:
    model, x = Heads().double().eval(), randn(3, 3)
    predict = favour.compile(model, x, method="adjoint")
    joint, n = predict.joint_outputs(x), 40_000
    network = predict.sample(x, n=n, generator=torch.Generator().manual_seed(0))
    wanted = covariance(network["box"], network["score"])
    error = (joint.cross_covariance("box", "score") - wanted).norm() / wanted.norm()
    assert error < 0.05, error  # the nonlinearity's share; forgetting the correlation is an error of 1
    drawn = joint.sample((n,), torch.Generator().manual_seed(1))
    own = covariance(drawn["box"], drawn["score"])
    scale = (drawn["box"].var(0)[:, :, None] * drawn["score"].var(0)[:, None, None] / n).sqrt()
    assert ((own - joint.cross_covariance("box", "score")) / scale).abs().max() < 6


def test_joint_outputs_density_and_errors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.a, self.b = nn.Dropout(0.3), nn.Linear(6, 2), nn.Linear(6, 1)

        def forward(self, x: Tensor):
            h = self.drop(x)
            return self.a(h), self.b(h)

    x = randn(4, 6)
    joint = favour.compile(Two().double(), x, method="adjoint").joint_outputs(x)
    values = joint.sample(())
    reference = torch.distributions.MultivariateNormal(joint.belief.mean, joint.belief.covariance_matrix)
    close(joint.log_prob(values), reference.log_prob(torch.cat(values, 1)), 1e-8)
    with pytest.raises(favour.errors.UnknownName, match=r"'2'.*\['0', '1'\]"):
        joint.cross_covariance("2", "0")
    with pytest.raises(favour.errors.InvalidValue, match="no output 5"):
        joint.marginal(5)
    with pytest.raises(favour.errors.ShapeMismatch, match="log_prob"):
        joint.log_prob((values[0][:2], values[1]))
    with pytest.raises(favour.errors.InvalidType, match=r"a tuple of 2.*a list of 2"):
        joint.log_prob([values[0], values[1]])


def test_joint_outputs_follow_the_model_and_the_memory_budget() -> None:
    model, x = Heads().double().eval(), randn(9, 3)
    predict = favour.compile(model, x[:2], method="adjoint", memory=4000)
    whole = favour.compile(model, x[:2], method="adjoint")
    close(predict.joint_outputs(x).belief.covariance_matrix, whole.joint_outputs(x).belief.covariance_matrix)
    with torch.no_grad():
        model.box.weight.mul_(2)
    close(parts_of(predict.joint_outputs(x).outputs, "dict")[0].mean, predict(x)["box"].mean)
    predict.to(torch.float32)
    assert predict.joint_outputs(x.float()).belief.dtype == torch.float32


def test_joint_outputs_are_differentiable_and_compile() -> None:
    model, x = Heads().eval(), torch.randn(5, 3)
    predict = favour.compile(model, x, method="adjoint")
    predict.joint_outputs(x).cross_covariance("box", "score").sum().backward()
    assert model.body.weight.grad is not None and model.body.weight.grad.abs().sum() > 0
    with torch.no_grad():
        predict.joint_outputs(x)

        def cross(x: Tensor) -> Tensor:
            return predict.joint_outputs(x).cross_covariance("box", "score")

        got = torch.compile(cross, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(got, cross(x), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::favour.errors.ReducedCovariance")
def test_joint_outputs_of_many_entries_need_no_square_matrix() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.a, self.b = nn.Dropout(0.2), nn.Linear(8, 1500), nn.Linear(8, 500)

        def forward(self, x: Tensor):
            h = self.drop(x)
            return self.a(h), self.b(h)

    x = torch.randn(2, 8)
    predict = favour.compile(Wide().eval(), x)
    with torch.no_grad(), Largest() as seen:
        joint = predict.joint_outputs(x)
        assert joint.cross_covariance(0, 1)[:, :2].shape == (2, 2, 500)
    assert seen.numbers <= 2 * 1500 * 500


# --------------------------------------------------------------------------------------------------- pictures


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


class ToImage(nn.Module):
    """Down, up and across: picture to picture."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.up, self.c = nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, 3, 3, padding=1)
        self.drop, self.channels = nn.Dropout(0.1), nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        low = self.channels(torch.relu(self.b(h)))
        return self.c(torch.cat([h, self.up(low)], 1))


@pytest.mark.filterwarnings("ignore::favour.errors.ReducedCovariance")
def test_image_to_image_variance_without_pixel_covariance() -> None:
    model, x = ToImage().eval().requires_grad_(False), torch.randn(2, 3, 64, 64)
    predict = favour.compile(model, x)
    with Largest() as seen:
        belief = predict(x)
        variance, drawn = belief.variance, belief.sample((3,))
    pixels = 3 * 64 * 64
    assert variance.shape == (2, 3, 64, 64) and drawn.shape == (3, 2, 3, 64, 64)
    assert seen.numbers <= predict.method.n * 2 * 12 * 64 * 64 < pixels**2 / 40  # draws of at most 12 channels
    draws = predict.sample(x, n=2000, generator=torch.Generator().manual_seed(0))
    ratio = variance / draws.var(0)
    # 2,000 draws alone make a mean absolute error of 0.04.
    assert abs(ratio.mean() - 1) < 0.05 and (ratio - 1).abs().mean() < 0.15


@pytest.mark.filterwarnings("ignore::favour.errors.ReducedCovariance")
def test_image_to_image_within_a_memory_budget() -> None:
    model, x = ToImage().eval().requires_grad_(False), torch.randn(6, 3, 32, 32)
    free, tight = favour.compile(model, x[:2]), favour.compile(model, x[:2], memory=2**22)
    torch.testing.assert_close(tight(x).variance, free(x).variance, rtol=1e-4, atol=1e-7)
    with Largest() as all_at_once:
        free(x)
    with Largest() as sliced:
        tight(x)
    assert sliced.numbers < all_at_once.numbers


@pytest.mark.parametrize("settings", [{"method": "adjoint"}, {"method": "dplr"}, {"method": "diag"}])
def test_memory_budget_holds_for_pooled_convolutions(settings: dict) -> None:
    """Max-pooling works with all windows at once, more than the formula for perceptrons knows."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.Dropout(0.1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8 * 49, 4)).eval().requires_grad_(False)
    x, budget = torch.randn(32, 1, 16, 16), 2**21
    free, tight = favour.compile(model, x[:2], **settings), favour.compile(model, x[:2], memory=budget, **settings)
    with Peak() as unbounded:
        expected = free(x)
    with Peak() as bounded:
        belief = tight(x)
    assert bounded.most <= budget < unbounded.most
    torch.testing.assert_close(belief.covariance_matrix, expected.covariance_matrix, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------- dynamic sizes


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.drop, self.pool, self.head = nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        h = torch.relu(self.b(self.drop(torch.relu(self.a(image)))))
        return self.head(self.pool(h).flatten(1))


class Encoder(nn.Module):
    """Tokens and a mask of padding, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.places = nn.Parameter(0.1 * torch.randn(32, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        h = self.embed(ids) + self.places[: ids.shape[1]]
        return self.head(self.encoder(h, src_key_padding_mask=padding).mean(1))


@pytest.mark.parametrize("dynamic", [True, (2, 3), (-1, -2), {"image": [2, 3]}, {"image": True}])
def test_dynamic_resolution(dynamic) -> None:
    model = Pooled().double().eval()
    predict = favour.compile(model, randn(2, 2, 8, 8), method="adjoint", dynamic=dynamic)
    for batch, size in ((3, (8, 8)), (1, (12, 7)), (8, (5, 20))):
        x = randn(batch, 2, *size)
        fixed = favour.compile(model, x, method="adjoint")
        close(predict(x).mean, fixed(x).mean)
        close(predict(x).covariance_matrix, fixed(x).covariance_matrix)
        assert predict.sample(x, n=3).shape == (3, batch, 3)
    with pytest.raises(favour.errors.ShapeMismatch, match="dynamic="):
        predict(randn(2, 3, 8, 8))


def test_dynamic_one_dimension_leaves_the_other_fixed() -> None:
    predict = favour.compile(Pooled(), torch.randn(2, 2, 8, 8), dynamic=3)
    assert predict(torch.randn(2, 2, 8, 11)).mean.shape == (2, 3)
    with pytest.raises(favour.errors.ShapeMismatch):
        predict(torch.randn(2, 2, 11, 8))


@pytest.mark.parametrize("dynamic", [True, 1, {"ids": 1, "padding": 1}])
@pytest.mark.parametrize("method", ["adjoint", "dplr"])
def test_dynamic_sequence_length(dynamic, method: str, tmp_path: Path) -> None:
    model = Encoder().double().eval()

    def batch(n: int, length: int) -> tuple[Tensor, Tensor]:
        padding = torch.zeros(n, length, dtype=torch.bool)
        padding[0, max(1, length - 2) :] = True
        return torch.randint(0, 20, (n, length)), padding

    predict = favour.compile(model, batch(3, 5), method=method, dynamic=dynamic)
    predict.save(tmp_path / "encoder.favour")
    loaded = favour.load(tmp_path / "encoder.favour")
    for n, length in ((2, 5), (5, 9), (1, 3), (4, 1)):
        x = batch(n, length)
        fixed = favour.compile(model, x, method=method)
        for p in (predict, loaded):
            close(p(*x).mean, fixed(*x).mean)
            if method == "adjoint":
                close(p(*x).covariance_matrix, fixed(*x).covariance_matrix)
            assert p.sample(*x, n=2).shape == (2, n, 3)
    with pytest.raises(favour.errors.ShapeMismatch):
        predict(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 6, dtype=torch.bool))


def test_dynamic_probabilities_and_joint_outputs() -> None:
    class Tagger(Encoder):
        def forward(self, ids: Tensor, padding: Tensor | None = None):
            h = self.encoder(self.embed(ids))
            return {"tags": self.head(h), "score": self.head(h.mean(1))}

    predict = favour.compile(Encoder().double(), torch.randint(0, 20, (3, 5)), dynamic=1)
    assert predict.probabilities(torch.randint(0, 20, (2, 8))).shape == (2, 3)
    many = favour.compile(Tagger().double(), torch.randint(0, 20, (3, 4)), method="adjoint", dynamic=1)
    x = torch.randint(0, 20, (2, 6))
    joint = many.joint_outputs(x)
    assert joint.cross_covariance("tags", "score").shape == (2, 18, 3)
    close(joint.outputs["tags"].covariance_matrix, many(x)["tags"].covariance_matrix)


def test_dynamic_memory_budget_counts_the_actual_size() -> None:
    model, small, large = Pooled().eval().requires_grad_(False), torch.randn(8, 2, 8, 8), torch.randn(8, 2, 64, 64)
    predict = favour.compile(model, small, method="adjoint", dynamic=(2, 3), memory=2**20)
    with torch.no_grad(), Largest() as seen:
        predict(large)
    assert seen.numbers * 4 <= 2**20


@pytest.mark.filterwarnings("ignore::favour.errors.ReducedCovariance")
def test_dynamic_choice_by_the_example() -> None:
    """At 4 positions all outputs are affordable, at 2000 they are not."""

    class PerPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.head = nn.Dropout(0.1), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(x))

    few = favour.compile(PerPosition(), torch.randn(2, 4, 3), dynamic=1)
    many = favour.compile(PerPosition(), torch.randn(2, 2000, 3), dynamic=1)
    assert few.method.name == "adjoint"
    assert many.method.name == "pooled"


def test_dynamic_refusals() -> None:
    x = torch.randn(2, 2, 8, 8)
    with pytest.raises(favour.errors.CaptureError, match=r"dimension 1 of `image`.*fixes it"):
        favour.compile(Pooled(), x, dynamic=(1, 2))
    with pytest.raises(favour.errors.InvalidValue, match="size 1 in the example"):
        favour.compile(Pooled(), x[:, :, :1], dynamic=2)
    with pytest.raises(favour.errors.InvalidValue, match="dimension 4 of `image`"):
        favour.compile(Pooled(), x, dynamic={"image": 4})
    with pytest.raises(favour.errors.InvalidValue, match="no input has such a dimension"):
        favour.compile(Pooled(), x, dynamic=7)
    with pytest.raises(favour.errors.UnknownName, match=r"'picture'.*`image` \(2, 2, 8, 8\)"):
        favour.compile(Pooled(), x, dynamic={"picture": 2})
    for wrong in ("image", 2.5, {"image": "2"}, [True]):
        with pytest.raises(favour.errors.InvalidType, match="dynamic"):
            favour.compile(Pooled(), x, dynamic=wrong)


def test_dynamic_names_inside_containers() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.1)

        def forward(self, batch: dict[str, Tensor], **more: Tensor) -> Tensor:
            return self.drop(batch["a"]).sum(1) + batch["b"].sum(1) + more["c"].sum(1)

    example = {"batch": {"a": torch.randn(2, 3), "b": torch.randn(2, 4)}, "c": torch.randn(2, 5)}
    predict = favour.compile(Bag(), example, dynamic={"batch.a": 1, "c": 1})
    other = {"batch": {"a": torch.randn(3, 7), "b": torch.randn(3, 4)}, "c": torch.randn(3, 2)}
    torch.testing.assert_close(predict(**other).mean, Bag().eval()(**other))
    with pytest.raises(favour.errors.ShapeMismatch):
        predict(batch={"a": torch.randn(2, 3), "b": torch.randn(2, 5)}, c=torch.randn(2, 5))


def test_symbolic_sizes() -> None:
    assert size_of("(((s0 - 1)//2)) + 1", {"s0": 9}) == 5
    assert size_of("Max(1, 2*s0**2 % 5)", {"s0": 4}) == 2
    with pytest.raises(favour.errors.UnsupportedOperation, match="s1"):
        size_of("s1 + 1", {"s0": 4})


# ------------------------------------------------------------------------------------------------------- inputs


class Inputs(nn.Module):
    """Everything at once: positional and keyword tensors, containers, masks, an absent argument and a flag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.layer, self.table = nn.Dropout(0.2), nn.Linear(4, 3), nn.Embedding(5, 4)

    def forward(self, x, features=None, *, mask=None, ids=None, absent=None, scale=1.0):
        h = self.drop(x)
        if features is not None:
            h = h + features["first"] * features["rest"][0]
            if features["rest"][1] is not None:
                h = h - features["rest"][1]
        if ids is not None:
            h = h + self.table(ids)
        if mask is not None:
            h = h.masked_fill(mask, 0.0) if mask.dtype == torch.bool else h * mask
        assert absent is None
        return scale * self.layer(h)


def features(n: int, last: bool) -> dict:
    return {"first": randn(n, 4), "rest": [randn(n, 4), randn(n, 4) if last else None]}


CALLS = {
    "one tensor": lambda n: ((randn(n, 4),), {}),
    "two positional": lambda n: ((randn(n, 4), features(n, True)), {}),
    "None inside a container": lambda n: ((randn(n, 4), features(n, False)), {}),
    "None as an argument": lambda n: ((), {"x": randn(n, 4), "absent": None, "features": None}),
    "boolean mask": lambda n: ((), {"x": randn(n, 4), "mask": torch.rand(n, 4) < 0.5}),
    "integer mask": lambda n: ((), {"x": randn(n, 4), "mask": torch.randint(0, 2, (n, 4))}),
    "indices": lambda n: ((), {"ids": torch.randint(0, 5, (n,)), "x": randn(n, 4)}),
    "mask without a batch": lambda n: ((), {"x": randn(n, 4), "mask": torch.tensor([True, False, False, True])}),
    "keywords and a number": lambda n: ((), {"scale": 2.0, "features": features(n, True), "x": randn(n, 4)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_as_people_pass_them(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Inputs().double().eval()
    silent = {"drop": 0.0}
    args, kwargs = CALLS[name](3)
    example = args if args else kwargs
    predict = favour.compile(model, example, method="adjoint")
    plain = favour.compile(model, example, dropout=silent)
    predict.save(tmp_path / "inputs.favour")
    loaded = favour.load(tmp_path / "inputs.favour")
    for n in (3, 5, 1):
        args, kwargs = CALLS[name](n)
        close(plain(*args, **kwargs).mean, model(*args, **kwargs))
        belief = predict(*args, **kwargs)
        draws = predict.sample(*args, n=4000, generator=torch.Generator().manual_seed(0), **kwargs)
        assert draws.shape == (4000, n, 3)
        off = (draws.var(0) - belief.variance).abs().sum() / draws.var(0).sum()
        assert off < 0.15, off
        close(loaded(*args, **kwargs).variance, belief.variance)


def test_inputs_of_another_kind_are_refused() -> None:
    predict = favour.compile(Inputs(), {"x": torch.randn(2, 4), "mask": torch.rand(2, 4) < 0.5})
    with pytest.raises(favour.errors.InvalidType, match="bool"):
        predict(x=torch.randn(2, 4), mask=torch.ones(2, 4))
    with pytest.raises(favour.errors.InvalidType, match="`x` is missing"):
        predict(torch.randn(2, 4), mask=torch.rand(2, 4) < 0.5)
    with pytest.raises(favour.errors.InvalidType, match="NoneType"):
        predict(x=torch.randn(2, 4), mask=None)


# ----------------------------------------------------------------------------------------------------- progress


class Terminal:
    def __init__(self, interactive: bool) -> None:
        self.text, self.interactive = "", interactive

    def isatty(self) -> bool:
        return self.interactive

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def _wait(progress: Progress, terminal: Terminal, text: str) -> None:
    for _ in range(400):
        if text in terminal.text:
            return
        progress._done.wait(0.01)


def test_progress_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("favour.progress._line", _Plain)
    with caplog.at_level(logging.INFO, "favour"), Progress("compiling Net", patience=0) as progress:
        progress.stage("capturing")
        _wait(progress, terminal, "capturing")
    assert "favour: compiling Net: capturing" in terminal.text
    assert terminal.text.endswith("\r") and "compiling Net took" in caplog.text


def test_progress_is_silent_elsewhere_and_when_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, patience in ((Terminal(False), 0.0), (Terminal(True), math.inf)):
        monkeypatch.setattr("sys.stderr", terminal)
        with Progress("compiling Net", patience=min(patience, 1e6)) as progress:
            progress.stage("capturing")
        assert terminal.text == ""
        assert progress._thread is None or not progress._thread.is_alive()


def test_progress_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr("sys.stderr", terminal)
    with pytest.raises(KeyError), Progress("compiling Net", patience=1e6) as progress:
        raise KeyError
    assert progress._thread is not None and not progress._thread.is_alive()
