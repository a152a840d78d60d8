"""How a predictor notices that the model it was made from has changed.

Values. A predictor shares the model's tensors, so its means follow whatever is written to them; what it derived from
them (squares, masked weights) has to be derived again. A tensor counts as changed when it is another object, lies
elsewhere, has another version (torch counts writes through its own operations), or when some of its numbers differ:
writes through `.data`, numpy views or shared memory are not counted. All numbers of small tensors are compared, and
`SEEN` of larger ones, at a stride that has no factor in common with the number of entries, so that every row and
every column of a matrix is touched. `Predictor.refresh` forgets everything derived, for what falls between.

Structure: `favour.program.structure`. Where a model differs it is captured again: an equal graph means that the
difference does not matter (a counter, a hook that only looks).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from favour.errors import ChangedModel, FavourError, InvalidValue, StalePredictor
from favour.graph.dynamic import Dynamic
from favour.graph.node import Graph
from favour.passes.capture import capture
from favour.passes.plan.steps import configure, truncate
from favour.posterior import Posterior
from favour.program.structure import Structure
from favour.program.tensors import Store, renamed, version_of

_AGAIN = "Call `predict.refresh()` to take it over, or compile the model again."
SEEN = 4096  # numbers of a tensor that are compared in every call


class Link:
    """The model whose tensors a program shares."""

    def __init__(self, model: nn.Module, graph: Graph, store: Store) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.model = model
        self._owners: dict[str, tuple[nn.Module, str]] = {}  # of what the graph reads
        for node in graph.nodes:
            if node.kind in ("parameter", "buffer"):
                path, _, attribute = str(node.target).rpartition(".")
                self._owners[str(node.target)] = (modules[path], attribute)
        self._bayesian = [(path, m) for path, m in model.named_modules() if hasattr(m, "favour_posterior")]
        self._spreads: dict[str, tuple[nn.Module, str]] = {}  # of what only posteriors are made of
        for path, module in self._bayesian:
            parameters = {
                f"{path}.{name}" if path else name: name for name, _ in module.named_parameters(recurse=False)
            }
            self._spreads |= {name: (module, local) for name, local in parameters.items() if name not in self._owners}
        self._kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for name, (owner, attribute) in self._owners.items():
            tensor = getattr(owner, attribute)
            store.put(name, tensor)
            self._kinds[name] = (tensor.dtype, tensor.shape)
        for name, tensor in graph.constants.items():
            store.put(f"constant.{name}", tensor)

    def posterior(self, explicit: Posterior, graph: Graph) -> Posterior:
        """The explicit one, and what the model's own Bayesian layers say now, by the graph's names."""
        if not self._bayesian and explicit.is_empty:
            return explicit
        layers = Posterior.from_modules(self._bayesian)
        names = {str(n.target) for n in graph.nodes if n.kind == "parameter"}
        return renamed(layers.merge(explicit) if not layers.is_empty else explicit, graph.aliases, names)

    def follow(self, store: Store) -> dict[str, Tensor]:
        """Put tensors into the store that took the place of others, and return all by name."""
        tensors: dict[str, Tensor] = {}
        for name, (owner, attribute) in self._owners.items():
            tensor = getattr(owner, attribute, None)
            if not isinstance(tensor, Tensor):
                raise StalePredictor(f"the model has no tensor `{name}` any more; {_AGAIN}")
            if (tensor.dtype, tensor.shape) != self._kinds[name]:
                was, now = (f"{d}, {tuple(s)}" for d, s in (self._kinds[name], (tensor.dtype, tensor.shape)))
                raise StalePredictor(f"`{name}` was {was}, and is {now}. {_AGAIN}")
            if tensor is not store.take(name):
                store.put(name, tensor)
            tensors[name] = tensor
        return tensors | {name: getattr(owner, attribute) for name, (owner, attribute) in self._spreads.items()}

    def check_types(self) -> None:
        """Raise where a tensor has another type, so that the example has the wrong one."""
        for name, (owner, attribute) in self._owners.items():
            tensor, was = getattr(owner, attribute, None), self._kinds[name][0]
            if isinstance(tensor, Tensor) and tensor.dtype != was:
                raise StalePredictor(
                    f"`{name}` was {was}, and is {tensor.dtype}: inputs are of another type than the example was. "
                    "Compile the model again, with one that fits."
                )


class Watch:
    """Some numbers of every tensor, to tell when one was written to behind torch's back, and whether all are finite."""

    def __init__(self) -> None:
        self._finite: dict[str, tuple[Tensor, int | None]] = {}
        self._places: list[tuple[Tensor, int]] = []
        self._views: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._seen: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def changed(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any number that is looked at differs from the last call, or a tensor lies elsewhere. O(SEEN) each."""
        tensors = list(tensors)
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return True  # inside a transform there is no memory to look at
        places = self._places
        stay = len(tensors) == len(places) and all(
            [t is known and t.data_ptr() == address for t, (known, address) in zip(tensors, places, strict=True)]
        )
        if stay and all([_unwritten(key[0], views, self._seen[key]) for key, views in self._views.items()]):
            return False
        with torch.inference_mode(False), torch.no_grad():
            if not stay:
                self._places = [(t, t.data_ptr()) for t in tensors]
                self._views = {}
                for t in tensors:
                    self._views.setdefault((t.device, t.dtype), []).append(_strided(t))
            self._seen = {key: [v.clone() for v in views] for key, views in self._views.items()}
        return True

    def check_finite(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise where a parameter holds NaN or infinity; asked once for every version of a tensor."""
        for name, tensor in tensors.items():
            if name.startswith("constant."):  # a mask that the code made may well hold infinities
                continue
            version = version_of(tensor)
            seen = self._finite.get(name)
            if seen is not None and seen[0] is tensor and seen[1] == version is not None:
                continue
            if not sound(tensor):
                raise InvalidValue(
                    f"parameter `{name}` of shape {tuple(tensor.shape)} holds NaN or infinity; "
                    "load sound weights first."
                )
            self._finite[name] = (tensor, version)

    def forget(self) -> None:
        """Ask again whether all is finite."""
        self._finite.clear()


def sound(tensor: Tensor) -> bool:
    """Whether all numbers are finite, or nothing but 0 and −∞: a mask."""
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return True
    return bool(((tensor == 0) | (tensor == -torch.inf)).all())


def _unwritten(device: torch.device, views: list[Tensor], seen: list[Tensor]) -> bool:
    """Whether all numbers are what they were; asked at once where an answer takes long to come back."""
    if device.type != "cpu":
        return torch.equal(torch.cat(views), torch.cat(seen))
    return all([torch.equal(view, was) for view, was in zip(views, seen, strict=True)])


def _strided(t: Tensor) -> Tensor:
    """A view of at most about `SEEN` numbers of a tensor, spread over all of it."""
    t = t.detach()
    n = t.numel()
    dense = t.is_contiguous() or (t.layout is torch.strided and sorted(t.stride()) == sorted(_dense_strides(t)))
    if not dense:
        return t.reshape(-1)  # a copy: such tensors are rare, and compared where they lay
    step = max(1, n // SEEN)
    while math.gcd(step, n) > 1 and step > 1:
        step -= 1
    return t.as_strided((-(-n // step),), (step,), t.storage_offset())


def _dense_strides(t: Tensor) -> list[int]:
    sizes = sorted((s for s in zip(t.stride(), t.shape, strict=True)), key=lambda pair: pair[0])
    strides, n = [], 1
    for _, size in sizes:
        strides.append(n)
        n *= size
    return strides


@dataclass(eq=False)
class Origin:
    """The model a predictor was made from, and how to make its graph again.

    Attributes:
        model: The user's.
        example: Two rows of the example, enough to capture by.
        dynamic, dropout, at, batched: As given to `favour.compile`.
        structure: What the model looked like.
    """

    model: nn.Module
    example: Any
    dynamic: Dynamic
    dropout: Mapping[str, Any] | None
    at: str | None
    structure: Structure
    batched: bool = True

    @classmethod
    def of(
        cls, model: nn.Module, example: Any, dynamic: Dynamic, dropout: Any, at: str | None, batched: bool = True
    ) -> Origin:
        return cls(model, example, dynamic, dropout, at, Structure(model), batched)

    def graph(self) -> Graph:
        """The model as it is now."""
        graph = configure(capture(self.model, self.example, dynamic=self.dynamic, batched=self.batched), self.dropout)
        return graph if self.at is None else truncate(graph, self.at)

    def changes(self, graph: Graph, recapture: Callable[[], Graph]) -> list[str]:
        """How the model differs from `graph`, in sentences; nothing if the differences do not reach the graph."""
        differences = self.structure.differences()
        if not differences:
            return []
        if same_graph(graph, recapture()):
            ignored = self.structure.ignored | {(path, name) for path, name, _ in differences}
            self.structure = Structure(self.model, ignored)
            return []
        return list(dict.fromkeys(sentence for _, _, sentence in differences))

    def check(self, graph: Graph) -> None:
        """Raise where rates, modules or hooks were changed, and with them what the model computes."""
        if self.structure.same():
            return
        try:
            changes = self.changes(graph, self.graph)
        except FavourError as error:
            listed = "; ".join(sentence for _, _, sentence in self.structure.differences())
            warnings.warn(
                f"the model was changed after it was compiled ({listed}), and can no longer be captured, so this "
                f"prediction is of the model as it was: {str(error).splitlines()[0]}",
                ChangedModel,
                stacklevel=5,
            )
            return
        if changes:
            raise StalePredictor(f"the model was changed after it was compiled: {'; '.join(changes)}. {_AGAIN}")


def same_graph(a: Graph, b: Graph) -> bool:
    """Whether two captured graphs compute the same of the same parameters."""
    return _written(a) == _written(b) and all(
        torch.equal(t, b.constants[name]) for name, t in a.constants.items() if name in b.constants
    )


def _written(graph: Graph) -> list[Any]:
    nodes = [(n.name, n.kind, str(n.target), repr(n.args), repr(n.kwargs), n.shape, n.dtype) for n in graph.nodes]
    return [nodes, repr(graph.outputs), str(graph.in_spec), str(graph.out_spec), repr(graph.fixed)]
