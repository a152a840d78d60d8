"""The tensors a predictor reads: inputs, weights, what is derived from them, and posteriors in the graph's
terms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from favour.belief import Belief
from favour.errors import InvalidType, InvalidValue, ShapeMismatch
from favour.graph.node import Graph
from favour.passes.plan.steps import Plan
from favour.posterior import Posterior
from favour.surrogate.value import Value, Weight


class Store(nn.Module):
    """The tensors a predictor reads, by the model's names with `/` for `.`."""

    def put(self, name: str, tensor: Tensor) -> None:
        key = name.replace(".", "/")
        self._parameters.pop(key, None)
        self._buffers.pop(key, None)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(key, tensor)
        else:
            self.register_buffer(key, tensor)

    def has(self, name: str) -> bool:
        return hasattr(self, name.replace(".", "/"))

    def take(self, name: str) -> Tensor:
        key = name.replace(".", "/")
        parameter = self._parameters.get(key)
        return getattr(self, key) if parameter is None else parameter

    def clear(self) -> None:
        """Take everything out."""
        self._parameters.clear()
        self._buffers.clear()

    def move(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what a function makes of it."""
        self._apply(function)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that was put in, by the model's names."""
        seen: set[int] = set()  # one of several names of a tensor
        for group in (self._parameters, self._buffers):
            for name, tensor in group.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield name.replace("/", "."), tensor


@dataclass
class Cached:
    """A tensor derived from a weight, and the weight it was derived from."""

    tensor: Tensor
    version: int | None
    value: Any


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count (tensors made in inference mode)."""
    return None if tensor.is_inference() else tensor._version


def can_keep(tensor: Tensor) -> bool:
    """Whether what is derived from a tensor may serve the next call: its changes are counted, and no gradient flows."""
    return version_of(tensor) is not None and not (torch.is_grad_enabled() and tensor.requires_grad)


def kept_value(cache: MutableMapping[Any, Cached], key: Any, tensor: Tensor, function: Callable[[Tensor], Any]) -> Any:
    """`function(tensor)`, from the cache while the tensor is the same and unchanged; see `can_keep`."""
    version = version_of(tensor)
    known = cache.get(key)
    if known is None or known.tensor is not tensor or known.version != version:
        with torch.inference_mode(False), torch.no_grad():
            known = cache[key] = Cached(tensor, version, function(tensor))
    return known.value


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers, under all their names."""
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {name: tensor for group in named for name, tensor in group}


def matched(posterior: Posterior, parameters: Mapping[str, Tensor]) -> Posterior:
    """The posterior in the dtypes and on the devices of the parameters it is about."""

    def like(key: Any) -> tuple[torch.device, torch.dtype]:
        parameter = parameters[key if isinstance(key, str) else key[0]]
        return parameter.device, parameter.dtype

    return Posterior(
        {key: gaussian.to(*like(key)) for key, gaussian in posterior.gaussians.items()},
        latents={name: factor.to(*like(name)) for name, factor in posterior.latents.items()},
        means={name: mean.to(*like(name)) for name, mean in posterior.means.items()},
    )


def renamed(posterior: Posterior, aliases: Mapping[str, str], names: set[str]) -> Posterior:
    """The posterior under the graph's own names for tied parameters, without those the graph never reads."""

    def graph_name(name: str) -> str:
        return aliases.get(name, name)

    gaussians: dict[Any, Any] = {}
    for key, gaussian in posterior.gaussians.items():
        renamed = graph_name(key) if isinstance(key, str) else (graph_name(key[0]), graph_name(key[1]))
        if {renamed} & names if isinstance(renamed, str) else set(renamed) & names:
            gaussians[renamed] = gaussian
    return Posterior(
        gaussians,
        latents={graph_name(k): v for k, v in posterior.latents.items() if graph_name(k) in names},
        means={graph_name(k): v for k, v in posterior.means.items() if graph_name(k) in names},
    )


def check_inputs(graph: Graph, leaves: list[Any]) -> None:
    """Raise unless the leaves of a call fit the captured graph and are finite."""
    sizes: dict[str, int] = {}
    for node, leaf, fixed in zip(graph.inputs, leaves, graph.fixed, strict=True):
        if node is None or node.shape is None:
            if not isinstance(leaf, Tensor) and leaf != fixed:
                raise InvalidValue(f"an argument was {fixed!r} when the model was captured and cannot become {leaf!r}.")
            continue
        if not isinstance(leaf, (Tensor, Belief)):
            raise InvalidType(f"input `{node.name}` is a {type(leaf).__name__}; give a tensor or a Belief.")
        mean = leaf.mean if isinstance(leaf, Belief) else leaf
        fits = mean.ndim == len(node.shape)
        for want, have in zip(node.shape, mean.shape, strict=False):
            fits = fits and (want == have if isinstance(want, int) else sizes.setdefault(want, have) == have)
        if not fits:
            wanted = ["batch" if i == 0 and isinstance(s, str) else str(s) for i, s in enumerate(node.shape)]
            raise ShapeMismatch(
                f"input `{node.name}` has shape {tuple(mean.shape)}; the model was captured for "
                f"({', '.join(wanted)}). Only the batch may change, and it is the same for all inputs, and sizes that "
                "are named with `favour.compile(..., dynamic=...)`: letters above, the same letters the same size."
            )
        if mean.dtype != node.dtype:
            raise InvalidType(
                f"input `{node.name}` has dtype {mean.dtype}; the predictor takes {node.dtype}. "
                f"Convert it with `.to({node.dtype})`."
            )
        if mean.is_floating_point() and not (bool(mean.sum().isfinite()) or bool(mean.isfinite().all())):
            bad = (~mean.isfinite()).nonzero()[0].tolist()
            raise InvalidValue(f"input `{node.name}` holds NaN or infinity, first at index {bad}.")


def graph_values(
    graph: Graph, store: Store, leaves: list[Any], posterior: Posterior
) -> tuple[dict[str, Any], list[tuple[str, Value]]]:
    """What a call computes with, by node name, and which of the inputs are uncertain."""
    values: dict[str, Any] = {}
    sources: list[tuple[str, Value]] = []
    for node, leaf in zip(graph.inputs, leaves, strict=True):
        if node is None:
            continue
        if isinstance(leaf, Belief):
            spread = leaf.covariance.as_diagonal_plus_factor()
            blocks: dict[Hashable, Tensor] = {("input", node.name): spread.factor} if spread.factor.shape[0] else {}
            leaf = Value(leaf.mean, spread.diag, blocks, node.name)
            sources.append((node.name, leaf))
        values[node.name] = leaf
    for node in graph.nodes:
        if node.kind in ("parameter", "buffer"):
            mean = posterior.means.get(str(node.target))
            values[node.name] = store.take(str(node.target)) if mean is None else mean
        elif node.kind == "constant":
            values[node.name] = store.take(f"constant.{node.target}")
    return values, sources


def attach(values: dict[str, Any], graph: Graph, plan: Plan, posterior: Posterior) -> None:
    """Wrap the parameters that have a posterior."""
    for node in graph.nodes:
        name = str(node.target)
        if node.kind not in ("parameter", "buffer") or name not in posterior.names:
            continue
        key = posterior.key(name)
        partner = None
        if isinstance(key, tuple):
            partner = key[1] if key[0] == name else key[0]
        values[node.name] = Weight(
            name,
            values[node.name],
            posterior.gaussian(name),
            partner,
            posterior.latents.get(name),
            plan.uses.get(name, 1),
            name in plan.mixed,
        )
