"""Modules whose dropout is left out, because what they belong to predicts without it (`favour.adapters.silence`)."""

from __future__ import annotations

from torch import nn

MARK = "favour_silent"


def quiet(model: nn.Module) -> None:
    """Put every module that is marked, and all inside it, into eval mode."""
    for module in model.modules():
        if getattr(module, MARK, False):
            module.eval()
