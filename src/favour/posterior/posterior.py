"""A Gaussian over a model's parameters, by parameter name.

The parameters θ = (θ_1, …) have mean θ̄ (the model's own values, or `means`) and deviate by

    θ_a − θ̄_a = δ_a + Σ_k ε_k · latents_a[k]        δ_a ~ gaussians[a],  ε ~ N(0, I_K)

δ_a is independent between keys; the K latents ε are one draw shared by *all* parameters named in
`latents`, and are independent of the δ (SWAG, low-rank Laplace). A key is one parameter's name, or a pair
(weight, bias) for a joint Gaussian over the augmented matrix [W | b] of shape (m, n + 1): a bias
correlated with its weight is a weight on a constant 1. A weight with more than two axes enters [W | b] as
W.reshape(m, −1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from favour.errors import CorruptFile, InvalidType, InvalidValue, ShapeMismatch, UnknownName
from favour.posterior.gaussians import Diagonal
from favour.surrogate.checks import floating_tensor
from favour.surrogate.gaussian import KINDS, Gaussian, standard_normal

Key = str | tuple[str, str]
Shape = tuple[int, ...]
_FORMAT = 1


class Posterior:
    """A Gaussian over named parameters; see the module docstring for the model.

    Args:
        gaussians: Parameter name, or pair of names (weight, bias), to its Gaussian. A tensor stands for
            `Diagonal(tensor)`, the variances of a mean-field posterior.
        latents: Parameter name to a factor (K, *shape): the part that is correlated across layers.
        means: Parameter name to a tensor that replaces the model's own value as the mean.
        linearised: It is of the network linearised at the means, as Laplace's is: `favour.compile` then takes
            `method="linearised"` unless told of another method.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> posterior = Posterior({"weight": torch.full((2, 3), 0.01)}, latents={"bias": torch.ones(1, 2)})
        >>> posterior
        Posterior(weight: Diagonal(2×3), 1 latent over bias)
        >>> draws = posterior.sample(dict(model.named_parameters()), 5)
        >>> draws["weight"].shape, draws["bias"].shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2]))
    """

    def __init__(
        self,
        gaussians: Mapping[Key, Gaussian | Tensor] | Mapping[str, Gaussian | Tensor] | Mapping[str, Tensor],
        *,
        latents: Mapping[str, Tensor] | None = None,
        means: Mapping[str, Tensor] | None = None,
        linearised: bool = False,
    ) -> None:
        self.linearised = linearised
        self._gaussians: dict[Key, Gaussian] = {}
        self._keys: dict[str, Key] = {}
        for key, value in gaussians.items():
            self._add(key, value)
        self._latents = {name: floating_tensor(name, "latent factor", f) for name, f in (latents or {}).items()}
        self._means = {name: floating_tensor(name, "mean", mean) for name, mean in (means or {}).items()}
        ranks = {name: factor.shape[0] if factor.dim() else None for name, factor in self._latents.items()}
        if None in ranks.values() or len(set(ranks.values())) > 1:
            shapes = ", ".join(f"`{name}` {tuple(f.shape)}" for name, f in self._latents.items())
            raise ShapeMismatch(
                f"latents share one set of K normals, so every factor needs shape (K, *parameter shape); got {shapes}."
            )

    def _add(self, key: Key, value: Gaussian | Tensor) -> None:
        if not isinstance(key, str) and not (
            isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)
        ):
            raise InvalidType(f"posterior key {key!r} must be a parameter name or a pair of names.")
        gaussian = Diagonal(value) if isinstance(value, Tensor) else value
        if not isinstance(gaussian, Gaussian):
            raise InvalidType(
                f"posterior of `{_label(key)}` is a {type(value).__name__}; pass a tensor of variances or "
                f"one of favour's {', '.join(KINDS)}."
            )
        gaussian.check_shapes(_label(key))
        for name in _members(key):
            if name in self._keys:
                raise InvalidValue(
                    f"parameter `{name}` is covered twice, by the keys {self._keys[name]!r} and {key!r}; keep one."
                )
            self._keys[name] = key
        self._gaussians[key] = gaussian

    @classmethod
    def wrap(cls, obj: Posterior | Mapping[Any, Any] | None) -> Posterior:
        """None gives an empty posterior, a mapping is converted, a Posterior is returned as it is."""
        if isinstance(obj, Posterior):
            return obj
        if obj is None or isinstance(obj, Mapping):
            return cls(obj or {})
        raise InvalidType(
            f"`posterior` is a {type(obj).__name__}; pass a favour.Posterior, or a mapping from parameter "
            "name to a variance tensor or Gaussian."
        )

    @classmethod
    def from_module(cls, model: nn.Module) -> Posterior:
        """Collect from every submodule that has a method `favour_posterior()`.

        That method returns a mapping local parameter name (or pair of names) → Gaussian, or a Posterior; names get
        the module's path as prefix. A module reachable by two paths is one source and is collected once, under
        its first path.
        """
        return cls.from_modules(model.named_modules())

    @classmethod
    def from_modules(cls, modules: Iterable[tuple[str, nn.Module]]) -> Posterior:
        """As `from_module`, from modules given with their paths."""
        collected: dict[Key, Gaussian] = {}
        shared = cls({})
        for path, module in modules:
            method = getattr(module, "favour_posterior", None)
            if not callable(method):
                continue
            prefix = f"{path}." if path else ""
            answer = method()
            if isinstance(answer, Posterior):  # with latents, which a mapping cannot hold
                shared = shared.merge(cls({}, latents={prefix + n: f for n, f in answer.latents.items()}))
                answer = answer.gaussians
            for key, gaussian in answer.items():
                name: Key = prefix + key if isinstance(key, str) else (prefix + key[0], prefix + key[1])
                collected[name] = gaussian
        return cls(collected, latents=shared.latents)

    @property
    def gaussians(self) -> Mapping[Key, Gaussian]:
        """Key (a name or a pair of names) to Gaussian, in the order given."""
        return MappingProxyType(self._gaussians)

    @property
    def latents(self) -> Mapping[str, Tensor]:
        """Name to factor (K, *shape)."""
        return MappingProxyType(self._latents)

    @property
    def means(self) -> Mapping[str, Tensor]:
        """Name to the mean that replaces the model's own value."""
        return MappingProxyType(self._means)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all uncertain parameters: members of keys, then those that only `latents` covers."""
        return tuple(dict.fromkeys([*self._keys, *self._latents]))

    @property
    def latent_rank(self) -> int:
        """K, the number of latents shared across layers."""
        return next((factor.shape[0] for factor in self._latents.values()), 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is uncertain and no mean is replaced."""
        return not (self._gaussians or self._latents or self._means)

    def key(self, name: str) -> Key | None:
        """The key of `gaussians` that covers `name`: the name itself, a pair, or None."""
        return self._keys.get(name)

    def gaussian(self, key: Key) -> Gaussian | None:
        """The Gaussian that covers a parameter, or None.

        A member of a pair gives the *joint* Gaussian over [W | b]; `key(name)` tells which it is.
        """
        return self._gaussians.get(self._keys.get(key, key) if isinstance(key, str) else key)

    def validate(self, parameters: Mapping[str, Tensor]) -> None:
        """Check names, shapes and values against a model's parameters.

        Args:
            parameters: Name to tensor, as `dict(model.named_parameters())`; list tied parameters under all
                their names (`remove_duplicate=False`) to accept any of them.

        Raises:
            UnknownName: Names that `parameters` lacks, all in one message, with the closest ones that exist.
            ShapeMismatch: Shapes that differ, all in one message.
            InvalidValue: A negative variance, a NaN, an indefinite matrix, or one parameter covered twice.
        """
        self._match(parameters)
        for key, gaussian in self._gaussians.items():
            gaussian.validate(_label(key))
        if torch.compiler.is_compiling():
            return
        for what, tensors in (("latent factor", self._latents), ("mean", self._means)):
            for name, tensor in tensors.items():
                if not bool(torch.isfinite(tensor).all()):
                    shape = tuple(tensor.shape)
                    raise InvalidValue(f"{what} of `{name}` of shape {shape} has NaN or infinite entries.")

    def _match(self, parameters: Mapping[str, Tensor]) -> None:
        used = list(dict.fromkeys([*self.names, *self._means]))
        unknown = [name for name in used if name not in parameters]
        if unknown:
            raise UnknownName(
                "the posterior names parameters that the model does not have: "
                + "; ".join(_suggest(name, parameters) for name in unknown)
                + ". Names are those of `model.named_parameters()`."
            )
        first: dict[int, str] = {}
        for name in used:
            other = first.setdefault(id(parameters[name]), name)
            if other != name:
                raise InvalidValue(
                    f"`{other}` and `{name}` are the same tensor (tied), covered twice; one parameter is "
                    "one random draw, so use one of its names throughout."
                )
        wrong = [
            f"`{what}` has shape {shape}, the posterior needs {required}"
            for what, shape, required in self._shapes(parameters)
            if shape != required
        ]
        if wrong:
            raise ShapeMismatch("the posterior does not fit the model: " + "; ".join(wrong) + ".")

    def _shapes(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Shape, Shape]]:
        """(label, shape given, shape the model requires) of every tensor held."""
        for key, gaussian in self._gaussians.items():
            if isinstance(key, str):
                required = tuple(parameters[key].shape)
                if len(gaussian.shape) == 2 < len(required):  # a kernel as a matrix (m, n)
                    required = (required[0], parameters[key][:1].numel())
            else:
                weight, bias = (parameters[name] for name in key)
                rows = weight.shape[0] if weight.dim() else 1
                if tuple(bias.shape) != (rows,):
                    raise ShapeMismatch(
                        f"a joint Gaussian over {key!r} needs a weight (m, …) and a bias (m,); their "
                        f"shapes are {tuple(weight.shape)} and {tuple(bias.shape)}."
                    )
                required = (rows, weight.numel() // max(rows, 1) + 1)
            yield f"Gaussian of {_label(key)}", tuple(gaussian.shape), required
        for name, factor in self._latents.items():
            yield f"latent factor of {name}", tuple(factor.shape), (factor.shape[0], *parameters[name].shape)
        for name, mean in self._means.items():
            yield f"mean of {name}", tuple(mean.shape), tuple(parameters[name].shape)

    def variances(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Marginal variances by name, the joint and latent parts included, each of its parameter's shape."""
        self._match(parameters)
        result: dict[str, Tensor] = {}
        for key, gaussian in self._gaussians.items():
            result.update(_split(key, gaussian.variance(), parameters))
        for name, factor in self._latents.items():
            shared = factor.square().sum(0)
            result[name] = result[name] + shared if name in result else shared
        return result

    def sample(
        self, parameters: Mapping[str, Tensor], n: int, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Draw `n` values of every parameter covered.

        Args:
            parameters: Name to current value; the mean of whatever `means` does not replace.
            n: Number of draws.
            generator: Makes the draws reproducible.

        Returns:
            Name to draws (n, *shape), mean included, in the parameter's dtype and on its device. A
            parameter that only `means` names comes back as that mean, n times.
        """
        self._match(parameters)
        deviations: dict[str, Tensor] = {}
        for key, gaussian in self._gaussians.items():
            deviations.update(_split(key, gaussian.sample(n, generator), parameters, (n,)))
        if self._latents:
            like = next(iter(self._latents.values()))
            latents = standard_normal((n, self.latent_rank), like, generator)
            for name, factor in self._latents.items():
                shared = torch.tensordot(latents.to(factor), factor, dims=1)
                independent = deviations.get(name)
                deviations[name] = shared if independent is None else independent + shared.to(independent)
        draws = {}
        for name in dict.fromkeys([*deviations, *self._means]):
            value = parameters[name]
            mean = self._means[name].to(value) if name in self._means else value
            deviation = deviations.get(name)
            draws[name] = mean.expand(n, *mean.shape) if deviation is None else mean + deviation.to(mean)
        return draws

    def merge(self, other: Posterior) -> Posterior:
        """Both posteriors together, independent of each other; no parameter may occur in both.

        The latents of the two stay independent: K = K_self + K_other, each factor padded with zeros.
        """
        mine, theirs = {*self.names, *self._means}, {*other.names, *other._means}
        if both := sorted(mine & theirs):
            raise InvalidValue(
                f"parameters covered by both posteriors: {', '.join(f'`{name}`' for name in both)}; remove "
                "them from one."
            )
        latents = {name: _pad(factor, 0, other.latent_rank) for name, factor in self._latents.items()}
        latents |= {name: _pad(factor, self.latent_rank, 0) for name, factor in other._latents.items()}
        gaussians, means = {**self._gaussians, **other._gaussians}, {**self._means, **other._means}
        return Posterior(gaussians, latents=latents, means=means, linearised=self.linearised or other.linearised)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Posterior:
        """A copy with every tensor on `device` with `dtype`; None leaves either as it is."""
        return Posterior(
            {key: gaussian.to(device, dtype) for key, gaussian in self._gaussians.items()},
            latents={name: factor.to(device=device, dtype=dtype) for name, factor in self._latents.items()},
            means={name: mean.to(device=device, dtype=dtype) for name, mean in self._means.items()},
            linearised=self.linearised,
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A flat dict of detached copies, and a JSON-able description of them; see `from_state`."""
        tensors: dict[str, Tensor] = {}
        entries = []
        for index, (key, gaussian) in enumerate(self._gaussians.items()):
            kind = type(gaussian).__name__
            if kind not in KINDS:
                raise InvalidType(f"posterior of `{_label(key)}`: can save {', '.join(KINDS)}, not {kind}.")
            tensors |= {f"gaussians.{index}.{field}": t for field, t in gaussian.tensors().items()}
            entries.append({"names": list(_members(key)), "kind": kind, **gaussian.settings()})
        tensors |= {f"latents.{index}": factor for index, factor in enumerate(self._latents.values())}
        tensors |= {f"means.{index}": mean for index, mean in enumerate(self._means.values())}
        description = {"format": _FORMAT, "gaussians": entries, "latents": list(self._latents)}
        description |= {"means": list(self._means), "linearised": self.linearised}
        copies = {k: t.detach().clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
        return copies, description

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Posterior:
        """The posterior whose `state()` was (tensors, description).

        Raises:
            CorruptFile: The description is of another format or names a tensor that is missing.
        """
        if description.get("format") != _FORMAT:
            raise CorruptFile(
                f"posterior description has format {description.get('format')!r}; this version reads {_FORMAT}."
            )
        try:
            gaussians: dict[Key, Gaussian] = {}
            for index, entry in enumerate(description["gaussians"]):
                fields: dict[str, Any] = {k: tuple(v) for k, v in entry.items() if k not in ("names", "kind")}
                prefix = f"gaussians.{index}."
                fields |= {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
                names = entry["names"]
                gaussians[names[0] if len(names) == 1 else tuple(names)] = KINDS[entry["kind"]](**fields)
            latents = {name: tensors[f"latents.{i}"] for i, name in enumerate(description["latents"])}
            means = {name: tensors[f"means.{i}"] for i, name in enumerate(description["means"])}
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise CorruptFile(
                f"posterior state is incomplete or malformed ({error}); it must come from `Posterior.state()`."
            ) from error
        return cls(gaussians, latents=latents, means=means, linearised=bool(description.get("linearised")))

    def __repr__(self) -> str:
        parts = [f"{_label(key)}: {gaussian!r}" for key, gaussian in self._gaussians.items()]
        if self._latents:
            plural = "s" * (self.latent_rank != 1)
            parts.append(f"{self.latent_rank} latent{plural} over {', '.join(self._latents)}")
        if self._means:
            parts.append(f"means of {', '.join(self._means)}")
        return f"Posterior({', '.join(parts)})"


def _members(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _label(key: Key) -> str:
    return key if isinstance(key, str) else f"[{key[0]} | {key[1]}]"


def _split(key: Key, value: Tensor, parameters: Mapping[str, Tensor], lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Undo [W | b], and a kernel held as a matrix; leading axes are kept."""
    if isinstance(key, str):
        return {key: value.reshape(*lead, *parameters[key].shape)}
    weight, bias = key
    return {weight: value[..., :-1].reshape(*lead, *parameters[weight].shape), bias: value[..., -1]}


def _pad(factor: Tensor, before: int, after: int) -> Tensor:
    shape = factor.shape[1:]
    return torch.cat([factor.new_zeros(before, *shape), factor, factor.new_zeros(after, *shape)])


def _suggest(name: str, known: Mapping[str, Tensor]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"`{name}`" + (f" (did you mean {' or '.join(f'`{c}`' for c in close)}?)" if close else "")
