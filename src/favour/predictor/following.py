"""How a predictor notices that the model it was made from has changed.

Values. A predictor shares the model's tensors, so its means follow whatever is written to them; what it derived from
them (squares, masked weights) has to be derived again. A tensor counts as changed when it is another object, lies
elsewhere, has another version (torch counts writes through its own operations), or when some of its numbers differ:
writes through `.data`, numpy views or shared memory are not counted. All numbers of small tensors are compared, and
`SEEN` of larger ones, at a stride that has no factor in common with the number of entries, so that every row and
every column of a matrix is touched. `Predictor.refresh` forgets everything derived, for what falls between.

Structure. Rates, modules, activations and hooks are part of the captured graph and cannot be followed in place. Every
module's class, children, hooks and plain attributes are compared with what they were: numbers, texts and functions,
containers of them, which tensor an attribute names, and one level into objects of other kinds (a configuration). Where
they differ the model is captured again: an equal graph means that the difference does not matter (a counter, a hook
that only looks).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from favour.graph.capture import Graph, capture
from favour.graph.dynamic import Dynamic
from favour.passes.plan.steps import configure, truncate

SEEN = 4096  # numbers of a tensor that are compared in every call

_INTERNAL = frozenset(nn.Module().__dict__)  # what every module has; children and hooks are looked at by name
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WIDE = 64  # entries of a container that is compared
_UNKNOWN = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Values:
    """Some numbers of every tensor, to tell when one was written to behind torch's back."""

    def __init__(self) -> None:
        self._places: list[tuple[Tensor, int]] = []
        self._views: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._seen: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def changed(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any number that is looked at differs from the last call, or a tensor lies elsewhere. O(SEEN) each."""
        tensors = list(tensors)
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return True  # inside a transform there is no memory to look at
        places = self._places
        with torch.inference_mode(False), torch.no_grad():
            if len(tensors) != len(places) or any(
                t is not known or t.data_ptr() != address for t, (known, address) in zip(tensors, places, strict=True)
            ):
                self._places = [(t, t.data_ptr()) for t in tensors]
                self._views = {}
                for t in tensors:
                    self._views.setdefault((t.device, t.dtype), []).append(_strided(t))
                self._seen = {key: torch.cat(views) for key, views in self._views.items()}
                return True
            now = {key: torch.cat(views) for key, views in self._views.items()}
        if all(torch.equal(now[key], seen) for key, seen in self._seen.items()):
            return False
        self._seen = now
        return True


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


def _plain(value: Any) -> bool:
    """Whether a value can be compared with == and says something about the structure."""
    if isinstance(value, (list, tuple)):
        return len(value) < _WIDE and all(map(_plain, value))
    if isinstance(value, dict):
        return len(value) < _WIDE and all(map(_plain, value.values()))
    return isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, nn.Module))


def _kept(value: Any) -> Any:
    """A copy that later writes do not reach, to any depth."""
    if isinstance(value, dict):
        return {k: _kept(v) for k, v in value.items()}
    # A tuple with fields is made of its entries, not of a list of them.
    return type(value)(map(_kept, value)) if type(value) in (list, tuple) else value


def _differ(old: Any, new: Any) -> bool:
    try:
        return bool(old != new)
    except (RuntimeError, TypeError, ValueError):  # a number that became an array of several
        return True


class _Named:
    """Which tensor an attribute names; its numbers are followed as values are. Kept weakly: it may be a result."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return self._tensor() is other

    __hash__ = None  # type: ignore[assignment]


class _Fields:
    """The plain fields of an object of some class, as they were. The object itself is not kept alive."""

    def __init__(self, thing: Any) -> None:
        self._kind = type(thing)
        self._fields = {k: _kept(v) for k, v in vars(thing).items() if _plain(v)}

    def __eq__(self, other: object) -> bool:
        if type(other) is not self._kind:
            return False
        now = vars(other)
        return not any(_differ(v, now.get(k, self)) for k, v in self._fields.items())

    __hash__ = None  # type: ignore[assignment]

    def difference(self, other: object) -> str:
        """In words, to follow the name of the attribute."""
        if type(other) is not self._kind:
            return f" was a {self._kind.__name__} and is a {type(other).__name__}"
        now = vars(other)
        changed = next((k for k, v in self._fields.items() if _differ(v, now.get(k, self))), "")
        return f": `{changed}` was {self._fields.get(changed)!r} and is {now.get(changed, 'deleted')!r}"


def _record(value: Any, objects: set[int]) -> Any:
    """What to compare an attribute with later; `_UNKNOWN` if nothing can be said of it."""
    if _plain(value):
        return _kept(value)
    if isinstance(value, Tensor):
        return _Named(value)
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__") or len(vars(value)) > _WIDE * 4:
        return _UNKNOWN
    if id(value) in objects:  # a configuration that every module shares is compared once
        return _UNKNOWN
    objects.add(id(value))
    return _Fields(value)


@dataclass(eq=False)
class _Module:
    """What one module looked like."""

    path: str
    module: weakref.ref[nn.Module]  # so that what watches a model does not keep it alive
    kind: type
    children: dict[str, nn.Module]
    hooks: dict[str, dict[int, Any]]
    attributes: dict[str, Any]
    size: int  # entries of its __dict__

    @classmethod
    def of(cls, path: str, module: nn.Module, ignored: frozenset[tuple[str, str]], objects: set[int]) -> _Module:
        own = vars(module)
        found = {k: _record(v, objects) for k, v in own.items() if k not in _INTERNAL and (path, k) not in ignored}
        attributes = {k: v for k, v in found.items() if v is not _UNKNOWN}
        hooks = {name: dict(own.get(name, {})) for name in _HOOKS}
        return cls(path, weakref.ref(module), type(module), dict(module._modules), hooks, attributes, len(own))  # type: ignore[arg-type]

    def same(self) -> bool:
        module = self.module()
        if module is None:
            return False
        own = vars(module)
        return (
            type(module) is self.kind
            and len(own) == self.size
            and own["_modules"] == self.children
            and all(own.get(name) == kept for name, kept in self.hooks.items())
            and not any(_differ(v, own.get(k, self)) for k, v in self.attributes.items())
        )

    def differences(self) -> list[tuple[str, str]]:
        """What differs, as names and sentences."""
        module = self.module()
        if module is None:
            return [("", f"module `{self.path}` was a {self.kind.__name__} and is gone")]
        own = vars(module)
        where = f"`{self.path}`" if self.path else "the model itself"
        found = []
        if type(module) is not self.kind:
            found.append(("", f"{where} was a {self.kind.__name__} and is a {type(module).__name__}"))
        for name in dict.fromkeys((*self.children, *module._modules)):
            old, new = self.children.get(name), module._modules.get(name)
            if old is not new:
                path = f"{self.path}.{name}" if self.path else name
                found.append((name, f"module `{path}` was {_kind(old)} and is {_kind(new)}"))
        for name, kept in self.hooks.items():
            if own.get(name) != kept:
                found.append((name, f"hooks of {where} were added or removed"))
        for name, old in self.attributes.items():
            if _differ(old, new := own.get(name, "deleted")):
                found.append((name, _sentence(name, where, old, new)))
        if not found:
            found.append(("", f"attributes of {where} were added or removed"))
        return found


def _sentence(name: str, where: str, old: Any, new: Any) -> str:
    if isinstance(old, _Named):
        return f"`{name}` of {where} names another tensor"
    if isinstance(old, _Fields):
        return f"`{name}` of {where}{old.difference(new)}"
    return f"`{name}` of {where} was {old!r} and is {new!r}"


def _kind(module: nn.Module | None) -> str:
    return "none" if module is None else f"a {type(module).__name__}"


class Structure:
    """A model's modules, hooks and plain attributes as they were, training flags apart."""

    def __init__(self, model: nn.Module, ignored: frozenset[tuple[str, str]] = frozenset()) -> None:
        self.ignored = ignored
        objects: set[int] = set()
        self._modules = [
            _Module.of(path, module, ignored, objects) for path, module in model.named_modules(remove_duplicate=False)
        ]

    def same(self) -> bool:
        return all(module.same() for module in self._modules)

    def differences(self) -> list[tuple[str, str, str]]:
        """Path of the module, name of what differs, and a sentence."""
        return [(m.path, *entry) for m in self._modules if not m.same() for entry in m.differences()]


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


def same_graph(a: Graph, b: Graph) -> bool:
    """Whether two captured graphs compute the same of the same parameters."""
    return _written(a) == _written(b) and all(
        torch.equal(t, b.constants[name]) for name, t in a.constants.items() if name in b.constants
    )


def _written(graph: Graph) -> list[Any]:
    nodes = [(n.name, n.kind, str(n.target), repr(n.args), repr(n.kwargs), n.shape, n.dtype) for n in graph.nodes]
    return [nodes, repr(graph.outputs), str(graph.in_spec), str(graph.out_spec), repr(graph.fixed)]
