"""Layers that know one axis of inputs, mapped over the batch where an input has several.

A tensor of shape (k, C, …) for one input is (N, k, C, …). With k beside the channels or beside the positions the layer
does the same:

    acts on each channel alone (pools, resizing, dropout of channels, pixel shuffle)     (N, k·C, …)
    acts on every position alike (batch norm)                                            (N, C, k, …)
    convolution over d axes                                 one over d + 1 axes, (N, C, k, …), of width 1 along k
    group norm                                              layer norm over (N, k, groups, rest), then weight and bias
"""

from __future__ import annotations

import math
from typing import Any

import torch

from favour.graph.traits import Argument
from favour.passes.normalise.lifting import Call, Lifted, Unmapped, is_dropped, lifts
from favour.passes.rewriting import Shape

aten = torch.ops.aten


def _each_channel(spatial: int) -> Any:
    """Of a layer over (rows, channels, and so many more axes): channels do not meet."""

    def handler(call: Call) -> Lifted:
        node = call.node
        x = node.args[0]
        shape = call.shape_of(x)
        args, kwargs = call.swapped((node.args[1:], node.kwargs), call.kept)
        if len(shape) == spatial + 1:  # no axis of inputs at all
            out = None if node.shape is None else (call.batch, *call.shape)
            return call.call(node.target, call.whole(x), *args, shape=out, **kwargs), True
        if is_dropped(shape):
            return call.as_it_is()
        if node.shape is None:
            raise Unmapped("has several results, for several tensors of each input")
        many, channels = _numbers(shape[:2])
        value = call.whole(x)
        merged, _ = call.reshaped(value, (many * channels, *shape[2:]))
        out = call.shape
        made = call.call(
            node.target, merged, *args, shape=(call.batch, many * _numbers(out[1:2])[0], *out[2:]), **kwargs
        )
        return call.reshaped(made, out)

    return handler


_EACH_CHANNEL = {
    1: "max_pool1d.default avg_pool1d.default adaptive_avg_pool1d.default adaptive_max_pool1d.default "
    "upsample_nearest1d.vec upsample_nearest1d.default upsample_linear1d.vec upsample_linear1d.default "
    "reflection_pad1d.default replication_pad1d.default",
    2: "max_pool2d.default avg_pool2d.default adaptive_avg_pool2d.default adaptive_max_pool2d.default "
    "upsample_nearest2d.vec upsample_nearest2d.default upsample_bilinear2d.vec upsample_bilinear2d.default "
    "upsample_bicubic2d.vec upsample_bicubic2d.default reflection_pad2d.default replication_pad2d.default "
    "pixel_shuffle.default pixel_unshuffle.default im2col.default",
    3: "max_pool3d.default avg_pool3d.default adaptive_avg_pool3d.default "
    "upsample_nearest3d.vec upsample_nearest3d.default upsample_trilinear3d.vec upsample_trilinear3d.default",
}

for _spatial, _names in _EACH_CHANNEL.items():
    for _name in _names.split():
        _packet, _, _overload = _name.partition(".")
        lifts(getattr(getattr(aten, _packet), _overload))(_each_channel(_spatial))


@lifts(aten.feature_dropout.default, aten.feature_alpha_dropout.default)
def channel_dropout(call: Call) -> Lifted:
    """One draw for each channel of each tensor."""
    x, *rest = call.node.args
    shape = call.shape_of(x)
    if is_dropped(shape) or len(shape) < 2:
        return call.call(call.node.target, call.kept(x), *rest, shape=call.kept(x).shape), not is_dropped(shape)
    merged, _ = call.reshaped(call.whole(x), (math.prod(_numbers(shape[:2])), *shape[2:]))
    return call.reshaped(call.call(call.node.target, merged, *rest, shape=merged.shape), shape)


# --------------------------------------------------------------- convolutions

_WIDER = {
    aten.conv1d.default: (1, aten.conv2d.default),
    aten.conv2d.default: (2, aten.conv3d.default),
    aten.conv1d.padding: (1, aten.conv2d.padding),
    aten.conv2d.padding: (2, aten.conv3d.padding),
    aten.conv_transpose1d.default: (1, aten.conv_transpose2d.input),
    aten.conv_transpose2d.input: (2, aten.conv_transpose3d.input),
    aten.conv3d.default: (3, None),
    aten.conv_transpose3d.input: (3, None),
}


@lifts(*_WIDER)
def convolution(call: Call) -> Lifted:
    node = call.node
    x, weight, *rest = node.args
    spatial, wider = _WIDER[node.target]
    shape, out = call.shape_of(x), call.shape
    if call.depends(weight):
        raise Unmapped("has a kernel that differs from input to input")
    if len(shape) == spatial + 1:
        args = call.swapped((weight, *rest), call.kept)
        return call.call(node.target, call.whole(x), *args, shape=(call.batch, *out)), True
    if is_dropped(shape):
        return call.as_it_is()
    if wider is None:
        raise Unmapped(f"convolves {shape[0]} volumes of each input, (N, {shape[0]}, C, D, H, W)")
    kernel = weight.shape
    wide = call.call(aten.unsqueeze.default, call.swapped(weight, call.kept), 2, shape=(*kernel[:2], 1, *kernel[2:]))
    first = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    wider_args: list[Any] = []
    for a in node.target._schema.arguments[2:]:
        value = call.argument(a.name)
        if a.name in first and not isinstance(value, str):
            sizes = [value] if isinstance(value, int) else list(value)
            value = [first[a.name], *(sizes if len(sizes) == spatial else sizes * spatial)]
        wider_args.append(call.swapped(value, call.kept))
    moved = _second(call, call.whole(x))
    made = call.call(wider, moved, wide, *wider_args, shape=(call.batch, out[1], out[0], *out[2:]))
    return _second(call, made), True


def _second(call: Call, x: Argument) -> Any:
    """The two axes behind the batch exchanged."""
    batch, one, two, *rest = x.shape
    return call.call(aten.transpose.int, x, 1, 2, shape=(batch, two, one, *rest))


# --------------------------------------------------------------------- norms


@lifts(aten.batch_norm.default)
def batch_norm(call: Call) -> Lifted:
    x, *rest = call.node.args
    shape = call.shape_of(x)
    rest = call.swapped(rest, call.kept)
    if is_dropped(shape) and len(shape) > 1:
        value = call.kept(x)
        return call.call(aten.batch_norm.default, value, *rest, shape=value.shape), False
    moved = _second(call, call.whole(x))
    return _second(call, call.call(aten.batch_norm.default, moved, *rest, shape=moved.shape)), True


@lifts(aten.group_norm.default, aten.instance_norm.default)
def group_norm(call: Call) -> Lifted:
    node = call.node
    x, shape = node.args[0], call.shape_of(node.args[0])
    grouped = node.target is aten.group_norm.default
    if is_dropped(shape):
        value = call.kept(x)
        return call.call(node.target, value, *call.swapped(node.args[1:], call.kept), shape=value.shape), False
    if not grouped and call.argument("running_mean") is not None:
        return _with_statistics(call)
    many, channels, *rest = shape
    groups = int(call.argument("num_groups") if grouped else channels)
    size = math.prod(_numbers(shape[1:])) // groups
    parts: Shape = (many, groups, size)
    value, _ = call.reshaped(call.whole(x), parts)
    y = call.call(aten.layer_norm.default, value, [size], None, None, call.argument("eps"), shape=value.shape)
    y, _ = call.reshaped(y, shape)
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        p = call.argument(name)
        if p is not None:
            column = (channels, *[1] * len(rest))
            p = call.call(aten.reshape.default, call.swapped(p, call.kept), list(column), shape=column)
            y = call.call(op, y, p, shape=y.shape)
    return y, True


def _with_statistics(call: Call) -> Lifted:
    """An instance norm that has running statistics is a batch norm."""
    names = ("weight", "bias", "running_mean", "running_var")
    values = [call.swapped(call.argument(n), call.kept) for n in names]
    moved = _second(call, call.whole(call.node.args[0]))
    options = (False, call.argument("momentum"), call.argument("eps"), False)
    return _second(call, call.call(aten.batch_norm.default, moved, *values, *options, shape=moved.shape)), True


def _numbers(sizes: Shape) -> list[int]:
    """Sizes that have to be known."""
    if not all(isinstance(s, int) for s in sizes):
        raise Unmapped("acts on several tensors of each input with a dynamic size")
    return [int(s) for s in sizes]


@lifts(aten.prelu.default)
def prelu(call: Call) -> Lifted:
    x, weight = call.node.args
    if is_dropped(call.shape) and len(call.shape) > 1:
        return call.as_it_is()
    if weight.shape not in ((), (1,)):
        raise Unmapped("has a slope for each channel, and acts on several tensors of each input")
    value = call.whole(x)
    return call.call(aten.prelu.default, value, call.swapped(weight, call.kept), shape=value.shape), True
