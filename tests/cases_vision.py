"""Named cases for convolution, pooling, resampling and channel dropout; see `cases`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import CASES, F64, Case, c, case, linear, randn, refused, x

# Convolution


def kernel(*shape: int, bias: int | None = None) -> tuple[Any, ...]:
    return randn(shape), None if bias is None else randn(bias)


linear("aten.conv1d.default", lambda: (x(2, 6), *kernel(3, 2, 3, bias=3)))
linear("aten.conv1d.default", lambda: (x(2, 6), *kernel(4, 1, 2), [3], [1], [2], 2), "all options")
linear("aten.conv2d.default", lambda: (x(2, 4, 3), *kernel(3, 2, 2, 3, bias=3)))
linear("aten.conv2d.default", lambda: (x(2, 5, 4), *kernel(2, 2, 3, 3), [2, 3], [1, 1]), "windows that do not fill")
linear("aten.conv2d.default", lambda: (x(2, 5, 4), *kernel(4, 1, 2, 2, bias=4), [2, 1], [0, 1], [2, 1], 2), "groups")
linear("aten.conv2d.default", lambda: (x(2, 3, 3), *kernel(2, 2, 2, 2), [1], [1]), "one number for all axes")
linear("aten.conv3d.default", lambda: (x(1, 3, 2, 3), *kernel(2, 1, 2, 2, 2, bias=2), [2, 1, 1], [0, 0, 1]))
linear("aten.conv1d.padding", lambda: (x(2, 5), *kernel(2, 2, 4, bias=2), [1], "same"), "even window")
linear("aten.conv2d.padding", lambda: (x(2, 3, 3), *kernel(3, 2, 2, 3), [1, 1], "same", [1, 1]))
linear("aten.conv2d.padding", lambda: (x(2, 4, 3), *kernel(2, 1, 2, 2, bias=2), [2, 1], "valid", [1, 1], 2), "valid")
linear("aten.conv3d.padding", lambda: (x(1, 2, 2, 3), *kernel(2, 1, 2, 1, 2), [1, 1, 1], "same", [1, 1, 2]))
linear("aten.conv_transpose1d.default", lambda: (x(2, 3), *kernel(2, 3, 3, bias=3)))
linear("aten.conv_transpose1d.default", lambda: (x(2, 3), *kernel(2, 2, 2), [2], [1], [3], 1, [4]), "long output")
linear("aten.conv_transpose2d.input", lambda: (x(2, 3, 2), *kernel(2, 2, 3, 2, bias=4), [2, 1], [1, 0], [1, 0], 2))
linear("aten.conv_transpose3d.input", lambda: (x(1, 2, 2, 2), *kernel(1, 2, 2, 2, 1), [2, 1, 1]))
linear(
    "aten.convolution.default",
    lambda: (x(2, 4, 3), *kernel(2, 2, 2, 2, bias=2), [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
)
linear(
    "aten.convolution.default",
    lambda: (x(2, 3, 2), *kernel(2, 1, 2, 2), [2, 2], [0, 0], [1, 1], True, [1, 0], 2),
    "transposed",
)
refused("aten.conv1d.default", lambda: (x(6), *kernel(3, 3, 3)), "no batch")
refused("aten.conv2d.default", lambda: (x(2, 3, 3), x(2, 2, 2)), "an uncertain kernel")

# Averages

linear("aten.avg_pool1d.default", lambda: (x(2, 6), [2]))
linear("aten.avg_pool1d.default", lambda: (x(2, 6), [3], [2], [1], True, False), "all options")
linear("aten.avg_pool2d.default", lambda: (x(2, 4, 4), [2, 2], [2, 2]))
linear("aten.avg_pool2d.default", lambda: (x(1, 5, 4), [3, 2], [2, 1], [1, 1]), "padding counts")
linear("aten.avg_pool2d.default", lambda: (x(1, 5, 4), [3, 2], [2, 1], [1, 1], False, False), "padding does not")
linear("aten.avg_pool2d.default", lambda: (x(1, 5, 4), [3, 3], [2, 2], [1, 0], True), "cut off at the end")
linear("aten.avg_pool2d.default", lambda: (x(1, 3, 4), [2], [1], [0], False, True, 3), "divisor")
linear("aten.avg_pool3d.default", lambda: (x(1, 3, 3, 4), [2, 2, 2], [1, 2, 2], [0, 1, 0]))
linear("aten.adaptive_avg_pool1d.default", lambda: (x(2, 5), [3]))
linear("aten.adaptive_avg_pool1d.default", lambda: (x(2, 6), [2]), "equal windows")
linear("aten.adaptive_avg_pool2d.default", lambda: (x(2, 3, 4), [1, 1]), "one window")
linear("aten.adaptive_avg_pool2d.default", lambda: (x(1, 5, 2), [3, 4]), "unequal windows")
linear("aten.adaptive_avg_pool3d.default", lambda: (x(1, 3, 2, 4), [2, 1, 2]))

# Maxima


@dataclass(frozen=True, eq=False)
class Maximum(Case):
    """Of the results only the values: where they were has no moments."""

    def on_means(self, *args: Any) -> Any:
        made = self.op(*args, **self.kwargs)
        return made[0] if isinstance(made, tuple) else made


def maximum(overload: str, build: Callable[[], Sequence[Any]], label: str = "") -> None:
    CASES.append(Maximum(overload, "curved", build, {}, label))


for _tail in ("default", "indices"):
    _name = "" if _tail == "default" else "_with_indices"
    maximum(f"aten.max_pool1d{_name}.default", lambda: (x(2, 6), [2]))
    maximum(f"aten.max_pool1d{_name}.default", lambda: (x(1, 7), [3], [2], [1], [2], True), "all options")
    maximum(f"aten.max_pool2d{_name}.default", lambda: (x(2, 4, 4), [2, 2], [2, 2]))
    maximum(f"aten.max_pool2d{_name}.default", lambda: (x(1, 5, 4), [3, 3], [2, 1], [1, 1]), "overlapping")
    maximum(
        f"aten.max_pool2d{_name}.default", lambda: (x(1, 5, 5), [2, 2], [2, 2], [0], [1], True), "cut off at the end"
    )
    maximum(f"aten.max_pool3d{_name}.default", lambda: (x(1, 3, 2, 4), [2, 2, 2], [1, 2, 2]))
maximum("aten.adaptive_max_pool1d.default", lambda: (x(2, 6), [2]))
maximum("aten.adaptive_max_pool2d.default", lambda: (x(1, 5, 4), [2, 2]), "unequal windows")
maximum("aten.adaptive_max_pool2d.default", lambda: (x(2, 3, 3), [1, 1]), "one window")
maximum("aten.adaptive_max_pool3d.default", lambda: (x(1, 2, 2, 5), [1, 2, 3]))
maximum("aten.amax.default", lambda: (x(2, 3, 3), [-1, 2]))
maximum("aten.amax.default", lambda: (x(2, 3), [2], True), "kept dimension")
maximum("aten.max.dim", lambda: (x(4, 3), 1))
maximum("aten.max.dim", lambda: (x(4, 3), -1, True), "kept dimension")

# Padding, resizing, rearranging

linear("aten.pad.default", lambda: (x(2, 3, 2), [1, 0, 2, 1]))
linear("aten.pad.default", lambda: (x(2, 3), [1, 1], "constant", 2.5), "a number")
linear("aten.pad.default", lambda: (x(2, 4, 3), [-1, 2, 1, -2]), "cut off")
linear("aten.pad.default", lambda: (x(1, 3, 4), [2, 1, 1, 2], "reflect"), "reflect")
linear("aten.pad.default", lambda: (x(1, 2, 3), [3, 1, 0, 2], "replicate"), "replicate")
linear("aten.pad.default", lambda: (x(1, 3, 4), [2, 1, 1, 3], "circular"), "circular")
linear("aten.pad.default", lambda: (x(2, 4), [1, 2], "reflect"), "reflect, one axis")
refused("aten.pad.default", lambda: (x(2), [0, 0, 1, 0]), "the batch, dimension 0")
linear("aten.constant_pad_nd.default", lambda: (x(2, 3, 2), [1, 0, 2, 1], 1.5))
for _exact in ("upsample_nearest", "_upsample_nearest_exact"):
    linear(f"aten.{_exact}1d.vec", lambda: (x(2, 3), None, [2.0]))
    linear(f"aten.{_exact}2d.vec", lambda: (x(1, 3, 2), [5, 4], None), "sizes")
    linear(f"aten.{_exact}2d.vec", lambda: (x(1, 2, 3), None, [2.0, 1.5]), "factors")
    linear(f"aten.{_exact}3d.vec", lambda: (x(1, 2, 1, 2), None, [2.0, 3.0, 1.0]))
linear("aten.upsample_linear1d.vec", lambda: (x(2, 4), None, False, [1.7]))
linear("aten.upsample_linear1d.vec", lambda: (x(2, 4), [7], True, None), "corners")
for _smooth in ("upsample_bilinear2d", "upsample_bicubic2d"):
    linear(f"aten.{_smooth}.vec", lambda: (x(1, 3, 2), None, False, [2.0, 1.5]), "factors")
    linear(f"aten.{_smooth}.vec", lambda: (x(1, 3, 4), [5, 3], True, None), "corners, one axis smaller")
    linear(f"aten._{_smooth}_aa.vec", lambda: (x(1, 6, 3), [2, 4], False, None))
linear("aten.upsample_trilinear3d.vec", lambda: (x(1, 2, 2, 3), [3, 2, 4], False, None))
linear("aten.pixel_shuffle.default", lambda: (x(8, 2, 1), 2))
linear("aten.pixel_unshuffle.default", lambda: (x(1, 4, 2), 2))
linear("aten.channel_shuffle.default", lambda: (x(6, 2, 1), 2))
linear("aten.im2col.default", lambda: (x(2, 3, 4), [2, 2], [1, 2], [0, 1], [1, 1]))
linear("aten.im2col.default", lambda: (x(1, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]), "disjoint")
linear("aten.col2im.default", lambda: (x(4, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]))

# Dropout of channels, and with a value instead of zero

RATES = torch.tensor([0.0, 0.3, 0.9], dtype=F64).reshape(3, 1, 1)
SATURATED = -1.0507009873554805 * 1.6732632423543772  # SELU at −∞


@dataclass(frozen=True, eq=False)
class Alpha(Case):
    """The mean of y = a(Mx + α′(1 − M)) + b with torch's a and b."""

    def on_means(self, *args: Any) -> Any:
        x, p, live = args
        q = 1 - p
        return x * q / (q + SATURATED**2 * p * q) ** 0.5 if live else x


case("aten.feature_dropout.default", "dropout", lambda: (x(3, 4), 0.3, True), "one axis")
case("aten.feature_dropout.default", "dropout", lambda: (x(3, 2, 2), RATES, True), "rates")
case("aten.feature_dropout.default", "dropout", lambda: (x(2, 2, 1, 3), 0.4, True), "three axes")
case("aten.feature_dropout.default", "dropout", lambda: (x(4), 0.3, True), "no space")
case("aten.feature_dropout.default", "dropout", lambda: (c(2, 3), 0.3, True), "known input")
case("aten.feature_dropout.default", "dropout", lambda: (x(2, 3), 0.3, False), "not live")
for _name in ("alpha_dropout", "feature_alpha_dropout"):
    for _label, _build in {
        "one rate": lambda: (x(2, 3), 0.3, True),
        "rates": lambda: (x(3, 2, 2), RATES, True),
        "known input": lambda: (c(2, 3), 0.3, True),
        "not live": lambda: (x(2, 3), 0.3, False),
    }.items():
        CASES.append(Alpha(f"aten.{_name}.default", "dropout", _build, {}, _label))
