"""The batch wherever a model puts it: functions that fold, move and stack it, mapped over the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from favour.graph.interpreter import call, interpret
from favour.passes.capture import capture
from favour.passes.normalise.lifting import out_of_place

N = 4


class Function(nn.Module):
    """A function of x, and of some fixed numbers as parameters."""

    def __init__(self, function) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        for name, shape in WEIGHTS.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


WEIGHTS = {
    "k1": (4, 3, 3),
    "k2": (4, 3, 3, 3),
    "k2t": (3, 2, 2, 2),
    "grouped": (6, 1, 3, 3),
    "c3": (3,),
    "c6": (6,),
    "m": (5, 2),
    "t3": (3, 5),
    "row": (1, 3, 5),
}

SEQUENCE, IMAGES, SERIES = (N, 3, 5), (N, 2, 3, 8, 8), (N, 2, 3, 8)


def images(x: Tensor) -> Tensor:
    """(N, 2, 3, 8, 8), folded."""
    return x.flatten(0, 1)


# Name, shape of the input, function.
FUNCTIONS = {
    "conv2d": (IMAGES, lambda p, x: F.conv2d(images(x), p.k2, padding=1).view(x.shape[0], 2, 4, 8, 8)),
    "conv2d strided": (IMAGES, lambda p, x: F.conv2d(images(x), p.k2, stride=2, dilation=2).view(x.shape[0], -1)),
    "conv2d same": (IMAGES, lambda p, x: F.conv2d(images(x), p.k2, padding="same").view(x.shape[0], -1)),
    "conv2d grouped": (
        IMAGES,
        lambda p, x: F.conv2d(x.transpose(0, 1).flatten(0, 1).repeat(1, 2, 1, 1), p.grouped, p.c6, groups=6)
        .view(2, x.shape[0], -1)
        .transpose(0, 1),
    ),
    "conv1d": (SERIES, lambda p, x: F.conv1d(x.flatten(0, 1), p.k1).view(x.shape[0], 2, 4, 6)),
    "conv_transpose2d": (
        IMAGES,
        lambda p, x: F.conv_transpose2d(images(x), p.k2t, stride=2, output_padding=1).view(x.shape[0], -1),
    ),
    "batch norm": (
        IMAGES,
        lambda p, x: F.batch_norm(images(x), p.c3.detach(), p.c3.detach() ** 2, p.c3, p.c3).view(x.shape),
    ),
    "group norm": (IMAGES, lambda p, x: F.group_norm(images(x), 3, p.c3, p.c3).view(x.shape[0], 2, 3, 8, 8)),
    "instance norm": (IMAGES, lambda p, x: F.instance_norm(images(x), weight=p.c3).view(x.shape[0], -1)),
    "max pool": (IMAGES, lambda p, x: F.max_pool2d(images(x), 2).view(x.shape[0], -1)),
    "average pool": (IMAGES, lambda p, x: F.adaptive_avg_pool2d(images(x), 2).reshape(x.shape[0], 2, 12)),
    "resizing": (
        IMAGES,
        lambda p, x: F.interpolate(images(x), scale_factor=2, mode="bilinear").view(x.shape[0], -1),
    ),
    "heads in the batch": (
        SEQUENCE,
        lambda p, x: torch.bmm(h := (x @ p.m).transpose(1, 2).reshape(-1, 3, 1), h.transpose(1, 2)).view(len(x), 18),
    ),
    "baddbmm": (
        SEQUENCE,
        lambda p, x: torch.baddbmm(p.m[:1, :1], x.transpose(0, 1), x.permute(1, 2, 0), beta=0.5, alpha=2)
        .diagonal(0, 1, 2)
        .transpose(0, 1),
    ),
    "positions first": (SEQUENCE, lambda p, x: (x.transpose(0, 1) @ p.m).softmax(-1).sum(0)),
    "stacked in front": (
        SEQUENCE,
        lambda p, x: torch.stack([x, x.sin(), x.cos()])[1:].sum(0),
    ),
    "unbound in front": (
        SEQUENCE,
        lambda p, x: (lambda q, k, v: q * k + v)(*x.view(x.shape[0], 3, 1, 5).permute(1, 0, 2, 3).unbind(0)),
    ),
    "chunks in front": (SEQUENCE, lambda p, x: torch.cat([x, -x]).chunk(2, 0)[1] * x),
    "softmax over the front": (SEQUENCE, lambda p, x: x.permute(1, 0, 2).softmax(0).permute(1, 0, 2)),
    "broadcast": (SEQUENCE, lambda p, x: (x.transpose(0, 1) + p.t3.unsqueeze(1)).transpose(0, 1) * p.row),
    "a parameter times folded columns": (
        SEQUENCE,
        lambda p, x: (p.t3 @ x.permute(2, 0, 1).flatten(1)).view(3, x.shape[0], 3).transpose(0, 1),
    ),
    "layer norm": (SEQUENCE, lambda p, x: F.layer_norm(x.flatten(0, 1), (5,)).view(x.shape[0], 15)),
    "windows": (
        IMAGES,
        lambda p, x: x[:, 0].view(-1, 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 3)
        .softmax(1)
        .view(-1, 2, 2, 4, 4, 3)
        .permute(0, 1, 3, 2, 4, 5)
        .reshape(-1, 8, 8, 3),
    ),
    "rolled": (IMAGES, lambda p, x: images(x).roll((1, 2), (2, 3)).view(x.shape)),
    "einsum": (SEQUENCE, lambda p, x: torch.einsum("tbd,tbe->bde", x.transpose(0, 1), x.transpose(0, 1).sin())),
    "picked": (SEQUENCE, lambda p, x: x.transpose(0, 1)[torch.tensor([2, 0])].sum(0)),
    "own places": (SEQUENCE, lambda p, x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(-1)]),
    "gathered": (SEQUENCE, lambda p, x: x.flatten(0, 1).gather(1, x.flatten(0, 1).argsort(1)).view(x.shape)),
    "padded": (SEQUENCE, lambda p, x: F.pad(x.transpose(0, 1), (1, 0, 0, 0, 2, 0)).transpose(0, 1)),
    "length": (SEQUENCE, lambda p, x: x.reshape(len(x), -1) / float(int(x.shape[1]))),
    "repeated": (SEQUENCE, lambda p, x: x.transpose(0, 1).repeat(2, 1, 1).sum(0)),
    "expanded": (SEQUENCE, lambda p, x: x.unsqueeze(0).expand(2, -1, -1, -1).flatten(0, 1).view(2, -1, 15).sum(0)),
    "cumulative": (SEQUENCE, lambda p, x: x.transpose(0, 1).cumsum(0).transpose(0, 1)),
    "maxima": (SEQUENCE, lambda p, x: x.transpose(0, 1).max(0).values),
    "vectors": (SEQUENCE, lambda p, x: (x.transpose(0, 1) @ p.t3[0]).transpose(0, 1)),
}  # fmt: skip


def outputs(graph, x: Tensor, model: nn.Module) -> Tensor:
    values = {}
    for node in graph.nodes:
        if node.kind == "input":
            values[node] = x
        elif node.kind == "parameter":
            values[node] = model.get_parameter(node.target)
        elif node.kind != "call":
            values[node] = graph.constants[node.target]
    with torch.no_grad():
        return interpret(graph.calls, values, call)[graph.outputs[0]]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lifting_keeps_the_function_and_puts_the_batch_in_front(name: str) -> None:
    shape, function = FUNCTIONS[name]
    model = Function(function)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    graph = capture(model, x)
    batch = graph.inputs[0].shape[0]
    assert not out_of_place(graph, batch)
    for rows in (x, x[:1], torch.cat([x, x.flip(0)])):
        torch.testing.assert_close(outputs(graph, rows, model), function(model, rows))
