"""The `Predictor`: a network that answers with beliefs.

A predictor holds a captured graph, the tensors it reads, a posterior and the settings of a method. It
shares the model's tensors, so it follows the model when an optimiser steps or a state dict is loaded;
moving it to another device or dtype gives it copies of its own and leaves the model where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour import across
from favour.attribution import Attribution
from favour.belief import Belief
from favour.capture.node import Graph, Node
from favour.errors import InvalidType, InvalidValue
from favour.head import Head, draws, find_head, probabilities
from favour.joint import Joint, concatenated, split
from favour.methods.choice import Choice, choose
from favour.methods.engine import Settings, infer, infer_parts
from favour.plan import Plan, converted, make_plan
from favour.posterior import Posterior
from favour.sampling import Sampler
from favour.sizes import bound_sizes
from favour.slices import slices
from favour.tensors import (
    Cached,
    Store,
    attach,
    can_keep,
    check_inputs,
    graph_values,
    kept_value,
    renamed,
    version_of,
)
from favour.value import Context, Value


class Predictor(nn.Module):
    """Predicts beliefs. Made by `favour.compile` or `favour.load`."""

    def __init__(self, graph: Graph, settings: Settings, posterior: Posterior, model: nn.Module | None) -> None:
        super().__init__()
        self.graph, self.settings = graph, settings
        self.given = posterior
        # In lists, so that the model and its parts are not registered as submodules.
        self._linked: list[nn.Module] = [] if model is None else [model]
        self._bayesian: list[tuple[str, nn.Module]] = []  # modules that bring posteriors, by path
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._spreads: dict[str, tuple[nn.Module, str]] = {}  # parameters that only posteriors are made of
        self.store = Store()
        if model is not None:
            self._link(model)
        self._plans: dict[frozenset[str], Plan] = {}
        self._choices: dict[frozenset[str], Choice] = {}
        self._cache: dict[tuple[str, str], Cached] = {}
        self._starts: dict[str, Tensor] = {}
        self._checked: dict[str, tuple[Tensor, int | None]] = {}
        self._sampler: Sampler | None = None
        # The layers that `probabilities` samples, by the number of draws.
        self._heads: tuple[Graph, dict[int | None, Head | None]] | None = None
        self._sizes: dict[str, int] = {}  # of the example, for `auto`
        self._warm = True  # whether what is kept between calls exists, so that memory can be measured
        self._scores = True  # whether outputs may be class scores
        self._together: list[Predictor] = []  # over all outputs at once, in a list for the same reason
        self._keywords: list[str] = list(pytree.tree_unflatten([None] * graph.in_spec.num_leaves, graph.in_spec)[1])

    def extra_repr(self) -> str:
        """The settings that were asked for, and what `auto` chose."""
        asked = self.settings.asked()
        choice = self._choices.get(frozenset())
        if choice is not None:
            asked.append(f"takes {choice.method}, predicted {choice.forwards:.1f} forward passes")
        return ", ".join(asked)

    # ------------------------------------------------------------------ tensors

    def _link(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        for node in self.graph.nodes:
            if node.kind in ("parameter", "buffer"):
                path, _, attribute = str(node.target).rpartition(".")
                self._owners[str(node.target)] = (modules[path], attribute)
        self._bayesian = [(path, m) for path, m in model.named_modules() if hasattr(m, "favour_posterior")]
        for path, module in self._bayesian:
            own = {f"{path}.{name}" if path else name: name for name, _ in module.named_parameters(recurse=False)}
            self._spreads |= {name: (module, local) for name, local in own.items() if name not in self._owners}
        for name, (owner, attribute) in self._owners.items():
            self.store.put(name, getattr(owner, attribute))
        for name, tensor in self.graph.constants.items():
            self.store.put(f"constant.{name}", tensor)

    def refresh(self) -> None:
        """Pick up tensors that were replaced in the model, and check changed ones for NaN and infinity.

        Called by every eager prediction. A predictor inside `torch.compile` reads the tensors in place, and
        needs this only after `load_state_dict(assign=True)`.
        """
        for name, (owner, attribute) in self._owners.items():
            tensor = getattr(owner, attribute)
            if tensor is not self.store.take(name):
                self.store.put(name, tensor)
            self._check_finite(name, tensor)
        for name, (owner, attribute) in self._spreads.items():
            self._check_finite(name, getattr(owner, attribute))

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        """Once for every version of a tensor."""
        version = version_of(tensor)
        seen = self._checked.get(name)
        if seen is not None and seen[0] is tensor and seen[1] == version is not None:
            return
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InvalidValue(
                f"parameter `{name}` of shape {tuple(tensor.shape)} holds NaN or infinity; load sound weights first."
            )
        self._checked[name] = (tensor, version)

    def _apply(self, fn: Any, recurse: bool = True) -> Predictor:
        """`.to` and friends: take copies first, so that the model stays where it is."""
        dtypes: dict[torch.dtype, torch.dtype] = {}
        moved = False
        for tensor in (*self.store.parameters(), *self.store.buffers()):
            probe = fn(tensor[:0] if tensor.ndim else tensor)
            moved = moved or probe.device != tensor.device
            if probe.dtype != tensor.dtype:
                dtypes[tensor.dtype] = probe.dtype
        if not dtypes and not moved:
            return self
        self.given = self.posterior()
        for name in [n.replace("/", ".") for n, _ in (*self.store.named_parameters(), *self.store.named_buffers())]:
            tensor = self.store.take(name)
            copy = tensor.detach().clone()
            self.store.put(name, nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy)
        self._linked, self._bayesian, self._owners, self._spreads = [], [], {}, {}
        super()._apply(fn, recurse)
        floats = next((t for t in self.store.parameters() if t.is_floating_point()), None)
        if floats is not None:
            self.given = self.given.to(device=floats.device, dtype=floats.dtype)
        if dtypes:
            self.graph = converted(self.graph, dtypes)
        known, self._plans, self._sampler = tuple(self._plans), {}, None
        self._together.clear()
        self._cache.clear()
        self._starts = {k: fn(v) for k, v in self._starts.items()}
        self.prepare(known)
        return self

    def posterior(self) -> Posterior:
        """The posterior in force: the one given, and what the model's own Bayesian layers say now."""
        if not self._linked:
            return self.given
        own = Posterior.from_modules(self._bayesian)
        names = {str(n.target) for n in self.graph.nodes if n.kind == "parameter"}
        return renamed(own.merge(self.given) if not own.is_empty else self.given, self.graph.aliases, names)

    # --------------------------------------------------------------- prediction

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; the arguments are the model's, and any tensor among them may be a `Belief`."""
        leaves = self._leaves(args, kwargs)
        if not torch.compiler.is_compiling():
            self.refresh()
            check_inputs(self.graph, leaves)
        posterior = self.posterior()
        pieces = [self._predict(part, posterior) for part in slices(self, leaves, posterior)]
        joined = [_joined(parts) for parts in zip(*pieces, strict=True)] if len(pieces) > 1 else pieces[0]
        return pytree.tree_unflatten(joined, self.graph.out_spec)

    def joint_outputs(self, *args: Any, **kwargs: Any) -> Joint:
        """One belief over all outputs of the model, with the covariance between them.

        Returns:
            A `Joint`: joint draws, densities and cross-covariances, in the structure of the model's output. Its
            marginals are what calling the predictor gives (with `dplr`, up to what compression leaves out).
            `directions` do not apply.
        """
        if not self._together:
            self._together.append(self._concatenated())
        results = self._together[0](*args, **kwargs)
        return split(self.graph, results, self._bound_sizes(self._leaves(args, kwargs)))

    def joint(self, *args: Any, group: int | None = None, masks: str = "shared", **kwargs: Any) -> Any:
        """One belief over the outputs at all inputs, which meet the same network (see `favour.across`).

        Args:
            args, kwargs: The model's.
            group: Every `group` consecutive inputs belong together; all inputs by default.
            masks: `"shared"`, one dropout mask for all inputs: one thinned network, a draw of a function. Or
                `"independent"`, a mask for each input as in MC dropout; only weights then correlate inputs.

        Returns:
            For each output a `Belief` with events (group, *output), one for each group, by a reverse sweep whatever
            the method. Its marginals are those of a call with method `"adjoint"` and rank 0. `directions` and
            `memory` do not apply; time and memory grow with the square of the group.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
            >>> joint = favour.compile(model, torch.randn(4, 3)).joint(torch.randn(5, 3))
            >>> joint.mean.shape, joint.covariance_matrix.shape
            (torch.Size([1, 5, 2]), torch.Size([1, 10, 10]))
        """
        return across.joint(self, args, kwargs, group, masks)

    def _concatenated(self) -> Predictor:
        """A predictor of all outputs in one vector that shares this one's tensors."""
        twin = Predictor(concatenated(self.graph), replace(self.settings, directions=None), self.given, None)
        twin.store, twin._linked, twin._owners, twin._spreads = self.store, self._linked, self._owners, self._spreads
        twin._bayesian = self._bayesian
        twin._cache, twin._starts, twin._sizes, twin._scores = self._cache, self._starts, self._sizes, False
        return twin

    def probabilities(
        self, *args: Any, kind: str | None = None, estimator: str = "auto", draws: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Class probabilities E[softmax(z)], (batch, C), z the logits.

        Args:
            args, kwargs: The model's.
            kind: See `favour.probabilities`.
            estimator: `"head"` (fixed draws of the last layers, see `favour.head`), or one of those of
                `favour.probabilities`. By default the head where its draws take no longer than a forward pass (by
                a count of operations), else `"nodes"`.
            draws: At least so many draws of the head, instead of as many as take a forward pass. Their average has
                the error of an average: a negative log-likelihood is off by a multiple of one over their number.
        """
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
            return probabilities(self, args, kwargs, kind, estimator, draws)
        with torch.inference_mode():  # with a single input this saves a quarter of the head's time
            p = probabilities(self, args, kwargs, kind, estimator, draws)
        return p.clone()  # an ordinary tensor again

    def draws(self, *args: Any, n: int | None = None, **kwargs: Any) -> Tensor:
        """Draws of the logits from the last layers, (n, batch, C): a fixed function of the input, see `favour.head`.

        `favour.scores` takes them like samples: `scores.jsd(predict.draws(x))` keeps what a Gaussian loses.

        Args:
            args, kwargs: The model's.
            n: At least so many; by default what `probabilities` takes.

        Raises:
            UnsupportedOperation: The network has no head, as `favour.head` defines it.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
            >>> favour.compile(model, torch.randn(2, 4)).draws(torch.randn(5, 4), n=960).shape
            torch.Size([960, 5, 3])
        """
        return draws(self, args, kwargs, n)

    def attribute(self, *args: Any, **kwargs: Any) -> Any:
        """How much of each output's variance comes from which dropout, parameter or nonlinearity.

        Returns:
            An `Attribution` for each output, in the structure of the model's output.
        """
        leaves = self._leaves(args, kwargs)
        self.refresh()
        check_inputs(self.graph, leaves)
        posterior = self.posterior()
        plan, values, sources = self._bound(leaves, posterior)
        choice = self._choices[frozenset(name for name, _ in sources)]
        parts = infer_parts(plan, values, self.settings, self._context(), sources, self._starts, choice.secant)
        outputs = [Attribution.of(mean, grams) if isinstance(mean, Tensor) else mean for mean, grams in parts]
        return pytree.tree_unflatten(outputs, self.graph.out_spec)

    def stream(
        self,
        loader: Iterable[Any],
        device: str | torch.device | None = None,
        *,
        results: Sequence[str] | Mapping[str, Callable[[Any], Any]] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        compiled: bool = False,
        prefetch: int = 2,
        progress: bool = True,
    ) -> Iterator[Any]:
        """Predict all batches of a loader, in order, loading and copying while computing (see `favour.streaming`).

        Args:
            loader: Yields tensors, tuples that begin with the model's arguments (labels may follow), or dicts with
                entries named as the model's arguments.
            device: Where to compute; a copy of the predictor goes there if it is elsewhere. Its own by default.
            results: What to yield: names among mean, variance, stddev, covariance_matrix, probabilities and batch (as
                the loader gave it), or a mapping from names to functions of what the predictor returns. Results come
                as dicts of tensors on the host, while beliefs, the default, stay on the device.
            inputs: Takes the model's arguments from a batch, where the rules above do not serve: a function that
                returns a tensor, a tuple of arguments or a dict of keyword arguments.
            compiled: Through `torch.compile`, for batches of the first one's shape; a smaller last one runs as it is.
            prefetch: How many batches may wait.
            progress: Show a bar on a terminal once this takes over two seconds.

        Returns:
            An iterator. Errors name the batch they happened in, counted from 0.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
            >>> predict = favour.compile(model, torch.randn(4, 3))
            >>> loader = [(torch.randn(4, 3), torch.zeros(4)), (torch.randn(1, 3), torch.zeros(1))]
            >>> [tuple(found["stddev"].shape) for found in predict.stream(loader, results=["mean", "stddev"])]
            [(4, 2), (1, 2)]
        """
        from favour.streaming import stream

        return stream(self, loader, device, results, inputs, compiled, prefetch, progress)

    def _predict(self, leaves: list[Any], posterior: Posterior) -> list[Any]:
        plan, values, sources = self._bound(leaves, posterior)
        choice = self._choices[frozenset(name for name, _ in sources)]
        return infer(plan, values, self.settings, choice, self._context(), sources, self._starts)

    def _bound(self, leaves: list[Any], posterior: Posterior) -> tuple[Plan, dict[Node, Any], list[tuple[str, Value]]]:
        """The plan for these inputs, the values of its leaves, and the uncertain ones among the inputs."""
        values, sources = self._values(leaves, posterior)
        plan = self._plan(frozenset(name for name, _ in sources), posterior)
        if posterior.names:
            attach(values, self.graph, plan, posterior)
        return plan, plan.bind(values), sources

    def _context(self) -> Context:
        short = torch.bfloat16 if self.settings.precision == "bf16" else None
        tf32 = self.settings.precision == "tf32"
        return Context(activation=self.settings.activation, short=short, tf32=tf32, cache=self._cached)

    def prepare(self, uncertain: Iterable[frozenset[str]] = ()) -> None:
        """Make the plans for plain and for these uncertain inputs: `torch.compile`, the next caller maybe, cannot."""
        for names in {frozenset[str](), *uncertain}:
            self._plan(names, self.posterior())
        find_head(self)

    def _bound_sizes(self, leaves: list[Any]) -> dict[str, Any]:
        shapes = [
            (leaf.mean if isinstance(leaf, Belief) else leaf).shape if n else None for n, leaf in self._pairs(leaves)
        ]
        return bound_sizes(self.graph, shapes)

    def _other_sizes(self, leaves: list[Any]) -> dict[str, Any]:
        """Symbolic sizes besides the batch."""
        batches = {n.shape[0] for n in self.graph.inputs if n is not None and n.shape}
        return {symbol: size for symbol, size in self._bound_sizes(leaves).items() if symbol not in batches}

    def _pairs(self, leaves: list[Any]) -> list[tuple[Node | None, Any]]:
        """Inputs that are tensors, None for others, with the leaf of a call."""
        return [
            (n if n is not None and n.shape is not None else None, leaf)
            for n, leaf in zip(self.graph.inputs, leaves, strict=True)
        ]

    def _leaves(self, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        ordered = {k: kwargs[k] for k in self._keywords if k in kwargs} | dict(kwargs)  # in the example's order
        leaves, spec = pytree.tree_flatten((args, ordered), is_leaf=lambda t: isinstance(t, Belief))
        if not torch.compiler.is_compiling() and spec != self.graph.in_spec:
            raise InvalidType(
                f"the predictor was compiled for arguments of structure {self.graph.in_spec}, and was called "
                f"with {spec}; call it the way the example was given."
            )
        return leaves

    def _values(self, leaves: list[Any], posterior: Posterior) -> tuple[dict[str, Any], list[tuple[str, Value]]]:
        return graph_values(self.graph, self.store, leaves, posterior)

    def _plan(self, uncertain: frozenset[str], posterior: Posterior) -> Plan:
        if uncertain not in self._plans:
            self._plans[uncertain] = make_plan(self.graph, uncertain, posterior)
            self._plans[uncertain].sizes = dict(self._sizes)
            self._choices[uncertain] = choose(self._plans[uncertain], self.settings, self._scores)
        return self._plans[uncertain]

    def _cached(self, step: str, name: str, tensor: Tensor, function: Any) -> Any:
        """`function(tensor)`, kept per step until the tensor changes."""
        key = (step, name)
        if torch.compiler.is_compiling():
            # Versions cannot be read here. Cheap values are recomputed in the graph; a decomposition is taken
            # from the last eager call.
            kept = self._cache.get(key)
            return kept.value if kept is not None and name.startswith("svd") else function(tensor)
        return kept_value(self._cache, key, tensor, function) if can_keep(tensor) else function(tensor)

    # ----------------------------------------------------------------- sampling

    def sample(self, *args: Any, n: int, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        """Draw n outputs of the network itself (not of the belief), (n, batch, *event)."""
        leaves = self._leaves(args, kwargs)
        self.refresh()
        check_inputs(self.graph, leaves)
        if any(isinstance(leaf, Belief) for leaf in leaves):
            raise InvalidType("sampling takes plain tensors; draw from the input belief first.")
        posterior = self.posterior()
        values, _ = self._values(leaves, posterior)
        if self._sampler is None:
            self._sampler = Sampler(self.graph, posterior.names)
        with torch.no_grad():
            bound = {node: values[node.name] for node in self.graph.nodes if node.kind != "call"}
            drawn = self._sampler(bound, n, posterior, generator, self.settings.memory)
        return pytree.tree_unflatten(drawn, self.graph.out_spec)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole predictor: graph, tensors, posterior and settings. No code is pickled; see `favour.load`."""
        from favour.saving import save

        save(self, path)


def _joined(parts: tuple[Any, ...]) -> Any:
    """One output of several slices of a batch."""
    if isinstance(parts[0], Belief):
        return Belief.cat(parts)
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]
