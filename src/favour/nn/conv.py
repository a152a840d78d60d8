"""A convolution with independent Gaussian kernel entries.

y = K ∗ x + b with K_a ~ N(K̄_a, σ_a²). One kernel is drawn and used at every position and for the whole
batch, so the outputs at different positions are correlated.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .layer import MeanFieldLayer


class BayesConv2d(MeanFieldLayer, nn.Conv2d):
    """A 2-d convolution with mean-field Gaussian weights; the arguments of `torch.nn.Conv2d`, and two more.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: As in `torch.nn.Conv2d`, and so are `stride`, `padding`, `dilation`, `groups`, `bias` and
            `padding_mode`.
        prior_std: Standard deviation s of the prior N(0, s²), for `kl`.
        initial_std: Standard deviation of every weight before training.

    Example:
        >>> BayesConv2d(3, 4, 3, padding=1)(torch.ones(2, 3, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        prior_std: float = 1.0,
        initial_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )
        self._add_spread(prior_std, initial_std)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, std: float, prior_std: float = 1.0) -> BayesConv2d:
        """A Bayesian layer centred on a copy of `conv`'s weights, with standard deviations `std`."""
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,  # type: ignore[arg-type]
            stride=conv.stride,  # type: ignore[arg-type]
            padding=conv.padding,  # type: ignore[arg-type]
            dilation=conv.dilation,  # type: ignore[arg-type]
            groups=conv.groups,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            prior_std=prior_std,
            initial_std=std,
            device=conv.weight.device,
            dtype=conv.weight.dtype,
        )
        with torch.no_grad():
            layer.weight.copy_(conv.weight)
            if conv.bias is not None and layer.bias is not None:
                layer.bias.copy_(conv.bias)
        return layer.train(conv.training)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, in_channels, H, W): one draw of the kernel when live, else the mean forward."""
        return self._conv_forward(x, *self.current())
