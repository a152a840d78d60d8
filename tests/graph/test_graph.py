"""Capture: what goes in, what is left untouched, and what is said where it cannot work."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import favour
from favour.errors import CaptureError
from favour.passes.capture import capture
from favour.passes.plan.steps import configure

SOURCE = Path(__file__).read_text().splitlines()


def line_of(comment: str) -> int:
    return next(i for i, text in enumerate(SOURCE, 1) if text.endswith(f"  # {comment}"))


def calls(graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.kind == "call"]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Block(nn.Module):
    def __init__(self, size: int, p: float = 0.25) -> None:
        super().__init__()
        self.first = nn.Linear(size, size, bias=False)
        self.second = nn.Linear(size, size)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = F.dropout(h, self.p, training=self.training)
        return x + self.second(h)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(5), Block(5)])
        self.head = nn.Sequential(OrderedDict(drop=nn.Dropout(0.1), out=nn.Linear(5, 2)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ------------------------------------------------------------- what people wrap around a model


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def distributed(model: nn.Module) -> nn.Module:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [data_parallel, distributed, compiled])
def test_a_wrapped_model_is_the_model(wrap) -> None:
    model, x = Nested(), torch.randn(3, 5)
    want = favour.compile(model, x, check=False)(x)
    have = favour.compile(nn.Sequential(wrap(model)), x, check=False)(x)
    close(have.mean, want.mean, 1e-6)
    close(have.covariance_matrix, want.covariance_matrix, 1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["scripted", "quantised"])
def test_a_model_turned_into_code_of_torchs_own_is_refused_by_name(kind: str) -> None:
    inner: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    if kind == "scripted":
        inner = torch.jit.script(inner)
    else:
        inner = torch.ao.quantization.quantize_dynamic(inner, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(CaptureError, match=r"^`1(\.0)?` is .*as it was before") as caught:
        favour.compile(nn.Sequential(nn.Linear(5, 5), inner), torch.randn(3, 5))
    assert len(str(caught.value)) < 500


# ------------------------------------------------------------- what is captured


def test_capture_nested_modules_by_path_and_line() -> None:
    graph = capture(Nested(), torch.randn(3, 5))
    assert graph.dropout_modules == ["blocks.0", "blocks.1", "head.drop"]
    places = {n.module: n.where for n in graph.nodes if n.kind == "call" and n.target is torch.ops.aten.relu.default}
    assert list(places) == ["blocks.0", "blocks.1"]
    for where in places.values():
        file, line = where.split(":")
        assert file == "test_graph.py"
        assert "torch.relu(self.first(x))" in SOURCE[int(line) - 1]
    linear = next(n for n in graph.nodes if n.module == "blocks.1.second")
    assert "self.second(h)" in SOURCE[int(linear.where.split(":")[1]) - 1]
    assert linear.place == f"`blocks.1.second` ({linear.where})"


def test_capture_functional_dropout_is_live_in_eval_mode() -> None:
    model = Nested().double().eval()
    x = torch.randn(3, 5, dtype=torch.float64)
    assert favour.compile(model, x)(x).variance.min() > 0


@pytest.mark.parametrize("training", [True, False])
def test_capture_leaves_the_model_untouched(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(6, 2))
    model.train(training)
    model[3].eval()  # a mixture of flags
    model[0].weight.requires_grad_(False)
    flags = [m.training for m in model.modules()]
    before = {k: (id(t), t._version, t.clone(), t.requires_grad) for k, t in model.state_dict(keep_vars=True).items()}
    attributes = [set(m.__dict__) for m in model.modules()]
    predict = favour.compile(model, torch.randn(8, 4))
    predict(torch.randn(8, 4))
    favour.sample(model, torch.randn(8, 4), 3)
    assert [m.training for m in model.modules()] == flags
    assert [set(m.__dict__) for m in model.modules()] == attributes
    for name, tensor in model.state_dict(keep_vars=True).items():
        identity, version, value, grad = before[name]
        assert (id(tensor), tensor._version, tensor.requires_grad) == (identity, version, grad)
        assert torch.equal(tensor, value)
        assert tensor.grad is None


def test_capture_bayesian_layers_untouched() -> None:
    model = nn.Sequential(favour.nn.BayesLinear(3, 4), nn.ReLU(), favour.nn.Dropout(torch.full((4,), 0.2)))
    predict = favour.compile(model, torch.randn(2, 3))
    predict(torch.randn(2, 3))
    assert model[0].sampling and "sampling" not in model[0].__dict__
    assert "capturing" not in model[2].__dict__
    assert (model(torch.ones(1, 3)) != model(torch.ones(1, 3))).any()  # still draws in training mode


@pytest.mark.parametrize("training", [True, False])
def test_capture_batch_norm_uses_running_statistics(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)).double()
    for _ in range(3):
        model(torch.randn(16, 4, dtype=torch.float64) + 2)
    model.train(training)
    x = torch.randn(5, 4, dtype=torch.float64)
    predict = favour.compile(model, x)
    close(predict(x).mean, copy.deepcopy(model).eval()(x))


def test_capture_batch_norm_without_statistics_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False))
    with pytest.raises(favour.errors.UnsupportedOperation, match=r"batch_norm at `1`.*running statistics"):
        favour.compile(model, torch.randn(4, 4))


def test_capture_functional_batch_norm_uses_running_statistics() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("m", torch.tensor([1.0, 2.0]))
            self.register_buffer("v", torch.tensor([4.0, 9.0]))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.m, self.v, training=self.training)

    model = Functional()
    x = torch.randn(6, 2)
    close(favour.compile(model, x)(x).mean, model.eval()(x), 1e-6)
    assert torch.equal(model.m, torch.tensor([1.0, 2.0]))


def test_capture_random_relu_is_its_mean() -> None:
    model = nn.RReLU()
    x = torch.randn(4, 3)
    close(favour.compile(model, x)(x).mean, copy.deepcopy(model).eval()(x), 1e-6)


# ------------------------------------------------------- sharing, tying, shapes


def test_capture_shared_module_is_one_parameter() -> None:
    layer = nn.Linear(3, 3).double()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = layer, layer

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    graph = capture(Twice(), torch.randn(2, 3, dtype=torch.float64))
    assert [n.target for n in graph.nodes if n.kind == "parameter"] == ["a.weight", "a.bias"]
    assert graph.aliases["b.weight"] == "a.weight"
    x = torch.randn(4, 3, dtype=torch.float64)
    close(favour.compile(Twice(), x)(x).mean, Twice()(x))
    # Either name serves, and means the same single draw.
    variance = torch.full((3, 3), 0.01, dtype=torch.float64)
    one, two = (favour.compile(Twice(), x, posterior={k: variance})(x) for k in ("a.weight", "b.weight"))
    assert one.variance.min() > 0
    close(one.covariance_matrix, two.covariance_matrix)


def test_capture_module_called_twice_draws_dropout_twice() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.layer(self.drop(self.layer(x))))

    graph = capture(Recurrent(), torch.randn(2, 3))
    assert calls(graph).count("aten.dropout.default") == 2
    assert graph.dropout_modules == ["drop"]
    assert calls(configure(graph, {"drop": 0})) == ["aten.linear.default"] * 2


def test_capture_tied_parameter_under_two_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.decode.weight = self.encode.weight
            self.drop = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(self.drop(self.encode(x)))

    model = Tied().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    predict = favour.compile(model, x)
    close(predict(x).mean, model.eval()(x))
    with torch.no_grad():
        model.decode.weight.mul_(2)
    close(predict(x).mean, model(x))


@pytest.mark.parametrize("batch", [0, 1, 2, 7])
def test_capture_any_example_batch(batch: int) -> None:
    model = Nested().double().eval()
    predict = favour.compile(model, torch.randn(batch, 5, dtype=torch.float64))
    reference = favour.compile(model, torch.randn(4, 5, dtype=torch.float64))
    for size in (0, 1, 2, 9):
        x = torch.randn(size, 5, dtype=torch.float64)
        assert predict(x).mean.shape == (size, 2)
        close(predict(x).covariance_matrix, reference(x).covariance_matrix)


class Two(nn.Module):
    """Two inputs, a flag, and keyword arguments whose order differs from the alphabet's and the example's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(3, 2), nn.Linear(4, 2), nn.Dropout(0.2)

    def forward(self, left: Tensor, right: Tensor | None = None, *, scale: float = 1.0, flag: bool = True) -> Tensor:
        y = self.a(self.drop(left)) * scale
        return y if right is None or not flag else y - self.b(right)


def test_capture_tuple_example() -> None:
    model = Two().double().eval()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    predict = favour.compile(model, (x, y))
    close(predict(x, y).mean, model(x, y))


def test_capture_dict_example_in_any_order() -> None:
    model = Two().double().eval()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    for example in ({"left": x, "right": y}, {"right": y, "left": x}, {"scale": 3.0, "right": y, "left": x}):
        predict = favour.compile(model, example)
        close(predict(**example).mean, model(**example))
        backwards = dict(reversed(example.items()))
        close(predict(**backwards).mean, model(**example))
        draws = favour.sample(model, backwards, 4000, generator=torch.Generator().manual_seed(0))
        deviation = (draws.mean(0) - model(**example)) / predict(**example).stddev * 4000**0.5
        assert deviation.abs().max() < 5


def test_capture_flags_are_fixed() -> None:
    model = Two().double().eval()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    predict = favour.compile(model, {"left": x, "right": y, "flag": False, "scale": 2.0})
    close(predict(left=x, right=y, flag=False, scale=2.0).mean, model(x, y, flag=False, scale=2.0))
    with pytest.raises(favour.errors.InvalidValue, match="True"):
        predict(left=x, right=y, flag=True, scale=2.0)


def test_capture_nested_input_structures() -> None:
    class Structured(nn.Module):
        def forward(self, batch: dict[str, list[Tensor]]) -> Tensor:
            return batch["xs"][0] + 2 * batch["xs"][1] - batch["y"][0]

    example = ({"xs": [torch.ones(2, 3), torch.zeros(2, 3)], "y": [torch.ones(2, 3)]},)
    predict = favour.compile(Structured(), example)
    batch = {"xs": [torch.randn(4, 3), torch.randn(4, 3)], "y": [torch.randn(4, 3)]}
    close(predict(batch).mean, Structured()(batch), 1e-6)


def test_an_output_that_is_one_certain_number() -> None:
    class Penalised(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.dropout(super().forward(x), 0.2, self.training), self.weight.square().sum()

    model, x = Penalised(5, 2), torch.randn(3, 5)
    belief, penalty = favour.compile(model, x, check=False)(x)
    close(belief.mean, model.eval()(x)[0], 1e-6)
    close(penalty, model.weight.square().sum(), 1e-6)


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor


torch.export.register_dataclass(Result)


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Many(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.drop, self.b = kind, nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, x: Tensor):
        hidden = torch.tanh(self.a(x))
        logits = self.b(self.drop(hidden))
        if self.kind == "tuple":
            return logits, hidden
        if self.kind == "list":
            return [logits, [hidden]]
        if self.kind == "dict":
            return {
                "logits": logits,
                "hidden": hidden,
                "size": x.shape[0],
                "none": None,
                "index": x.argmax(1),
            }
        return Named(logits, hidden) if self.kind == "named" else Result(logits, hidden)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "named", "dataclass"])
def test_capture_output_structures(kind: str) -> None:
    model = Many(kind).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    result = favour.compile(model, x)(x)
    want = copy.deepcopy(model).eval()(x)
    draws = favour.sample(model, x, 3)
    if kind in ("tuple", "list"):
        logits, hidden = result[0], result[1] if kind == "tuple" else result[1][0]
        drawn = draws[0]
    elif kind == "dict":
        logits, hidden, drawn = result["logits"], result["hidden"], draws["logits"]
        assert result["size"] == 5 and draws["size"] == 5
        assert result["none"] is None
        assert torch.equal(result["index"], x.argmax(1))
        assert draws["index"].shape == (3, 5)
    else:
        assert type(result) is type(want) and type(draws) is type(want)
        logits, hidden, drawn = result.logits, result.hidden, draws.logits
    assert drawn.shape == (3, 5, 2)
    close(logits.mean, model.b(torch.tanh(model.a(x))))
    assert logits.variance.min() > 0
    assert hidden.variance.max() == 0


def test_capture_output_that_is_an_input_or_a_parameter() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor):
            return x, self.layer(x), self.layer.weight

    model, x = Passing(), torch.randn(4, 3)
    first, _, weight = favour.compile(model, x)(x)
    assert torch.equal(first.mean, x)
    assert torch.equal(weight.mean, model.layer.weight)


def test_capture_buffers_and_plain_tensor_attributes() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.randn(3))
            self.register_buffer("hidden", torch.randn(3), persistent=False)
            self.plain = torch.randn(3)
            self.listed = [torch.randn(3)]
            self.derived = (torch.randn(3, requires_grad=True) * 2).detach()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.kept + self.hidden - self.plain * self.listed[0] + self.derived

    model, x = Holding(), torch.randn(4, 3)
    predict = favour.compile(model, x)
    close(predict(x).mean, model(x), 1e-6)
    model.kept.zero_()
    model.hidden.add_(1)
    close(predict(x).mean, model(x), 1e-6)


def test_capture_model_holding_a_tensor_with_a_graph() -> None:
    """`copy.deepcopy` refuses such tensors; the structural copy shares them."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.last = self.layer(torch.ones(1, 3))  # has a grad_fn

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model, x = Cached(), torch.randn(4, 3)
    close(favour.compile(model, x)(x).mean, model(x), 1e-6)


def test_capture_parametrised_weights() -> None:
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Dropout(0.2), weight_norm(nn.Linear(4, 2))).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    predict = favour.compile(model, x)
    assert predict(x).variance.min() > 0
    with torch.inference_mode():  # the normed weights are inference tensors, which have no version
        close(predict(x).mean, copy.deepcopy(model).eval()(x))
    with torch.no_grad():
        model[2].parametrizations.weight.original0.mul_(3)
    close(predict(x).mean, copy.deepcopy(model).eval()(x))


def test_capture_forward_with_variable_arguments() -> None:
    class Variable(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return sum(xs, torch.zeros(()))

    xs = (torch.randn(4, 3), torch.randn(4, 3))
    close(favour.compile(Variable(), xs)(*xs).mean, xs[0] + xs[1], 1e-6)


def test_capture_example_that_does_not_fit_the_signature() -> None:
    with pytest.raises(favour.errors.InvalidType, match=r"2 positional.*forward\(input"):
        favour.compile(nn.Linear(3, 2), (torch.randn(2, 3), torch.randn(2, 3)))
    with pytest.raises(favour.errors.InvalidType, match="missing a required argument"):
        favour.compile(nn.Linear(3, 2), {"inpt": torch.randn(2, 3)})


# ---------------------------------------------------------------- what is refused


def test_capture_error_names_the_data_dependent_branch() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # the culprit
                return x
            return -x

    with pytest.raises(favour.errors.CaptureError) as caught:
        favour.compile(Branching(), torch.randn(3, 2))
    message = str(caught.value)
    assert f"test_graph.py:{line_of('the culprit')} in forward" in message
    assert "torch.where" in message
    assert isinstance(caught.value, RuntimeError)


def test_capture_error_names_the_numpy_call() -> None:
    class Leaving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.from_numpy(np.tanh(x.detach().numpy()))  # leaves torch

    with pytest.raises(favour.errors.CaptureError) as caught:
        favour.compile(Leaving(), torch.randn(3, 2))
    assert f"test_graph.py:{line_of('leaves torch')} in forward" in str(caught.value)
    assert "other libraries" in str(caught.value)


def test_capture_error_of_the_models_own() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("the model's own complaint")

    with pytest.raises(favour.errors.CaptureError, match="the model's own complaint") as caught:
        favour.compile(Failing(), torch.randn(3, 2))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_capture_error_for_a_wrong_example_shape() -> None:
    with pytest.raises(favour.errors.CaptureError, match=r"mat1 and mat2|size|shape"):
        favour.compile(nn.Linear(3, 2), torch.randn(4, 5))


def test_capture_error_for_a_literal_batch_size() -> None:
    class Literal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(6, -1)

    with pytest.raises(favour.errors.CaptureError, match="batch"):
        favour.compile(Literal(), torch.randn(6, 2))


def test_capture_reports_all_unsupported_operations_at_once() -> None:
    class Exotic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(x)
            y = torch.trapezoid(x)  # first
            z = torch.hypot(x, x + 1)  # second
            return y + z.sum(1) + torch.argmax(x, 1)  # third

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exotic = Exotic()

        def forward(self, x: Tensor) -> Tensor:
            return self.exotic(x)

    with pytest.raises(favour.errors.UnsupportedOperation) as caught:
        favour.compile(Outer(), torch.randn(3, 4))
    message = str(caught.value)
    assert f"no rule for `aten.trapezoid.dx` at `exotic` (test_graph.py:{line_of('first')})" in message
    assert f"`aten.hypot.default` at `exotic` (test_graph.py:{line_of('second')})" in message
    assert f"`aten.argmax.default` at `exotic` (test_graph.py:{line_of('third')}) has a discrete result" in message
    assert "favour.rule" in message
    assert isinstance(caught.value, NotImplementedError)


def test_capture_unsupported_operation_before_the_noise_is_fine() -> None:
    class Early(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(torch.trapezoid(x).unsqueeze(1), 0.5, self.training)

    x = torch.randn(3, 4)
    close(favour.compile(Early(), x)(x).mean, torch.trapezoid(x).unsqueeze(1), 1e-6)


def test_numbers_drawn_once_for_all_inputs_are_a_source_of_each() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x) + torch.rand(3)

    x = torch.randn(2, 3)
    belief = favour.compile(Noisy(), x)(x)
    torch.testing.assert_close(belief.mean, x + 0.5)
    torch.testing.assert_close(belief.variance, torch.full_like(x, 1 + 1 / 12))
    draws = favour.sample(Noisy(), x, 4000)
    assert (draws.var(0) - belief.variance).abs().max() < 6 * (2 / 4000) ** 0.5 * 13 / 12


def test_capture_recurrent_layer_before_the_noise() -> None:
    """aten tags recurrent operations as random because they could drop; without dropout they are not."""

    class Recurrent(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.cell = nn.GRU(3, 4, num_layers=2, dropout=dropout, batch_first=True)
            self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][:, -1])

    model = Recurrent(0.0).double()
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    belief = favour.compile(model, x)(x)
    close(belief.mean, copy.deepcopy(model).eval()(x))
    assert belief.variance.min() > 0
    assert favour.sample(model, x, 2).shape == (2, 3, 2)
    assert favour.compile(Recurrent(0.1).double(), x).graph.dropout_modules == ["cell", "head.0"]


def test_capture_ignores_randomness_that_nobody_reads() -> None:
    class Harmless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.randn_like(x)
            return 2 * x

    assert torch.equal(favour.compile(Harmless(), torch.ones(2, 3))(torch.ones(2, 3)).mean, torch.full((2, 3), 2.0))


def test_capture_refuses_mixing_the_batch() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.5, self.training)
            return x - x.mean(0, keepdim=True)

    with pytest.raises(favour.errors.UnsupportedOperation, match="batch"):
        favour.compile(Mixing(), torch.randn(4, 3))


def test_capture_wants_a_module_and_a_tensor() -> None:
    with pytest.raises(favour.errors.InvalidType, match=r"torch.nn.Module"):
        favour.compile(torch.relu, torch.randn(2, 3))  # type: ignore[arg-type]
    with pytest.raises(favour.errors.InvalidType, match="list"):
        favour.compile(nn.Linear(3, 2), [torch.randn(2, 3)])
    with pytest.raises(favour.errors.InvalidValue, match="batch dimension"):
        favour.compile(nn.Linear(3, 2), (1.0,))
    with pytest.raises(favour.errors.InvalidValue, match="batch dimension"):
        favour.compile(nn.Linear(3, 2), torch.tensor(1.0))


# ------------------------------------------------------------- dropout overrides


def test_dropout_override_by_module_name() -> None:
    model = Nested().double().eval()
    x = torch.randn(4, 5, dtype=torch.float64)
    silent = favour.compile(model, x, dropout={"blocks.0": 0, "blocks.1": 0.0, "head.drop": 0})
    assert silent(x).variance.max() == 0
    close(silent(x).mean, model(x))
    small = favour.compile(model, x, dropout={"blocks.0": 0, "blocks.1": 0, "head.drop": 0.1})
    large = favour.compile(model, x, dropout={"blocks.0": 0, "blocks.1": 0, "head.drop": 0.5})
    close(large(x).covariance_matrix, 9 * small(x).covariance_matrix)  # p/q is 1/9, then 1


def test_dropout_override_per_neuron() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    p = torch.tensor([0.0, 0.2, 0.7], dtype=torch.float64)
    belief = favour.compile(model, x, dropout={"0": p})(x)
    W = model[1].weight
    want = torch.einsum("ij,bj,kj->bik", W, x.square() * p / (1 - p), W)
    close(belief.covariance_matrix, want)


def test_dropout_override_unknown_name_lists_the_known() -> None:
    with pytest.raises(favour.errors.UnknownName, match=r"blocks\.2.*blocks\.0.*blocks\.1.*head\.drop") as caught:
        favour.compile(Nested(), torch.randn(2, 5), dropout={"blocks.2": 0.1})
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, ValueError)
    with pytest.raises(favour.errors.UnknownName, match="no module"):
        favour.compile(nn.Linear(2, 2), torch.randn(2, 2), dropout={"x": 0.1})


def test_dropout_rate_follows_the_module_when_recompiled() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)).double()
    x = torch.ones(1, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    wide = favour.sample(model, x, 20000, generator=generator).var()
    model[0].p = 0.1
    narrow = favour.sample(model, x, 20000, generator=generator).var()
    assert 8 < wide / narrow < 10  # 9, with a relative standard error of about 0.02 (captures are kept between calls)


def test_prune_keeps_inputs_in_place() -> None:
    class Ignoring(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            torch.relu(x)
            return 2 * x

    graph = capture(Ignoring(), (torch.randn(2, 3), torch.randn(2, 4)))
    assert calls(graph) == ["aten.mul.Tensor"]
    assert [n.name for n in graph.inputs if n is not None] == ["x", "unused"]
    predict = favour.compile(Ignoring(), (torch.randn(2, 3), torch.randn(2, 4)))
    close(predict(torch.ones(3, 3), torch.ones(3, 4)).mean, torch.full((3, 3), 2.0), 1e-6)


# ----------------------------------------------------- modules that raise, masks


class Tried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(5, 5), nn.Dropout(0.2)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.layer(x, lengths=None)
        except TypeError:
            y = self.layer(x)
        return (self.drop(y).unsqueeze(1) + self.mask).softmax(-1).sum(1)


def test_code_may_catch_what_a_module_raises_and_hold_a_mask() -> None:
    model, x = Tried(), torch.randn(3, 5)
    close(favour.compile(model, x, dropout={"drop": 0}, check=False)(x).mean, model.eval()(x), 1e-5)
