"""A model and an example as `torch.export` takes them: a private copy, flags set, sizes symbolic or not."""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import CaptureError, FavourError, InvalidType, UnsupportedOperation
from favour.graph.apart import different
from favour.graph.decisions import Decisions, check_skips, claim_layers, deciding, skipped_at_random
from favour.graph.dynamic import Dynamic, free_sizes, input_names
from favour.graph.example import without_caches
from favour.graph.exported import from_exported
from favour.graph.layers import check_recurrent, put_batch_first
from favour.graph.node import Graph, Node
from favour.graph.quietly import quietly
from favour.graph.refusals import explain, refuse_compiled_code
from favour.graph.silent import quiet
from favour.graph.tracing import TRACING, modules_may_fail


def copied_structure(model: nn.Module) -> nn.Module:
    """Copy the module objects, share every tensor."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    open_: list[Any] = [model]
    while open_:
        value = open_.pop()
        if isinstance(value, Tensor):
            memo[id(value)] = value
        elif isinstance(value, (nn.Module, dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))  # modules in lists and dicts too, which torch does not see
            held = vars(value) if isinstance(value, nn.Module) else value
            open_ += held.values() if isinstance(held, dict) else held
    return copy.deepcopy(model, memo)


def set_capture_flags(model: nn.Module) -> None:
    for module in model.modules():
        # Norms that keep running statistics are deterministic functions at prediction time.
        frozen = hasattr(module, "running_mean") or hasattr(module, "track_running_stats")
        hooks = [*module._forward_pre_hooks.values(), module]  # a spectral norm iterates while training
        frozen = frozen or any(type(h).__name__ in ("SpectralNorm", "_SpectralNorm") for h in hooks)
        module.training = not frozen
        if hasattr(module, "favour_posterior"):
            module.sampling = False  # type: ignore[assignment]
        if hasattr(module, "capturing"):
            module.capturing = True  # type: ignore[assignment]
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module.forward = module.module.forward  # type: ignore[method-assign]  # without the sharing of work
    quiet(model)


def _spell_out_keywords(model: nn.Module, kwargs: Mapping[str, Any]) -> inspect.Signature:
    """The signature of `forward`, with what `**kwargs` would gather by name: torch.export mistakes it otherwise."""
    signature = inspect.signature(model.forward)
    kinds = [p.kind for p in signature.parameters.values()]
    extra = [name for name in kwargs if name not in signature.parameters]
    if inspect.Parameter.VAR_KEYWORD not in kinds or not extra:
        return signature
    forward = model.forward

    def explicit(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    explicit.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    model.forward = explicit
    return inspect.signature(model.forward)


def _leave_out_caches(model: nn.Module) -> None:
    """What a later call of the model would read is no prediction."""
    forward, signature = model.forward, inspect.signature(model.forward)

    def bare(*args: Any, **kwargs: Any) -> Any:
        return without_caches(forward(*args, **kwargs))

    bare.__signature__ = signature  # type: ignore[attr-defined]
    model.forward = bare


class Taking:
    """A model and an example to capture it with."""

    def __init__(
        self, model: nn.Module, leaves: list[Any], in_spec: pytree.TreeSpec, batch: int, dynamic: Dynamic
    ) -> None:
        refuse_compiled_code(model)
        self.model, self.leaves, self.in_spec, self.batch, self.dynamic = model, leaves, in_spec, batch, dynamic

    def has_batch(self, leaf: Any) -> bool:
        """Whether a leaf of the example has its batch in front."""
        return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == self.batch

    def rows(self, count: int) -> list[Any]:
        """The example with so many inputs: torch.export would take a symbolic size of 0 or 1 for a constant."""

        def few(t: Tensor) -> Tensor:
            if self.batch == 0:
                return t.new_zeros((count, *t.shape[1:]))
            return t[:count] if self.batch >= count else t.repeat(count, *[1] * (t.ndim - 1))[:count]

        if count == self.batch:
            return self.leaves
        return [few(leaf) if self.has_batch(leaf) else leaf for leaf in self.leaves]

    def tensors(self, rows: int) -> tuple[list[Any], dict[str, Tensor]]:
        """That many inputs, all different, and the model's tensors by name."""
        leaves = [different(leaf) if self.has_batch(original) else leaf for leaf, original in self._pairs(rows)]
        named = self.model.named_parameters(remove_duplicate=False), self.model.named_buffers(remove_duplicate=False)
        return leaves, {name: t for group in named for name, t in group}

    def _pairs(self, rows: int) -> list[tuple[Any, Any]]:
        return list(zip(self.rows(rows), self.leaves, strict=True))

    def export(self, rows: int | None) -> tuple[Graph, dict[Node, Node]]:
        """The graph, and what is a view of what.

        Args:
            rows: Inputs in the example, their number symbolic if it is more than 1; None for the example as it is.
        """
        leaves = self.leaves if rows is None else self.rows(rows)
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        decisions = Decisions()
        program = self._exported(leaves, args, kwargs, rows, decisions)
        if decisions.rates:  # code that runs or does not
            check_skips(self._silent_copy, args, kwargs)
            program = self._exported(leaves, args, kwargs, rows, Decisions(), claim=True)
        return from_exported(program, leaves, self.in_spec)

    def _silent_copy(self) -> nn.Module:
        clone = copied_structure(self.model)
        set_capture_flags(clone)
        return clone

    def _exported(
        self,
        leaves: list[Any],
        args: tuple,
        kwargs: dict[str, Any],
        rows: int | None,
        decisions: Decisions,
        claim: bool = False,
    ) -> Any:
        clone = self._silent_copy()
        put_batch_first(clone)
        check_recurrent(clone)
        if claim:
            claim_layers(clone, decisions, skipped_at_random)
        signature = _spell_out_keywords(clone, kwargs)
        _leave_out_caches(clone)
        try:
            names = input_names(signature, self.in_spec)
        except TypeError as error:
            raise InvalidType(
                f"`example` holds {len(args)} positional and {len(kwargs)} keyword arguments "
                f"({', '.join(kwargs) or 'none'}), which do not fit the model's "
                f"forward{signature}: {error}."
            ) from error
        free = free_sizes(self.dynamic, names, leaves)
        symbolic = rows is not None and rows > 1
        shapes: list[dict[int, Any] | None] = [
            ({0: torch.export.Dim.DYNAMIC} if symbolic and self.has_batch(original) else {}) | extra
            if isinstance(leaf, Tensor)
            else None
            for leaf, original, extra in zip(leaves, self.leaves, free, strict=True)
        ]
        arg_shapes, kwarg_shapes = pytree.tree_unflatten(shapes, self.in_spec)
        named = signature.bind(*arg_shapes, **kwarg_shapes).arguments
        generators = _generators()
        try:
            with (
                TRACING,
                warnings.catch_warnings(),
                torch.no_grad(),
                _plain_einsum(),
                quietly(),
                modules_may_fail(),
                deciding(decisions),
            ):
                warnings.simplefilter("ignore")
                program = torch.export.export(clone, args, kwargs, dynamic_shapes=dict(named), strict=False)
        except FavourError:
            raise
        except Exception as error:
            raise CaptureError(explain(error, self.dynamic)) from error
        if _generators() != generators:
            raise UnsupportedOperation(
                "the model draws from Python's or numpy's random numbers while training (augmentation such as masks on "
                "spectrograms, crops, permutations), so that what is captured would be one draw of them. Switch it off "
                "(`apply_spec_augment=False`, for example), or draw with torch."
            )
        return program


def _generators() -> str:
    """Where Python's and numpy's generators are."""
    return repr((random.getstate(), np.random.get_state(legacy=False)))


@contextmanager
def _plain_einsum() -> Iterator[None]:
    """Contract from left to right: opt_einsum, where installed, plans for the example's sizes and so fixes them."""
    before = torch.backends.opt_einsum.enabled
    torch.backends.opt_einsum.enabled = False
    try:
        yield
    finally:
        torch.backends.opt_einsum.enabled = before
