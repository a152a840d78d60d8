"""A `Propagator`: a program as a module, called like the model, that answers with beliefs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.joint import Joint
from favour.belief.refined import Refined
from favour.errors import computing
from favour.graph.node import Graph, Node
from favour.graph.tracing import traced
from favour.methods.method import Method, Numerics
from favour.passes.plan.steps import Plan
from favour.posterior import Posterior
from favour.program import across
from favour.program.arguments import accepts_arrays
from favour.program.program import Program
from favour.program.refine import refine

__all__ = ["Propagator"]


class Propagator(nn.Module):
    """What a network and its noise answer: beliefs over its outputs, over all outputs or inputs at once, and draws.

    What people do with a belief is asked of `favour.Predictor`, which derives from this.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.store = program.store  # here too, so that torch finds the tensors
        self.file: str | None = None  # that it was loaded from

    @property
    def graph(self) -> Graph:
        """The network as captured, dropout overrides applied."""
        return self.program.graph

    @property
    def numerics(self) -> Numerics:
        """How any method computes here."""
        return self.program.numerics

    @property
    def asked(self) -> Method:
        """The method asked for."""
        return self.program.asked

    @property
    def method(self) -> Method:
        """The method that answers plain inputs: the one asked for, or what `auto` chose."""
        return self.program.plan()[1]

    @property
    def plain_plan(self) -> Plan:
        """The steps for inputs that are no beliefs."""
        return self.program.plan()[0]

    @property
    def is_certain(self) -> bool:
        """Whether no noise reaches an output for plain inputs."""
        plan = self.plain_plan
        return not any(isinstance(o, Node) and o in plan.uncertain for o in plan.outputs)

    @property
    def device(self) -> torch.device:
        """Where the predictor's tensors are; the CPU if it has none."""
        return next((t.device for _, t in self.store.named_tensors()), torch.device("cpu"))

    def posterior(self) -> Posterior:
        """The posterior in force: the one given, and what the model's own Bayesian layers say now."""
        return self.program.posterior()

    def follow(self) -> None:
        """Take over what changed in the model since the last call; every eager prediction begins with this.

        Raises:
            InvalidValue: A parameter holds NaN or infinity.
            StalePredictor: Rates, modules or hooks were changed, and with them what the model computes.
        """
        self.program.follow()

    def refresh(self) -> None:
        """Take over the model as it is now, whatever was changed and however.

        Everything derived from weights is forgotten and the model is captured again, which takes as long as
        `favour.compile`. Needed after changes of rates, modules or hooks, which a predictor refuses to predict with;
        after changes that no attribute of a module shows, such as a global; and after writes through `.data` or a numpy
        view to a few entries of a large tensor, which are not always noticed. A predictor inside `torch.compile` reads
        tensors in place, and needs this after `load_state_dict(assign=True)` too.
        """
        self.program.refresh()
        self.prepare()

    def prepare(self) -> None:
        """Make what is made once, for plain inputs: `torch.compile`, the next caller maybe, cannot."""
        self.program.plan()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Propagator:
        """`.to` and friends."""
        if self.program.move(fn):
            self.prepare()
        return self

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Belief:
            """As of a model with one output; of several, beliefs come in their structure."""

    @accepts_arrays
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; the arguments are the model's, and any tensor among them may be a `Belief`."""
        if self.file is None or traced():
            return self._answer(args, kwargs)
        with computing(self.file):
            return self._answer(args, kwargs)

    def _answer(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        beliefs = self.program.run(self.program.inputs(args, kwargs))
        self.answered(args, kwargs, beliefs)
        return pytree.tree_unflatten(beliefs, self.graph.out_spec)

    def answered(self, args: tuple, kwargs: dict[str, Any], beliefs: list[Any]) -> None:
        """Called with what was found for a call; for those who derive."""

    @accepts_arrays
    def joint_outputs(self, *args: Any, **kwargs: Any) -> Joint:
        """One belief over all outputs of the model, with the covariance between them.

        Returns:
            A `Joint`: joint draws, densities and cross-covariances, in the structure of the model's output. Its
            marginals are what calling the predictor gives (with `dplr`, up to what compression leaves out).
            `directions` do not apply.
        """
        return across.joint_outputs(self.program, args, kwargs)

    @accepts_arrays
    def joint(self, *args: Any, group: int | None = None, masks: str = "shared", **kwargs: Any) -> Any:
        """One belief over the outputs at all inputs, which meet the same network (see `favour.program.across`).

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
        return across.joint(self.program, args, kwargs, group, masks)

    @accepts_arrays
    def sample(self, *args: Any, n: int, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        """Draw n outputs of the network itself (not of the belief), (n, batch, *event)."""
        drawn = self.program.sample(self.program.inputs(args, kwargs), n, generator)
        return pytree.tree_unflatten(drawn, self.graph.out_spec)

    def refine(
        self,
        x: Any,
        n: int,
        *,
        generator: torch.Generator | None = None,
        combine: bool = False,
        output: int | None = None,
    ) -> Refined:
        """The belief corrected by n draws of the network, whose linear part in the belief is taken off as known.

        Without bias, whatever the belief got wrong, and with standard errors; for a small MLP the mean is as good as
        with some 70 times as many plain samples (see `favour.belief.refined`).

        Args:
            x: Inputs as for `favour.compile`: a tensor, a tuple of arguments or a dict of keyword arguments, any of
                them a `Belief`.
            n: Number of draws, at least 2.
            generator: Makes the draws reproducible; without one they follow torch's global seed.
            combine: Weigh the belief in by how well it and the correction are known: smaller errors, at the price of
                some bias.
            output: Which output, where the model has several (counted after flattening its structure).

        Returns:
            A `Refined`: mean, variances and covariances with their standard errors, the share of the variance that was
            left, the number of plain samples that this is worth. `.belief()` makes a `Belief` of it.

        Example:
            >>> import favour
            >>> model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 2))
            >>> better = favour.compile(model, torch.randn(4, 3)).refine(torch.randn(5, 3), n=100)
            >>> better.mean.shape, better.worth > 200
            (torch.Size([5, 2]), True)
        """
        return refine(self.program, x, n, generator, combine, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Propagator:
        """A predictor of a copy of the model: the copy that belongs to it, where both are copied together."""
        for spec in (self.graph.in_spec, self.graph.out_spec):
            memo[id(spec)] = spec  # never changed, and torch's copy of one warns
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin
