"""What a fit gives back, and its file."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from favour.errors import CorruptFile
from favour.learn.history import Record
from favour.posterior import Posterior
from favour.predictor.predictor import Predictor
from favour.saving import from_bytes, to_bytes

_FORMAT = "favour.fitted/1"


@dataclass(frozen=True, eq=False, repr=False)
class Fitted:
    """The result of `favour.fit`.

    Attributes:
        predict: A predictor of the fitted model: call it like the model. Its beliefs are over the network's outputs;
            for observations there is `fitted.predict.with_noise(fitted.noise_variance)`.
        model: A copy of the model with fitted means and rates; None for one that was loaded.
        posterior: Covariances of the weights by parameter name, those of the model's own Bayesian layers too.
        noise_variance: Of the observations, in the shape of an output; None where the likelihood has none.
        rates: Learned dropout rates by module path.
        prior_std: Standard deviations of the prior by parameter name.
        kl_weight: Of the divergence: as given, or as chosen on held-out rows.
        history: A record for each epoch, or for each weight that was tried.
        best: The record that was kept.
    """

    predict: Predictor
    model: nn.Module | None
    posterior: Posterior
    noise_variance: Tensor | None
    rates: Mapping[str, Tensor]
    prior_std: Mapping[str, Tensor]
    kl_weight: float
    history: list[Record]
    best: Record | None = field(default=None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but the model's code; `favour.Fitted.load` reads it."""
        description = {
            "format": _FORMAT,
            "kl_weight": self.kl_weight,
            "history": [record.as_dict() for record in self.history],
            "best": None if self.best is None else self.best.as_dict(),
        }
        tensors, posterior = self.posterior.state()
        description["posterior"] = posterior
        content: dict[str, Any] = {
            "description": json.dumps(description),
            "predictor": torch.frombuffer(bytearray(to_bytes(self.predict)), dtype=torch.uint8),
            "posterior": tensors,
            "noise": self.noise_variance,
            "rates": dict(self.rates),
            "prior_std": {name: torch.as_tensor(std) for name, std in self.prior_std.items()},
        }
        write(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Fitted:
        """What `save` wrote; no code in the file is executed.

        Raises:
            CorruptFile: Not such a file, or damaged.
        """
        content = read(path)
        try:
            description = json.loads(content["description"])
            if description["format"] != _FORMAT:
                raise CorruptFile(f"`{path}` has format {description['format']!r}; this version reads {_FORMAT!r}.")
            best = description["best"]
            return cls(
                from_bytes(content["predictor"].numpy().tobytes()),
                None,
                Posterior.from_state(content["posterior"], description["posterior"]),
                content["noise"],
                content["rates"],
                content["prior_std"],
                description["kl_weight"],
                [Record(**record) for record in description["history"]],
                None if best is None else Record(**best),
            )
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise CorruptFile(f"`{path}` is no file of `Fitted.save`: {type(error).__name__}: {error}") from error

    def __repr__(self) -> str:
        parts = [f"{len(self.posterior.names)} uncertain parameters", f"kl_weight={self.kl_weight:g}"]
        parts += [f"{len(self.rates)} rates"] if self.rates else []
        parts += [] if self.best is None else [str(self.best)]
        return f"Fitted({', '.join(parts)})"


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write tensors and texts whole or not at all."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    torch.save(dict(content), part)
    os.replace(part, target)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write` wrote."""
    try:
        content = torch.load(io.BytesIO(Path(path).read_bytes()), weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CorruptFile(f"`{path}` is damaged, or no file of a fit: {type(error).__name__}") from error
    try:
        json.loads(content["description"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"`{path}` is no file of a fit.") from error
    return content
