"""Functions of a batch recorded at two sizes, and operations written out for files."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import favour
from favour.errors import UnsupportedOperation
from favour.exporting import written_out
from favour.exporting.aligned import program_of
from favour.exporting.recording import ROWS


def program(function, *shape, form=".pt2"):
    examples = tuple([torch.randn(n, *shape)] for n in ROWS)
    return program_of(function, examples, lambda module: module, written_out.substitutes(form))


def test_sizes_follow_the_batch():
    """Halves, stacks and offsets of it, an input written to in place, and a table made from it."""

    def function(x):
        twice = torch.cat([x, x + 1]).reshape(-1, 2)
        rows = torch.arange(2 * x.shape[0] + 1, dtype=x.dtype)
        y = twice.clone()
        y.mul_(2)
        return {"a": y, "b": rows[1:].reshape(-1, 2) * x.sum(1, keepdim=True)}

    module = program(function, 4).module(check_guards=False)
    for n in (1, 2, 7):
        x = torch.randn(n, 4)
        torch.testing.assert_close(module(x), function(x))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: {"a": x if x.sum() > 0 else -x}, "decides by the values"),
        (lambda x: {"a": x[x > 0]}, "decides by the values"),
        (lambda x: {"a": torch.stack([row.exp() for row in x])}, "number of rows"),
        (lambda x: {"a": x * (1 / len(x))}, "number of rows"),
    ],
)
def test_what_no_fixed_sequence_of_operations_is_is_refused(function, words):
    with pytest.raises(UnsupportedOperation, match=words):
        program(function, 3)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("size", "stride", "padding"), [((3, 2), (2, 2), (1, 0)), ((2, 2), (), (0, 0))])
def test_pools_are_written_out(size, stride, padding, ceil_mode, include):
    x = torch.randn(2, 3, 8, 7, dtype=torch.float64, requires_grad=True)
    y = F.avg_pool2d(x, size, stride or None, padding, ceil_mode, include)
    g = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, x, g)
    have = written_out.mean_pool_transposed(g, x.detach(), size, stride, padding, ceil_mode, include, None)
    torch.testing.assert_close(have, want)
    summed = F.avg_pool2d(x, size, stride or None, padding, ceil_mode, divisor_override=1)
    torch.testing.assert_close(written_out.mean_pool(x, size, stride, padding, ceil_mode, True, 1), summed)


def test_other_operations_are_written_out():
    x = torch.randn(2, 3, 5, 7)
    torch.testing.assert_close(written_out.adaptive_mean_pool(x, (3, 2)), F.adaptive_avg_pool2d(x, (3, 2)))
    torch.testing.assert_close(written_out.log_sigmoid(x)[0], F.logsigmoid(x))
    masked = torch.where(torch.tensor([[True], [False]]), -torch.inf, x[:, 0, 0])
    torch.testing.assert_close(written_out.safe_softmax(masked, -1), torch.ops.aten._safe_softmax(masked, -1))
    torch.testing.assert_close(written_out.diagonal_matrices(x), x.diag_embed())
    torch.testing.assert_close(written_out.subtracted_from(x, 2.0, 3), torch.rsub(x, 2.0, alpha=3))
    w, b, mean, variance = torch.rand(4, 3)
    have = written_out.batch_norm(x, w, b, mean, variance, False, 0.1, 1e-5)[0]
    torch.testing.assert_close(have, F.batch_norm(x, mean, variance, w, b))


class Looked(nn.Module):
    """A column of numbers that is looked up, an argument that may be None, a result of a class without names."""

    def __init__(self):
        super().__init__()
        self.table, self.top = nn.Embedding(3, 4), nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 2))

    def forward(self, x, more=None):
        seen = self.table(x[:, 0].long()) * F.one_hot(x[:, 0].long(), 4)
        return self.top(torch.cat([seen, x[:, 1:]], 1))


def test_looked_up_columns_and_arguments_that_are_none(tmp_path):
    torch.manual_seed(0)
    x = torch.cat([torch.randint(0, 3, (5, 1)).float(), torch.randn(5, 2)], 1)
    predict = favour.compile(Looked().eval(), (x, None), check=False)
    model = favour.load_exported(favour.export(predict, tmp_path / "looked.pt2", kind="regression"))
    assert len(model.inputs) == 1
    torch.testing.assert_close(torch.from_numpy(model(x)["mean"]), predict(x, None).mean)


def test_one_event_a_call_is_refused_by_name(tmp_path):
    predict = favour.compile(
        nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), torch.randn(4, 3), batched=False, check=False
    )
    with pytest.raises(UnsupportedOperation, match="batched=False"):
        favour.export(predict, tmp_path / "graph.pt2")
