"""What a model is made of besides tensors, to tell when it changed.

Rates, modules, activations and hooks are part of the captured graph and cannot be followed in place. Every module's
class, children, hooks and plain attributes are compared with what they were: numbers, texts and functions, which tensor
or module an attribute names, containers of them, and one level into objects of other kinds (a configuration). Modules
that a list or dict keeps from torch's sight are watched too, and so are a class's `forward` and the globals and outer
variables that its code names. What functions called by `forward` read elsewhere is not looked at: `favour.check`
compares the outputs themselves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_INTERNAL = frozenset(nn.Module().__dict__)  # what every module has; children and hooks are looked at by name
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WIDE = 64  # entries of a container that is compared
_UNKNOWN = object()
_CODE = "forward()"  # in the place of an attribute's name
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


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
        return old is not new and bool(old != new)  # NaN differs from itself
    except (RuntimeError, TypeError, ValueError):  # a number that became an array of several
        return True


class _Named:
    """Which tensor or module an attribute names; what is in it is followed apart. Kept weakly: it may be a result."""

    def __init__(self, thing: Tensor | nn.Module) -> None:
        self.what = "module" if isinstance(thing, nn.Module) else "tensor"
        self._thing: weakref.ref[Any] = weakref.ref(thing)

    def __eq__(self, other: object) -> bool:
        return self._thing() is other

    __hash__ = None  # type: ignore[assignment]


class _Held:
    """What a list, tuple or dict holds besides plain values: which tensors and modules, under which keys."""

    def __init__(self, container: Any, objects: set[int]) -> None:
        self._kind, self._size = type(container), len(container)
        self._entries = [(k, r) for k, v in _items(container) if (r := _record(v, objects)) is not _UNKNOWN]

    def __eq__(self, other: object) -> bool:
        if type(other) is not self._kind or len(other) != self._size:  # type: ignore[arg-type]
            return False
        now = dict(_items(other))
        return not any(_differ(record, now.get(k, self)) for k, record in self._entries)

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


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _record(value: Any, objects: set[int]) -> Any:
    """What to compare an attribute with later; `_UNKNOWN` if nothing can be said of it."""
    if _plain(value):
        return _kept(value)
    if isinstance(value, (Tensor, nn.Module)):
        return _Named(value)
    if isinstance(value, (list, tuple, dict)):
        if len(value) >= _WIDE or id(value) in objects:
            return _UNKNOWN
        objects.add(id(value))
        return _Held(value, objects)
    if not hasattr(value, "__dict__") or len(vars(value)) > _WIDE * 4:
        return _UNKNOWN
    if id(value) in objects:  # a configuration that every module shares is compared once
        return _UNKNOWN
    objects.add(id(value))
    return _Fields(value)


@dataclass(eq=False)
class _Code:
    """The `forward` of a class that is not torch's, and what its code names outside of it."""

    forward: Any = None
    outer: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, kind: type, objects: set[int]) -> _Code:
        if kind.__module__.startswith("torch."):
            return cls()
        named = ((name, _record(value, objects)) for name, value in _outer(kind.forward).items())  # type: ignore[attr-defined]
        return cls(kind.forward, tuple((k, r) for k, r in named if r is not _UNKNOWN))  # type: ignore[attr-defined]

    def difference(self, kind: type) -> str | None:
        """In words; None if there is none."""
        if self.forward is None:
            return None
        if kind.forward is not self.forward:  # type: ignore[attr-defined]
            return f"`{kind.__name__}.forward` is another function"
        if self.outer:
            now = _outer(self.forward)
            for name, record in self.outer:
                if _differ(record, now.get(name, self)):
                    return _sentence(
                        name, f"`{kind.__name__}.forward`'s surroundings", record, now.get(name, "deleted")
                    )
        return None


def _outer(function: Any) -> dict[str, Any]:
    """The globals and outer variables that a function's code names."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    values = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            with contextlib.suppress(ValueError):  # empty yet
                values[name] = cell.cell_contents
    return values


@dataclass(eq=False)
class _Module:
    """What one module looked like."""

    path: str
    module: weakref.ref[nn.Module]  # so that what watches a model does not keep it alive
    kind: type
    children: dict[str, nn.Module | None]
    hooks: dict[str, dict[int, Any]]
    attributes: dict[str, Any]
    size: int  # entries of its __dict__
    code: _Code

    @classmethod
    def of(cls, path: str, module: nn.Module, ignored: frozenset[tuple[str, str]], objects: set[int]) -> _Module:
        entries = vars(module)
        records = {
            k: _record(v, objects) for k, v in entries.items() if k not in _INTERNAL and (path, k) not in ignored
        }
        attributes = {k: v for k, v in records.items() if v is not _UNKNOWN}
        hooks = {name: dict(entries.get(name, {})) for name in _HOOKS}
        return cls(
            path,
            weakref.ref(module),
            type(module),
            dict(module._modules),
            hooks,
            attributes,
            len(entries),
            _Code.of(type(module), objects),
        )

    def same(self) -> bool:
        module = self.module()
        if module is None:
            return False
        entries = vars(module)
        return (
            type(module) is self.kind
            and len(entries) == self.size
            and entries["_modules"] == self.children
            and all([entries.get(name) == kept for name, kept in self.hooks.items()])
            and not any([_differ(v, entries.get(k, self)) for k, v in self.attributes.items()])
            and self.code.difference(self.kind) is None
        )

    def differences(self) -> list[tuple[str, str]]:
        """What differs, as names and sentences."""
        module = self.module()
        if module is None:
            return [("", f"module `{self.path}` was a {self.kind.__name__} and is gone")]
        entries = vars(module)
        where = f"`{self.path}`" if self.path else "the model itself"
        changes = []
        if type(module) is not self.kind:
            changes.append(("", f"{where} was a {self.kind.__name__} and is a {type(module).__name__}"))
        for name in dict.fromkeys((*self.children, *module._modules)):
            old, new = self.children.get(name), module._modules.get(name)
            if old is not new:
                path = f"{self.path}.{name}" if self.path else name
                changes.append((name, f"module `{path}` was {_kind(old)} and is {_kind(new)}"))
        for name, kept in self.hooks.items():
            if entries.get(name) != kept:
                changes.append((name, f"hooks of {where} were added or removed"))
        for name, old in self.attributes.items():
            if _differ(old, new := entries.get(name, "deleted")):
                changes.append((name, _sentence(name, where, old, new)))
        if type(module) is self.kind and (change := self.code.difference(self.kind)) is not None:
            changes.append((_CODE, change))
        if not changes:
            changes.append(("", f"attributes of {where} were added or removed"))
        return changes


def _sentence(name: str, where: str, old: Any, new: Any) -> str:
    if isinstance(old, _Named):
        return f"`{name}` of {where} names another {old.what}"
    if isinstance(old, _Held):
        return f"`{name}` of {where} holds other tensors or modules"
    if isinstance(old, _Fields):
        return f"`{name}` of {where}{old.difference(new)}"
    return f"`{name}` of {where} was {old!r} and is {new!r}"


def _kind(module: nn.Module | None) -> str:
    return "none" if module is None else f"a {type(module).__name__}"


def _all_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """By path, with those that lists and dicts keep from torch's sight."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield path, module
        for name, value in vars(module).items():
            if name not in _INTERNAL and isinstance(value, (list, tuple, dict)) and len(value) < _WIDE:
                for key, entry in _items(value):
                    if isinstance(entry, nn.Module):
                        inner = f"{path}.{name}[{key!r}]".lstrip(".")
                        yield from ((f"{inner}.{p}".rstrip("."), m) for p, m in _all_modules(entry))


class Structure:
    """A model's modules, hooks and plain attributes as they were, training flags apart."""

    def __init__(self, model: nn.Module, ignored: frozenset[tuple[str, str]] = frozenset()) -> None:
        self.ignored = ignored
        objects: set[int] = set()
        self._modules = [_Module.of(path, module, ignored, objects) for path, module in _all_modules(model)]
        self._hooks = _hooks_of_all()

    def same(self) -> bool:
        return self._hooks == _hooks_of_all() and all([module.same() for module in self._modules])

    def differences(self) -> list[tuple[str, str, str]]:
        """Path of the module, name of what differs, and a sentence."""
        changes = [(m.path, *entry) for m in self._modules if not m.same() for entry in m.differences()]
        if self._hooks != _hooks_of_all():
            changes.append(("", "", "hooks of all modules, torch's global ones, were added or removed"))
        return changes


def _hooks_of_all() -> list[dict[int, Any]]:
    """torch's global hooks, which act on every module's forward."""
    return [
        dict(torch.nn.modules.module._global_forward_hooks),
        dict(torch.nn.modules.module._global_forward_pre_hooks),
    ]
