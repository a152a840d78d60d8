"""In-place code means the same after capture: mean equal to the eager model's output, covariance to JΣJᵀ."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import favour
from favour.passes.capture import capture


class Model(nn.Module):
    """A linear layer (whose output no caller holds), then in-place code on it."""

    def __init__(self, code: Callable[[Tensor], Tensor], features: int = 6) -> None:
        super().__init__()
        self.code = code
        self.layer = nn.Linear(4, features, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.layer(x))


def relu(x: Tensor) -> Tensor:
    x.relu_()
    return x


def functional_inplace(x: Tensor) -> Tensor:
    F.leaky_relu(x, 0.2, inplace=True)
    return F.elu(x, inplace=True) + x


def add(x: Tensor) -> Tensor:
    return x.add_(2).mul_(3).sub_(1).div_(2)


def add_alpha(x: Tensor) -> Tensor:
    x.add_(x.clone(), alpha=-3)
    return x


def augmented(x: Tensor) -> Tensor:
    y = x
    y += 1
    y *= torch.arange(6, dtype=x.dtype)
    y -= 3
    return x + y


def column(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def column_from_tensor(x: Tensor) -> Tensor:
    x[:, 2] = x[:, 1] * 2
    x[:, 1] = torch.ones(x.shape[0], dtype=x.dtype)
    return x


def last_column(x: Tensor) -> Tensor:
    x[..., -1] = 7.5
    return x


def window(x: Tensor) -> Tensor:
    x[:, 1:3] += 1
    return x


def counted_from_behind(x: Tensor) -> Tensor:
    x[:, -4:-1] += 1
    x[:, :-2] *= 2
    return x


def powers(x: Tensor) -> Tensor:
    return x.abs_().add_(1).pow_(-0.5).pow_(torch.ones(6, dtype=x.dtype))


def strided_window(x: Tensor) -> Tensor:
    x[:, ::2] *= -2
    x[:, 1::3] = 5
    return x


def window_of_window(x: Tensor) -> Tensor:
    x[:, 1:5][:, 1:3] += 4
    return x


def broadcast_copy(x: Tensor) -> Tensor:
    x[:, 2:5] = x[:, :1]
    return x


def view_of_base(x: Tensor) -> Tensor:
    early = x[:, :3]
    x.mul_(2)
    return early


def sibling_views(x: Tensor) -> Tensor:
    a, b = x[:, :4], x[:, 2:]
    a.add_(1)
    b.mul_(3)
    return torch.cat([a, b, x], 1)


def through_view(x: Tensor) -> Tensor:
    y = x.view(-1, 2, 3)
    y[:, 1] += 1
    y *= 2
    return x


def through_reshape(x: Tensor) -> Tensor:
    x.reshape(-1, 3, 2).add_(1)
    return x


def reshape_that_copies(x: Tensor) -> Tensor:
    x.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6).add_(1)  # the transpose forces a copy: x stays
    return x


def through_transpose(x: Tensor) -> Tensor:
    y = x.view(-1, 2, 3)
    y.transpose(1, 2)[:, 0] += 5
    y.permute(0, 2, 1)[:, 1] *= 3
    return x


def through_unsqueeze(x: Tensor) -> Tensor:
    x.unsqueeze(1).add_(1)
    x.unsqueeze(1).squeeze(1).mul_(2)
    return x.flatten(1)


def through_split(x: Tensor) -> Tensor:
    a, b = x.split([2, 4], 1)
    c, d, e = x.chunk(3, dim=1)
    b.add_(1)
    d.mul_(2)
    return torch.cat([x, a, b, c, d, e], 1)


def through_unbind(x: Tensor) -> Tensor:
    rows = x.view(-1, 2, 3).unbind(1)
    rows[1].add_(2)
    return torch.cat([x, rows[0], rows[1]], 1)


def through_contiguous(x: Tensor) -> Tensor:
    y = x.contiguous()  # no copy
    y.add_(1)
    z = x.view(-1, 2, 3).transpose(1, 2).contiguous()  # a copy
    z.add_(100)
    return x


def detached(x: Tensor) -> Tensor:
    x.detach().mul_(2)
    return x


def clone_is_a_copy(x: Tensor) -> Tensor:
    y = x.clone()
    y += 1
    return x + 2 * y


def diagonal(x: Tensor) -> Tensor:
    square = x[:, :4].reshape(-1, 2, 2)
    square.diagonal(dim1=1, dim2=2).add_(1)
    return square


def fill_and_zero(x: Tensor) -> Tensor:
    x[:, :2].fill_(1.5)
    x[:, 4:].zero_()
    return x


def narrow(x: Tensor) -> Tensor:
    x.narrow(1, 1, 2).add_(1)
    return x


def other_dtype(x: Tensor) -> Tensor:
    x += torch.arange(6, dtype=torch.float32)
    x[:, 1] = torch.tensor(3)
    return x


def long_sequence(x: Tensor) -> Tensor:
    y = x[:, 1:]
    z = y.view_as(y)
    for i in range(3):
        x[:, i] += i
        y.mul_(1.5)
        z[:, 1] -= x[:, 0]
    return torch.cat([x, y, z], 1)


def write_that_nobody_reads(x: Tensor) -> Tensor:
    y = x + 1
    x.expand(x.shape[0], 6).unfold(1, 2, 2)[:, 0].add_(1)  # no inverse is known, and none is needed
    return y


AFFINE = [
    counted_from_behind,
    add,
    add_alpha,
    augmented,
    column,
    column_from_tensor,
    last_column,
    window,
    strided_window,
    window_of_window,
    broadcast_copy,
    view_of_base,
    sibling_views,
    through_view,
    through_reshape,
    reshape_that_copies,
    through_transpose,
    through_unsqueeze,
    through_split,
    through_unbind,
    through_contiguous,
    clone_is_a_copy,
    fill_and_zero,
    narrow,
    other_dtype,
    long_sequence,
    write_that_nobody_reads,
]


@pytest.mark.parametrize(
    "code", [relu, powers, functional_inplace, detached, diagonal, *AFFINE], ids=lambda f: f.__name__
)
def test_inplace_mean_equals_eager(code: Callable[[Tensor], Tensor]) -> None:
    model = Model(code)
    x = torch.randn(5, 4, dtype=torch.float64)
    belief = favour.compile(model, x)(x)
    with torch.no_grad():
        torch.testing.assert_close(belief.mean, model(x), rtol=0, atol=0)
    assert belief.variance.abs().max() == 0


@pytest.mark.parametrize("code", AFFINE, ids=lambda f: f.__name__)
def test_inplace_covariance_equals_jacobian(code: Callable[[Tensor], Tensor]) -> None:
    """f is affine, so its columns are f(e_i) − f(0) of the eager model, and Cov = JΣJᵀ exactly."""
    model = Model(code)
    x = torch.randn(3, 4, dtype=torch.float64)
    root = torch.randn(3, 4, 4, dtype=torch.float64)
    sigma = root @ root.mT
    belief = favour.compile(model, x, method="full")(favour.Belief(x, covariance=sigma))
    adjoint = favour.compile(model, x, method="adjoint")(favour.Belief(x, covariance=sigma))
    with torch.no_grad():
        zero = model(torch.zeros(1, 4, dtype=torch.float64)).flatten(1)
        J = (model(torch.eye(4, dtype=torch.float64)).flatten(1) - zero).T
        torch.testing.assert_close(belief.mean, model(x), rtol=1e-12, atol=1e-12)
        for result in (belief, adjoint):
            torch.testing.assert_close(result.covariance_matrix, J @ sigma @ J.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "code", [window, counted_from_behind, sibling_views, through_split, long_sequence], ids=lambda f: f.__name__
)
def test_inplace_draws_equal_eager(code: Callable[[Tensor], Tensor]) -> None:
    """The sampler runs the same graph, vectorised: with a rate of nearly 0 every draw is the eager output."""
    model = nn.Sequential(nn.Dropout(1e-9), Model(code))
    x = torch.randn(3, 4, dtype=torch.float64)
    draws = favour.sample(model, x, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model.eval()(x)
    torch.testing.assert_close(draws, want.expand(2, *want.shape), rtol=1e-6, atol=1e-6)


def test_inplace_operations_leave_no_trace() -> None:
    graph = capture(Model(long_sequence), torch.randn(2, 4, dtype=torch.float64))
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node.target


def test_inplace_slice_assignment_is_one_scatter() -> None:
    """`x[:, 1:3] += 1` exports as an add and a copy onto itself; the copy and whole slices are dropped."""
    graph = capture(Model(window), torch.randn(2, 4, dtype=torch.float64))
    calls = [str(n.target) for n in graph.nodes if n.kind == "call"]
    assert calls == [
        "aten.linear.default",
        "aten.slice.Tensor",
        "aten.add.Tensor",
        "aten.slice_scatter.default",
    ]


def test_inplace_relu_is_one_relu() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), torch.randn(2, 4))
    assert [str(n.target) for n in graph.nodes if n.kind == "call"] == [
        "aten.linear.default",
        "aten.relu.default",
    ]


def test_inplace_dropout_is_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3, inplace=True), nn.Linear(3, 2)).double()
    plain = nn.Sequential(model[0], nn.Dropout(0.3), model[2])
    x = torch.randn(3, 4, dtype=torch.float64)
    one, two = (favour.compile(m, x)(x).covariance_matrix for m in (model, plain))
    assert one.abs().max() > 0
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_inplace_write_to_the_input_leaves_the_callers_tensor_alone() -> None:
    class Careless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            x[:, 0] = 0
            return x * 2

    x = torch.randn(3, 4)
    before = x.clone()
    predict = favour.compile(Careless(), x)
    mean = predict(x).mean
    assert torch.equal(x, before)
    assert torch.equal(mean, Careless()(x.clone()))


def test_inplace_buffer_update_leaves_the_buffer_alone() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model = Counter()
    predict = favour.compile(model, torch.ones(2, 3))
    for _ in range(2):
        torch.testing.assert_close(predict(torch.ones(2, 3)).mean, torch.ones(2, 3))
    assert model.calls == 0


def test_inplace_write_without_inverse_is_refused_with_the_line() -> None:
    class Unfold(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.unfold(1, 2, 2).add_(1)
            return x

    with pytest.raises(favour.errors.UnsupportedOperation, match=r"aten.unfold.*in-place") as caught:
        favour.compile(Unfold(), torch.randn(3, 4))
    assert "test_inplace.py:" in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


def test_inplace_change_of_shape_is_refused() -> None:
    class Reshaped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            y.unsqueeze_(1)
            return y

    with pytest.raises(favour.errors.UnsupportedOperation, match="unsqueeze_"):
        favour.compile(Reshaped(), torch.randn(3, 4))


def test_inplace_random_fill_is_a_source() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x + 3 * torch.zeros_like(x).uniform_()

    x = torch.randn(3, 4)
    belief = favour.compile(Noisy(), x)(x)
    torch.testing.assert_close(belief.mean, 2 * x + 1.5)
    torch.testing.assert_close(belief.variance, torch.full_like(x, 9 / 12))
