"""What moves or mixes the inputs of a batch is refused by name when the model is compiled, whatever the operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import favour
from favour.rules import RULES
from favour.surrogate import Surrogate, structural

aten = torch.ops.aten


class Behind(nn.Module):
    """A function of what a layer with dropout makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.drop, self.function = nn.Linear(4, 6), nn.Dropout(0.3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.drop(torch.relu(self.layer(x))))


def turned(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device).flip(0)


MIXING = {
    "flip": lambda z: z.flip(0),
    "flip of two": lambda z: z.flip(0, 1),
    "flipud": torch.flipud,
    "roll": lambda z: z.roll(1, 0),
    "rolled through": lambda z: z.roll(1),
    "index": lambda z: z[turned(z)],
    "index_select": lambda z: z.index_select(0, turned(z)),
    "gather": lambda z: z.gather(0, turned(z).unsqueeze(1).expand(-1, 6)),
    "take_along_dim": lambda z: z.take_along_dim(turned(z).unsqueeze(1).expand(-1, 6), 0),
    "sort": lambda z: z.sort(0)[0],
    "halves exchanged": lambda z: torch.cat([z[1:], z[:1]]),
    "chunks": lambda z: torch.cat(z.chunk(2)[::-1]),
    "less the first": lambda z: z - z[0],
    "less the first, numbers": lambda z: z.sum(1) - z.sum(1)[0],
    "less the mean": lambda z: z - z.mean(0),
    "less the mean, kept": lambda z: z - z.mean(0, keepdim=True),
    "less the greatest": lambda z: z - z.amax(0),
    "standardised": lambda z: z / z.std(0),
    "normalised": lambda z: nn.functional.normalize(z, dim=0),
    "cumsum": lambda z: z.cumsum(0),
    "cumprod": lambda z: z.cumprod(0),
    "cummax": lambda z: z.cummax(0)[0],
    "softmax": lambda z: z.softmax(0),
    "log_softmax": lambda z: z.log_softmax(0),
    "logsumexp": lambda z: z - z.logsumexp(0),
    "inner products": lambda z: z @ z.T,
    "inner products, transposed": lambda z: z @ z.transpose(0, 1),
    "inner products by einsum": lambda z: torch.einsum("bi,ci->bc", z, z),
    "all pairs": lambda z: (z.unsqueeze(1) - z).sum(1),
    "all pairs, times": lambda z: (z.unsqueeze(1) * z).sum(1),
    "all pairs, greatest": lambda z: (z.unsqueeze(1) + z).amax(1),
    "distances": lambda z: torch.cdist(z, z),
    "transposed and back": lambda z: z.T.flip(1).T,
    "reshaped across": lambda z: z.T.reshape(z.shape),
    "turned plane": lambda z: z.unsqueeze(1).rot90(2, [0, 1]).squeeze(1),
    "repeated and cut": lambda z: z.repeat(2, 1)[1 : z.shape[0] + 1],
    "triangle": lambda z: z.tril(),
    "batch norm": lambda z: nn.functional.batch_norm(z, None, None, training=True),
    "shuffled": lambda z: z[torch.randperm(z.shape[0])],
    "attention over the batch": lambda z: nn.functional.scaled_dot_product_attention(z, z, z),
    "written": lambda z: torch.zeros_like(z).index_copy(0, turned(z), z),
    "added": lambda z: torch.zeros_like(z).index_add(0, turned(z), z),
    "scattered": lambda z: torch.zeros_like(z).scatter_add(0, turned(z).unsqueeze(1).expand(-1, 6), z),
    "where": lambda z: torch.where(z > 0, z.flip(0), 0.0),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_the_batch_is_refused(name):
    with pytest.raises(favour.FavourError, match=r"dimension 0|first dimension|batch|no rule|random|discrete"):
        favour.compile(Behind(MIXING[name]), torch.randn(5, 4))


@pytest.mark.parametrize("method", ["auto", "diag", "dplr", "full"])
def test_the_message_names_operation_and_place(method):
    told = r"(?s)dimension 0.*aten\.flip\.default` at .*test_rows\.py:\d+"
    with pytest.raises(favour.errors.UnsupportedOperation, match=told):
        favour.compile(Behind(MIXING["flip"]), torch.randn(5, 4), method=method)


def test_all_such_operations_in_one_message():
    with pytest.raises(favour.errors.UnsupportedOperation, match=r"(?s)2 operation.*aten\.flip.*aten\.index_select"):
        favour.compile(Behind(lambda z: z.flip(0).index_select(0, turned(z))), torch.randn(5, 4))


def test_an_example_of_one_input_is_enough():
    with pytest.raises(favour.errors.UnsupportedOperation, match=r"aten\.flip"):
        favour.compile(Behind(MIXING["flip"]), torch.randn(1, 4))


def test_beliefs_as_inputs_are_looked_at_when_they_come():
    """Before the first noise the network computes what it computes; a Belief there is mixed."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x.flip(0))

    x = torch.randn(5, 4)
    predict = favour.compile(Turned(), x)
    torch.testing.assert_close(predict(x).mean, x.flip(0))
    with pytest.raises(favour.errors.UnsupportedOperation, match=r"aten\.flip"):
        predict(favour.Belief(x, diag=torch.ones_like(x)))


def test_a_rule_of_the_users_that_mixes_is_refused():
    overload = aten.rot90.default
    before = RULES[overload]

    def upside_down(ctx, x, k, dims):
        return Surrogate(x.mean.flip(0), [(x, structural(lambda d: d.flip(1), lambda g: g.flip(1)))])

    try:
        favour.rule(overload, override=True)(upside_down)
        with pytest.raises(favour.errors.UnsupportedOperation, match=r"aten\.rot90"):
            favour.compile(Behind(lambda z: z.unsqueeze(2).rot90(0, [1, 2]).squeeze(2)), torch.randn(5, 4))
    finally:
        RULES[overload] = before


KEEPING = {
    "flip": lambda z: z.flip(1),
    "all rows by index": lambda z: z[torch.arange(z.shape[0])],
    "a slice of all": lambda z: z[:],
    "known in front": lambda z: torch.arange(6.0) * z,
    "largest": lambda z: z - z.amax(1, keepdim=True),
    "attention": lambda z: nn.functional.scaled_dot_product_attention(*[z.view(-1, 3, 2)] * 3).flatten(1),
    "distances": lambda z: torch.cdist(z.view(-1, 3, 2), z.view(-1, 3, 2)),
    "outer": lambda z: z.unsqueeze(2) * z.unsqueeze(1),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_the_inputs_apart_is_taken(name):
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    predict = favour.compile(Behind(KEEPING[name]), x)
    together, order = predict(x), torch.tensor([3, 0, 4, 1, 2])
    permuted, alone = predict(x[order]), predict(x[1:2])
    for part in ("mean", "variance"):
        torch.testing.assert_close(getattr(permuted, part), getattr(together, part)[order])
        torch.testing.assert_close(getattr(alone, part), getattr(together, part)[1:2])


def test_an_empty_batch_waits_for_a_full_one():
    predict = favour.compile(Behind(torch.relu), torch.randn(0, 4))
    assert predict(torch.randn(0, 4)).mean.shape == (0, 6)
    assert predict(torch.randn(3, 4)).mean.shape == (3, 6)


def test_gradients_of_the_first_call_with_beliefs_flow():
    """The trial runs without gradients, and leaves nothing of that behind."""
    x, v = torch.randn(3, 4), torch.rand(3, 4, requires_grad=True)
    predict = favour.compile(nn.Sequential(nn.Linear(4, 3), nn.GELU()), x)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(predict(favour.Belief(x, diag=v)).mean.sum(), v)
        assert gradient.abs().min() > 0
