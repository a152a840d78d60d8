"""A picture as a model takes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from favour.errors import InvalidValue
from favour.extras import require


def decode(
    file: str, shape: tuple[int, ...], mean: Sequence[float] | None, std: Sequence[float] | None
) -> npt.NDArray[np.float32]:
    """An image as (channels, height, width), resized, scaled to 0 … 1 and normalised."""
    image_module = require("PIL.Image", "rate")
    channels, height, width = shape
    if channels not in (1, 3):
        raise InvalidValue(f"the model takes {channels} channels; images have 1 (grey) or 3 (colour).")
    with image_module.open(file) as image:
        image.load()
        if image.mode.startswith("I;16"):  # 16 bits of grey, which a conversion to 8 would clip
            image = image_module.fromarray(np.asarray(image, np.float32) / 257, "F")
        image = image.convert("F" if image.mode == "F" and channels == 1 else "L" if channels == 1 else "RGB")
        if image.size != (width, height):
            image = image.resize((width, height), image_module.Resampling.BILINEAR)
        x = np.asarray(image, np.float32) / np.float32(255)
    x = x[None] if channels == 1 else x.transpose(2, 0, 1)
    centre = np.asarray(mean or (0.0,), np.float32)[:, None, None]
    scale = np.asarray(std or (1.0,), np.float32)[:, None, None]
    return (x - centre) / scale
