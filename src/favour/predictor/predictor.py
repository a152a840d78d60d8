"""The `Predictor`: a network that answers with beliefs.

A predictor holds a captured graph, the tensors it reads, a posterior and the settings of a method. It
shares the model's tensors, so it follows the model when an optimiser steps or a state dict is loaded;
moving it to another device or dtype gives it copies of its own and leaves the model where it is.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.belief import Belief, intervals
from favour.belief.joint import Joint, concatenated, split
from favour.classify import classes
from favour.classify.head import Head, find_head
from favour.errors import (
    ChangedModel,
    FavourError,
    InvalidType,
    InvalidValue,
    PickledPredictor,
    StalePredictor,
    computing,
)
from favour.graph.node import Graph, Node
from favour.graph.sizes import bound_sizes
from favour.inspect import describe
from favour.inspect.attribution import Attribution
from favour.inspect.explain import Explanation, explanation, stand_in
from favour.inspect.selfcheck import SelfCheck
from favour.methods import Adjoint, Bound, Method, Numerics
from favour.methods.adjoint import ReverseSweep
from favour.methods.sampling import Sampler
from favour.passes.normalise.ending import Ending
from favour.passes.normalise.lookups import Lookup, check_lookups, find_lookups
from favour.passes.plan.rows import check_rows
from favour.passes.plan.steps import Plan, converted, make_plan
from favour.posterior import Posterior
from favour.predictor import across
from favour.predictor.arguments import leaves_of
from favour.predictor.arrays import accepts_arrays
from favour.predictor.following import Origin, Structure, Values, same_graph
from favour.predictor.slices import slices
from favour.predictor.tensors import (
    Cached,
    Store,
    attach,
    can_keep,
    check_inputs,
    graph_values,
    kept_value,
    named_tensors,
    renamed,
    version_of,
)
from favour.surrogate.value import Context, Value

if TYPE_CHECKING:
    from favour.classify.calibration import Calibrated

_AGAIN = "Call `predict.refresh()` to take it over, or compile the model again."


class Predictor(nn.Module):
    """Predicts beliefs. Made by `favour.compile` or `favour.load`."""

    def __init__(
        self,
        graph: Graph,
        asked: Method,
        posterior: Posterior,
        model: nn.Module | None,
        numerics: Numerics | None = None,
    ) -> None:
        super().__init__()
        self.graph, self.asked, self.numerics = graph, asked, numerics or Numerics()
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
        self._methods: dict[frozenset[str], Method] = {}
        self._cache: dict[tuple[str, str], Cached] = {}
        self._starts: dict[str, Tensor] = {}
        self._checked: dict[str, tuple[Tensor, int | None]] = {}
        self._seen = Values()
        self._origin: Origin | None = None  # how the graph was made, where the model is at hand
        self._sampler: Sampler | None = None
        # The layers that `probabilities` samples, by the number of draws.
        self._heads: tuple[Graph, dict[int | None, Head | None]] | None = None
        self._sizes: dict[str, int] = {}  # of the example, for `auto`
        self._warm = True  # whether what is kept between calls exists, so that memory can be measured
        self._lookups: tuple[Graph, list[Lookup]] | None = None  # of inputs in tables, and the graph they are of
        self.file: str | None = None  # that it was loaded from
        self.checked = SelfCheck()  # against samples, when it was compiled
        self._together: list[Predictor] = []  # over all outputs at once, in a list for the same reason
        self._as_classes: list[Predictor] = []  # over class scores, likewise
        self._ending: tuple[Graph, Ending] | None = None  # what the graph ends in
        self._keywords: list[str] = list(pytree.tree_unflatten([None] * graph.in_spec.num_leaves, graph.in_spec)[1])

    def extra_repr(self) -> str:
        """The method and its cost, the sources of noise, and what the check at compile time found."""
        return describe.described(self)

    def _repr_html_(self) -> str:
        return describe.html(self)

    @property
    def method(self) -> Method:
        """The method that answers plain inputs: the one asked for, or what `auto` chose."""
        if frozenset() not in self._methods:
            self._plan(frozenset(), self.posterior())
        return self._methods[frozenset()]

    @property
    def plain_plan(self) -> Plan:
        """The steps for inputs that are no beliefs."""
        return self._plan(frozenset(), self.posterior())

    @property
    def is_certain(self) -> bool:
        """Whether no noise reaches an output for plain inputs."""
        plan = self.plain_plan
        return not any(isinstance(o, Node) and o in plan.uncertain for o in plan.outputs)

    @property
    def device(self) -> torch.device:
        """Where the predictor's tensors are; the CPU if it has none."""
        return next((t.device for _, t in self.store.named_tensors()), torch.device("cpu"))

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

    def follow(self) -> None:
        """Take over what changed in the model since the last call; every eager prediction begins with this.

        Raises:
            InvalidValue: A parameter holds NaN or infinity.
            StalePredictor: Rates, modules or hooks were changed, and with them what the model computes.
        """
        for name, (owner, attribute) in self._owners.items():
            tensor = getattr(owner, attribute, None)
            if not isinstance(tensor, Tensor):
                raise StalePredictor(f"the model has no tensor `{name}` any more; {_AGAIN}")
            if tensor is not self.store.take(name):
                self.store.put(name, tensor)
        tensors = {name: self.store.take(name) for name in self._owners}
        tensors |= {name: getattr(owner, attribute) for name, (owner, attribute) in self._spreads.items()}
        known = self.store.named_tensors()  # constants too: a list or dict of the model may hold tensors
        tensors |= {name: t for name, t in known if t.is_floating_point() and name not in self._owners}
        if self._seen.changed(tensors.values()):
            self.forget()
        for name, tensor in tensors.items():
            if not name.startswith("constant."):  # a mask that the code made may well hold infinities
                self._check_finite(name, tensor)
        if self._origin is not None and not self._origin.structure.same():
            self._check_structure(self._origin)

    def follow_structure(self, origin: Origin) -> None:
        """Watch the model for changes of its structure from here on."""
        self._origin = origin

    def _check_structure(self, origin: Origin) -> None:
        try:
            changes = origin.changes(self.graph, origin.graph)
        except FavourError as error:
            listed = "; ".join(sentence for _, _, sentence in origin.structure.differences())
            warnings.warn(
                f"the model was changed after it was compiled ({listed}), and can no longer be captured, so this "
                f"prediction is of the model as it was: {str(error).splitlines()[0]}",
                ChangedModel,
                stacklevel=4,
            )
            return
        if changes:
            raise StalePredictor(f"the model was changed after it was compiled: {'; '.join(changes)}. {_AGAIN}")

    def refresh(self) -> None:
        """Take over the model as it is now, whatever was changed and however.

        Everything derived from weights is forgotten and the model is captured again, which takes as long as
        `favour.compile`. Needed after changes of rates, modules or hooks, which a predictor refuses to predict with;
        after changes that no attribute of a module shows, such as a global; and after writes through `.data` or a numpy
        view to a few entries of a large tensor, which are not always noticed. A predictor inside `torch.compile` reads
        tensors in place, and needs this after `load_state_dict(assign=True)` too.
        """
        self.forget()
        origin = self._origin
        if origin is not None:
            graph = origin.graph()
            self.given.validate(named_tensors(origin.model))
            origin.structure = Structure(origin.model)
            if not same_graph(graph, self.graph):
                self.graph = graph
                known, self._plans, self._methods, self._sampler, self._heads = tuple(self._plans), {}, {}, None, None
                self._together.clear()
                self._as_classes.clear()
                self._owners, self._spreads, self.store = {}, {}, Store()
                self._link(origin.model)
                self.prepare(known)
        self.follow()

    def forget(self) -> None:
        """Drop everything that was derived from the values of tensors."""
        self._cache.clear()
        self._checked.clear()
        for head in (self._heads or (None, {}))[1].values():
            if head is not None:
                head.tables = None

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
        self._linked, self._bayesian, self._owners, self._spreads, self._origin = [], [], {}, {}, None
        super()._apply(fn, recurse)
        floats = next((t for t in self.store.parameters() if t.is_floating_point()), None)
        if floats is not None:
            self.given = self.given.to(device=floats.device, dtype=floats.dtype)
        if dtypes:
            self.graph = converted(self.graph, dtypes)
        known, self._plans, self._sampler = tuple(self._plans), {}, None
        self._together.clear()
        self._as_classes.clear()
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

    @accepts_arrays
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; the arguments are the model's, and any tensor among them may be a `Belief`."""
        if self.file is None or torch.compiler.is_compiling():
            return self._answer(args, kwargs)
        with computing(self.file):
            return self._answer(args, kwargs)

    def _answer(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        leaves = self._leaves(args, kwargs)
        if not torch.compiler.is_compiling():
            self.follow()
            check_inputs(self.graph, leaves)
            self._check_lookups(leaves)
        posterior = self.posterior()
        pieces = [self._predict(part, posterior) for part in slices(self, leaves, posterior)]
        joined = [_joined(parts) for parts in zip(*pieces, strict=True)] if len(pieces) > 1 else pieces[0]
        return pytree.tree_unflatten(joined, self.graph.out_spec)

    def _check_lookups(self, leaves: list[Any]) -> None:
        """Raise where whole numbers among the inputs ask for rows that tables do not have."""
        if self._lookups is None or self._lookups[0] is not self.graph:
            self._lookups = self.graph, find_lookups(self.graph)
        if self._lookups[1] and not any(isinstance(leaf, Belief) for leaf in leaves):
            check_lookups(self._lookups[1], graph_values(self.graph, self.store, leaves, self.given)[0])

    @accepts_arrays
    def joint_outputs(self, *args: Any, **kwargs: Any) -> Joint:
        """One belief over all outputs of the model, with the covariance between them.

        Returns:
            A `Joint`: joint draws, densities and cross-covariances, in the structure of the model's output. Its
            marginals are what calling the predictor gives (with `dplr`, up to what compression leaves out).
            `directions` do not apply.
        """
        if not self._together:
            self._together.append(self._twin(concatenated(self.graph), self.asked.over("joint")))
        if not torch.compiler.is_compiling():
            self.follow()
        results = self._together[0](*args, **kwargs)
        return split(self.graph, results, self._bound_sizes(self._leaves(args, kwargs)))

    @accepts_arrays
    def joint(self, *args: Any, group: int | None = None, masks: str = "shared", **kwargs: Any) -> Any:
        """One belief over the outputs at all inputs, which meet the same network (see `favour.predictor.across`).

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

    def _twin(self, graph: Graph, asked: Method) -> Predictor:
        """A predictor of another graph or by another method that shares this one's tensors."""
        twin = Predictor(graph, asked, self.given, None, self.numerics)
        twin.store, twin._linked, twin._owners, twin._spreads = self.store, self._linked, self._owners, self._spreads
        twin._bayesian, twin._origin = self._bayesian, None  # it is asked by this one, which follows the model
        twin._cache, twin._starts, twin._sizes = self._cache, self._starts, self._sizes
        return twin

    @accepts_arrays
    def logits(self, *args: Any, **kwargs: Any) -> Any:
        """The belief over class scores: what the model returns, less the softmax or sigmoid that it ends in.

        Scores need it: `favour.scores.entropy(predict.logits(x))`. Where the model returns logits this is a call of
        the predictor, but that of very many outputs those directions are followed which probabilities see.

        Raises:
            UnsupportedOperation: The model returns probabilities of which its graph has no logits.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3), nn.Softmax(-1))
            >>> belief = favour.compile(model, torch.randn(2, 4)).logits(torch.randn(5, 4))
            >>> bool((belief.mean < 0).any())
            True
        """
        if not torch.compiler.is_compiling():
            self.follow()
        return classes.logits(self, args, kwargs)

    @accepts_arrays
    def probabilities(
        self, *args: Any, kind: str | None = None, estimator: str = "auto", draws: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Class probabilities E[softmax(z)], (batch, C), z the logits.

        A softmax or sigmoid that the model ends in is not taken twice: its logits are used, or, where the graph has
        none, its probabilities as they are.

        Args:
            args, kwargs: The model's.
            kind: See `favour.probabilities`; by default what the model's last operations say.
            estimator: `"head"` (fixed draws of the last layers, see `favour.classify.head`), or one of those of
                `favour.probabilities`. By default the head where its draws take no longer than a forward pass (by
                a count of operations), else `"nodes"`.
            draws: At least so many draws of the head, instead of as many as take a forward pass. Their average has
                the error of an average: a negative log-likelihood is off by a multiple of one over their number.
        """
        if not torch.compiler.is_compiling():
            self.follow()
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
            return classes.probabilities(self, args, kwargs, kind, estimator, draws)
        with torch.inference_mode():  # with a single input this saves a quarter of the head's time
            p = classes.probabilities(self, args, kwargs, kind, estimator, draws)
        return p.clone()  # an ordinary tensor again

    def with_noise(self, variance: float | Tensor) -> Calibrated:
        """A predictor of observations: beliefs gain this variance, and `interval` answers.

        Args:
            variance: s² of the observation noise, broadcastable to an output; `favour.fit_noise` finds it.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
            >>> predict, x, y = favour.compile(model, torch.zeros(2, 3)), torch.randn(50, 3), torch.randn(50, 1)
            >>> low, high = predict.with_noise(favour.fit_noise(predict(x), y)).interval(x, 0.9)
            >>> low.shape
            torch.Size([50, 1])
        """
        return intervals.with_noise(self, variance)

    def interval(self, *args: Any, level: float | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: the spread of a network is not the error of its prediction (see `favour.belief.intervals`).

        Raises:
            NotCalibrated: Always; the message says how to get what can answer.
        """
        raise intervals.refuse()

    @accepts_arrays
    def jsd(
        self, *args: Any, kind: str | None = None, estimator: str = "auto", draws: int | None = None, **kwargs: Any
    ) -> Tensor:
        """How much draws of the network disagree about the class, (batch,): between 0 and log C, high is unfamiliar.

        The Jensen–Shannon divergence of `favour.scores.jsd`, which knows the belief only. That is Gaussian, and where
        dropout is strong the logits are not: confident inputs then keep their class in draws in which a Gaussian
        of the same variance would change it.

        Args:
            args, kwargs: The model's.
            kind: `"softmax"`, or `"binary"` for one logit.
            estimator: `"head"` (fixed draws of the last layers), `"nodes"` or `"lemma"` (see `favour.scores.jsd`). By
                default the head, with as many draws as two forward passes or 2²⁴ multiplications for each input afford,
                160 to 2,560; `"nodes"` where that is less than 160, or there is no head.
            draws: At least so many draws of the head instead.

        Raises:
            UnsupportedOperation: The model returns probabilities that are no softmax of logits in its graph.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
            >>> favour.compile(model, torch.randn(2, 4)).jsd(torch.randn(5, 4)).shape
            torch.Size([5])
        """
        if not torch.compiler.is_compiling():
            self.follow()
        return classes.divergence(self, args, kwargs, kind, estimator, draws)

    @accepts_arrays
    def draws(self, *args: Any, n: int | None = None, **kwargs: Any) -> Tensor:
        """Draws of the logits from the last layers, (n, batch, C), fixed for an input: see `favour.classify.head`.

        `favour.scores` takes them like samples: `scores.jsd(predict.draws(x))` keeps what a Gaussian loses.

        Args:
            args, kwargs: The model's.
            n: At least so many; by default what `probabilities` takes.

        Raises:
            UnsupportedOperation: The network has no head, as `favour.classify.head` defines it.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
            >>> favour.compile(model, torch.randn(2, 4)).draws(torch.randn(5, 4), n=960).shape
            torch.Size([960, 5, 3])
        """
        return classes.draws(self, args, kwargs, n)

    @accepts_arrays
    def attribute(self, *args: Any, **kwargs: Any) -> Any:
        """How much of each output's variance comes from which dropout, parameter or nonlinearity.

        Returns:
            An `Attribution` for each output, in the structure of the model's output.
        """
        leaves = self._leaves(args, kwargs)
        self.follow()
        check_inputs(self.graph, leaves)
        posterior = self.posterior()
        bound, method = self._bound(leaves, posterior)
        parts = (method if isinstance(method, ReverseSweep) else Adjoint()).parts(bound)
        outputs = [Attribution.of(mean, grams) if isinstance(mean, Tensor) else mean for mean, grams in parts]
        return pytree.tree_unflatten(outputs, self.graph.out_spec)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Operation by operation, by which rule uncertainty went through, how exactly, and what was left out and why.

        Args:
            args, kwargs: The model's, to see variances before and after each operation; without any, the rest is told.

        Returns:
            An `Explanation`; print it.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
            >>> [o.exactness for o in favour.compile(model, torch.randn(4, 3)).explain().operations]
            ['exact', 'moment-matched', 'exact']
        """
        leaves = self._leaves(args, kwargs) if args or kwargs else stand_in(self.graph, self._sizes)
        self.follow()
        check_inputs(self.graph, leaves)
        bound, method = self._bound(leaves, self.posterior())
        return explanation(bound, method, bool(args or kwargs))

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
        """Predict a loader's batches, in order, loading and copying while computing (see `favour.predictor.streaming`).

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
        from favour.predictor.streaming import stream

        return stream(self, loader, device, results, inputs, compiled, prefetch, progress)

    def _predict(self, leaves: list[Any], posterior: Posterior) -> list[Any]:
        bound, method = self._bound(leaves, posterior)
        return method.run(bound)

    def _bound(self, leaves: list[Any], posterior: Posterior) -> tuple[Bound, Method]:
        """All that the method for these inputs needs, and the method."""
        leaf, sources = self._values(leaves, posterior)
        names = frozenset(name for name, _ in sources)
        plan = self._plan(names, posterior)
        values = dict(leaf)
        if posterior.names:
            attach(values, self.graph, plan, posterior)
        numerics, ctx = self.numerics, self._context()
        bound = Bound(plan, plan.bind(values), sources, ctx, numerics, self._starts, self.graph, leaf, posterior)
        if not plan.row_wise and not torch.compiler.is_compiling():
            plan.row_wise = check_rows(plan, bound.values, ctx)
        return bound, self._methods[names]

    def _context(self) -> Context:
        short = torch.bfloat16 if self.numerics.precision == "bf16" else None
        tf32 = self.numerics.precision == "tf32"
        return Context(activation=self.numerics.activation, short=short, tf32=tf32, cache=self._cached)

    def prepare(self, uncertain: Iterable[frozenset[str]] = ()) -> None:
        """Make the plans for plain and for these uncertain inputs: `torch.compile`, the next caller maybe, cannot."""
        for names in {frozenset[str](), *uncertain}:
            self._plan(names, self.posterior())
        find_head(self)
        if classes.ending_of(self).logits is not None:
            classes.classifier(self)

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
        return leaves_of(self.graph, self._keywords, args, kwargs)

    def _values(self, leaves: list[Any], posterior: Posterior) -> tuple[dict[str, Any], list[tuple[str, Value]]]:
        return graph_values(self.graph, self.store, leaves, posterior)

    def _plan(self, uncertain: frozenset[str], posterior: Posterior) -> Plan:
        if uncertain not in self._plans:
            self._plans[uncertain] = make_plan(self.graph, uncertain, posterior)
            self._plans[uncertain].sizes = dict(self._sizes)
            self._methods[uncertain] = self.asked.choose(self._plans[uncertain])
        return self._plans[uncertain]

    def _cached(self, step: str, name: str, tensor: Tensor, function: Any, costly: bool) -> Any:
        """`function(tensor)`, kept per step until the tensor changes; see `Context.cached`."""
        key = (step, name)
        if torch.compiler.is_compiling():
            # Versions cannot be read here. Cheap values are recomputed in the graph; a decomposition is taken
            # from the last eager call.
            kept = self._cache.get(key)
            return kept.value if kept is not None and costly else function(tensor)
        return kept_value(self._cache, key, tensor, function) if can_keep(tensor) else function(tensor)

    # ----------------------------------------------------------------- sampling

    @accepts_arrays
    def sample(self, *args: Any, n: int, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        """Draw n outputs of the network itself (not of the belief), (n, batch, *event)."""
        leaves = self._leaves(args, kwargs)
        self.follow()
        check_inputs(self.graph, leaves)
        if any(isinstance(leaf, Belief) for leaf in leaves):
            raise InvalidType("sampling takes plain tensors; draw from the input belief first.")
        posterior = self.posterior()
        values, _ = self._values(leaves, posterior)
        if self._sampler is None:
            self._sampler = Sampler(self.graph, posterior.names)
        with torch.no_grad():
            bound = {node: values[node.name] for node in self.graph.nodes if node.kind != "call"}
            drawn = self._sampler(bound, n, posterior, generator, self.numerics.memory)
        return pytree.tree_unflatten(drawn, self.graph.out_spec)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole predictor: graph, tensors, posterior and settings. No code is pickled; see `favour.load`.

        The file carries a checksum, and takes the place of an earlier one in one step, also where several processes
        save to one path.
        """
        from favour.saving import save

        save(self, path)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol == 2:  # torch.save's own, which pickle itself has not used since Python 3.0
            warnings.warn(
                "torch.save writes a pickle, which `torch.load` refuses by default and which can hold code; "
                "`predict.save(path)` and `favour.load(path)` keep the whole predictor without.",
                PickledPredictor,
                stacklevel=4,
            )
        return self.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, `torch.save` and other processes: the bytes of a saved file, without the model and its code."""
        from favour.saving import from_bytes, to_bytes

        return from_bytes, (to_bytes(self), str(self.device)), {"checked": self.checked, "training": self.training}

    def __deepcopy__(self, memo: dict[int, Any]) -> Predictor:
        """A predictor of a copy of the model: the copy that belongs to it, where both are copied together."""
        for spec in (self.graph.in_spec, self.graph.out_spec):
            memo[id(spec)] = spec  # never changed, and torch's copy of one warns
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def _joined(parts: tuple[Any, ...]) -> Any:
    """One output of several slices of a batch."""
    if isinstance(parts[0], Belief):
        return Belief.cat(parts)
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]
