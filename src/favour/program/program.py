"""A `Program`: a captured network that is ready to run.

    graph and posterior  →  plan, one for each set of uncertain inputs  →  method
    leaves of a call     →  bind: what the method works with            →  run: one belief per output

It holds the tensors that the network reads. Those of a model are shared with it, so that a program follows the model
when an optimiser steps or a state dict is loaded (`favour.program.following`); moved elsewhere it has copies of its
own, and the model stays where it is. `Predictor` is its face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.errors import InvalidType
from favour.graph.example import plain
from favour.graph.interpreter import interpret, noiseless
from favour.graph.node import Graph, Node
from favour.graph.sizes import bound_sizes
from favour.graph.tracing import traced
from favour.methods.memory import measure, rows_within
from favour.methods.method import Bound, Method, Numerics
from favour.methods.rows import check_rows
from favour.methods.sampling import Sampler
from favour.passes.normalise.lookups import check_lookups, find_lookups
from favour.passes.plan.steps import Plan, converted, make_plan
from favour.posterior import Posterior
from favour.program.arguments import leaves_of
from favour.program.following import Link, Origin, Watch, same_graph
from favour.program.structure import Structure
from favour.program.tensors import (
    Cached,
    Store,
    attach,
    can_keep,
    check_inputs,
    graph_values,
    kept_value,
    named_tensors,
)
from favour.surrogate.value import Context

__all__ = ["Program"]

T = TypeVar("T")
PLAIN = frozenset[str]()  # no input is uncertain


class Program:
    """A graph, the tensors it reads, and a plan and a method for each set of uncertain inputs.

    Attributes:
        graph: The network, dropout overrides applied.
        asked: The method that was asked for, of which `auto` chooses one by the plan.
        given: The posterior that was given; `posterior()` adds what the model's own layers say.
        numerics: Asked of every method.
        store: The tensors; the same object for as long as the program lives.
        link: To the model they belong to; None where they are the program's own.
        origin: How the graph was made, where changes of the model's structure are watched.
        sizes: Of the example, besides the batch.
        starts: Random starts by the names of steps.
        plans: With their methods, by the names of uncertain inputs.
        measuring: Whether a first call under a memory budget measures what it takes.
    """

    def __init__(
        self,
        graph: Graph,
        asked: Method,
        posterior: Posterior,
        model: nn.Module | None = None,
        numerics: Numerics | None = None,
        store: Store | None = None,
    ) -> None:
        self.graph, self.asked, self.explicit = graph, asked, posterior
        self.numerics = numerics or Numerics()
        self.store = Store() if store is None else store
        self.link = None if model is None else Link(model, graph, self.store)
        self.origin: Origin | None = None
        self.sizes: dict[str, int] = {}
        self.starts: dict[str, Tensor] = {}
        self.plans: dict[frozenset[str], tuple[Plan, Method]] = {}
        self.measuring = True
        self._cache: dict[tuple[str, str], Cached] = {}
        self._kept: dict[str, Any] = {}  # what was made of the graph, by what it is
        self._watch = Watch()
        self.changes = 0  # of tensors' values, counted
        spec = graph.in_spec
        bare = pytree.tree_structure(((None,) * spec.num_leaves, {}), is_leaf=lambda leaf: leaf is None)
        self._bare = spec.num_leaves if bare == spec else -1  # how many tensors, where a call is nothing but tensors
        self._keywords: list[str] = list(pytree.tree_unflatten([None] * graph.in_spec.num_leaves, graph.in_spec)[1])

    # ------------------------------------------------------------------- running

    def inputs(self, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call, checked; what changed in the model is taken over first."""
        leaves = self.leaves(args, kwargs)
        self.follow()
        if not traced():
            check_inputs(self.graph, leaves)
            tables = self.once("lookups", lambda: find_lookups(self.graph))
            if tables and not any(isinstance(leaf, Belief) for leaf in leaves):
                check_lookups(tables, graph_values(self.graph, self.store, leaves, self.explicit)[0])
        return leaves

    def leaves(self, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments of a call in the order of the graph's inputs."""
        if self._bare == len(args) and plain(args, kwargs) and self.graph.batched:
            return list(args)
        return leaves_of(self.graph, self._keywords, args, kwargs)

    def run(self, leaves: list[Any]) -> list[Any]:
        """One belief per floating-point output, other outputs as they are; by slices of the batch within the budget."""
        posterior = self.posterior()
        pieces = []
        for part in self.slices(leaves, posterior):
            bound, method = self.bind(part, posterior)
            pieces.append(method.run(bound))
        return [_joined(parts) for parts in zip(*pieces, strict=True)] if len(pieces) > 1 else pieces[0]

    def bind(self, leaves: list[Any], posterior: Posterior | None = None) -> tuple[Bound, Method]:
        """All that the method for these inputs needs, and the method."""
        posterior = self.posterior() if posterior is None else posterior
        leaf, sources = graph_values(self.graph, self.store, leaves, posterior)
        plan, method = self.plan(frozenset(name for name, _ in sources), posterior)
        values = dict(leaf)
        if posterior.names:
            attach(values, self.graph, plan, posterior)
        numerics = self.numerics
        short = torch.bfloat16 if numerics.precision == "bf16" else None
        ctx = Context(numerics.activation, short=short, tf32=numerics.precision == "tf32", cache=self._cached)
        bound = Bound(plan, plan.bind(values), sources, ctx, numerics, self.starts, self.graph, leaf, posterior)
        if not plan.row_wise and not traced():
            plan.row_wise = check_rows(plan, bound.values, ctx)
        return bound, method

    def plain(self, leaves: list[Any]) -> list[Any]:
        """The outputs with every dropout left out and weights at their means; inputs that are beliefs at theirs."""
        env = interpret(self.graph.calls, self.points(leaves), noiseless)
        return [env[o] if isinstance(o, Node) else o for o in self.graph.outputs]

    def points(self, leaves: list[Any], posterior: Posterior | None = None) -> dict[Node, Any]:
        """Inputs, parameters and constants by node, everything uncertain at its mean."""
        points = [leaf.mean if isinstance(leaf, Belief) else leaf for leaf in leaves]
        values, _ = graph_values(self.graph, self.store, points, posterior or Posterior({}))
        return {node: values[node.name] for node in self.graph.nodes if node.kind != "call"}

    def sample(self, leaves: list[Any], n: int, generator: torch.Generator | None = None) -> list[Any]:
        """Draws of the network itself, (n, *output) for each."""
        if any(isinstance(leaf, Belief) for leaf in leaves):
            raise InvalidType("sampling takes plain tensors; draw from the input belief first.")
        posterior = self.posterior()
        sampler = self.once("sampler", lambda: Sampler(self.graph, posterior.names))
        with torch.no_grad():
            return sampler(self.points(leaves, posterior), n, posterior, generator, self.numerics.memory)

    # ------------------------------------------------------------------ planning

    def plan(self, uncertain: frozenset[str] = PLAIN, posterior: Posterior | None = None) -> tuple[Plan, Method]:
        """The steps where these inputs are beliefs, and the method that runs them."""
        if uncertain not in self.plans:
            plan = make_plan(self.graph, uncertain, self.posterior() if posterior is None else posterior)
            plan.sizes = dict(self.sizes)
            self.plans[uncertain] = plan, self.asked.choose(plan)
        return self.plans[uncertain]

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returns, made once for the graph as it is and kept under a name.

        Where `forget` drops what was derived from values, it calls that of what is kept here, if it has one.
        """
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def knows(self, name: str) -> bool:
        """Whether `once` made it."""
        return name in self._kept

    def keep(self, name: str, value: Any) -> None:
        """Replace what `once` returns."""
        self._kept[name] = value

    def _replan(self) -> None:
        """Make again what was made of the graph: `torch.compile`, the next caller maybe, cannot."""
        known = {PLAIN, *self.plans}
        self.plans, self._kept = {}, {}
        for names in known:
            self.plan(names)

    # --------------------------------------------------------------------- sizes

    def sizes_of(self, leaves: list[Any]) -> dict[str, Any]:
        """What symbolic sizes are in a call."""
        return bound_sizes(self.graph, [None if mean is None else mean.shape for mean in self._means(leaves)])

    def sizes_besides_batch(self, leaves: list[Any]) -> dict[str, Any]:
        """The same without the batch."""
        batches = {n.shape[0] for n in self.graph.inputs if n is not None and n.shape}
        return {symbol: size for symbol, size in self.sizes_of(leaves).items() if symbol not in batches}

    def batched(self) -> list[bool]:
        """Which of the inputs have the batch in front."""
        return [n is not None and bool(n.shape) and isinstance(n.shape[0], str) for n in self.graph.inputs]  # type: ignore[index]

    def rows(self, leaves: list[Any]) -> int | None:
        """The number of inputs in a call; None where none has a batch."""
        means = [mean for mean, b in zip(self._means(leaves), self.batched(), strict=True) if b and mean is not None]
        return means[0].shape[0] if means else None

    def _means(self, leaves: list[Any]) -> list[Tensor | None]:
        return [
            None if n is None or n.shape is None else leaf.mean if isinstance(leaf, Belief) else leaf
            for n, leaf in zip(self.graph.inputs, leaves, strict=True)
        ]

    def slices(self, leaves: list[Any], posterior: Posterior) -> list[list[Any]]:
        """The inputs in slices of the batch that are predicted to fit the memory budget.

        The prediction is corrected by what a pass over two rows takes, measured once for each set of sizes.
        """
        memory = self.numerics.memory
        if memory is None:
            return [leaves]
        pairs = zip(self.graph.inputs, leaves, strict=True)
        beliefs = frozenset(n.name for n, leaf in pairs if n is not None and isinstance(leaf, Belief))
        plan, method = self.plan(beliefs, posterior)
        plan.sizes = self.sizes_besides_batch(leaves)
        batched = self.batched()
        mean = next(m for m, b in zip(self._means(leaves), batched, strict=True) if b and m is not None)
        itemsize = max(mean.element_size(), 4) if mean.is_floating_point() else 4
        rows = rows_within(method, plan, memory, itemsize)

        def part(start: int, stop: int) -> list[Any]:
            return [leaf[start:stop] if b else leaf for leaf, b in zip(leaves, batched, strict=True)]

        known = plan.correction is not None and plan.correction[0] == plan.sizes
        if self.measuring and not known and mean.shape[0] and not traced():
            few = min(rows, 2, mean.shape[0])
            measure(method, plan, itemsize, few, lambda: method.run(self.bind(part(0, few), posterior)[0]))
            rows = rows_within(method, plan, memory, itemsize)
        return [part(i, i + rows) for i in range(0, max(1, mean.shape[0]), rows)]

    # ----------------------------------------------------------------- following

    def posterior(self) -> Posterior:
        """The posterior in force: the one given, and what the model's own Bayesian layers say now."""
        return self.explicit if self.link is None else self.link.posterior(self.explicit, self.graph)

    def follow(self) -> None:
        """Take over what changed in the model since the last call, in eager code; see `Predictor.follow`."""
        if traced():
            return
        tensors = {} if self.link is None else self.link.follow(self.store)
        known = self.store.named_tensors()  # constants too: a list or dict of the model may hold tensors
        tensors |= {name: t for name, t in known if t.is_floating_point() and name not in tensors}
        if self._watch.changed(tensors.values()):
            self.forget()
        self._watch.check_finite(tensors)
        if self.origin is not None:
            self.origin.check(self.graph)

    def refresh(self) -> None:
        """Take over the model as it is now, whatever was changed; see `Predictor.refresh`."""
        self.forget()
        origin = self.origin
        if origin is not None:
            if self.link is not None:
                self.link.check_types()
            graph = origin.graph()
            self.explicit.validate(named_tensors(origin.model))
            origin.structure = Structure(origin.model)
            if not same_graph(graph, self.graph):
                self.graph = graph
                self.store.clear()
                self.link = Link(origin.model, graph, self.store)
                self._replan()
        self.follow()

    def forget(self) -> None:
        """Drop everything that was derived from the values of tensors."""
        self._cache.clear()
        self.changes += 1
        self._watch.forget()
        for kept in self._kept.values():
            if hasattr(kept, "forget"):
                kept.forget()

    def _cached(self, step: str, name: str, tensor: Tensor, function: Callable[[Tensor], Any], costly: bool) -> Any:
        """`function(tensor)`, kept per step until the tensor changes; see `Context.cached`."""
        key = (step, name)
        if traced():
            # Versions cannot be read here. Cheap values are recomputed in the graph; a decomposition is taken
            # from the last eager call.
            kept = self._cache.get(key)
            return kept.value if kept is not None and costly else function(tensor)
        return kept_value(self._cache, key, tensor, function) if can_keep(tensor) else function(tensor)

    # ------------------------------------------------------------------- cloning

    def clone(
        self,
        *,
        device: str | torch.device | None = None,
        outputs: Graph | None = None,
        method: Method | None = None,
        numerics: Numerics | None = None,
    ) -> Program:
        """Another program of the same network.

        Args:
            device: Where it has tensors of its own, as they are now; by default it shares this one's, and their link to
                the model. (It does not watch the model's structure: this one does.)
            outputs: A graph over the same tensors that ends elsewhere.
            method: Another.
            numerics: Others.
        """
        numerics = self.numerics if numerics is None else numerics
        graph, method = self.graph if outputs is None else outputs, self.asked if method is None else method
        if device is None:
            twin = Program(graph, method, self.explicit, None, numerics, self.store)
            twin.link, twin._cache, twin.starts, twin.sizes = self.link, self._cache, self.starts, self.sizes
            return twin
        self.follow()
        twin = Program(graph, method, self.posterior(), None, numerics)
        for name, tensor in self.store.named_tensors():
            twin.store.put(name, _moved(tensor, device))
        twin.explicit = _like(twin.explicit, twin.store)
        twin.starts, twin.sizes = {k: t.detach().to(device) for k, t in self.starts.items()}, dict(self.sizes)
        return twin

    def move(self, function: Callable[[Tensor], Tensor]) -> bool:
        """`.to` and friends, by what they do to a tensor: take copies first, so that the model stays where it is.

        Returns:
            Whether there was anything to do.
        """
        dtypes: dict[torch.dtype, torch.dtype] = {}
        moved = False
        for _, tensor in self.store.named_tensors():
            probe = function(tensor[:0] if tensor.ndim else tensor)
            moved = moved or probe.device != tensor.device
            if probe.dtype != tensor.dtype:
                dtypes[tensor.dtype] = probe.dtype
        if not dtypes and not moved:
            return False
        self.explicit = self.posterior()
        self.link = self.origin = None
        for name, tensor in list(self.store.named_tensors()):
            copy = tensor.detach().clone()
            self.store.put(name, nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy)
        self.store.move(function)
        self.explicit = _like(self.explicit, self.store)
        if dtypes:
            self.graph = converted(self.graph, dtypes)
        self.starts = {k: function(v) for k, v in self.starts.items()}
        self._cache = {}
        self._replan()
        return True


def _moved(tensor: Tensor, device: str | torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _like(posterior: Posterior, store: Store) -> Posterior:
    """A posterior where the parameters are, and of their dtype."""
    floats = next((t for t in store.parameters() if t.is_floating_point()), None)
    return posterior if floats is None else posterior.to(device=floats.device, dtype=floats.dtype)


def _joined(parts: tuple[Any, ...]) -> Any:
    """One output of several slices of a batch."""
    if isinstance(parts[0], Belief):
        return Belief.cat(parts)
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]
