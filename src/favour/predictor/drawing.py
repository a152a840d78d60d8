"""What a predictor says of draws of its network: `sample`, `draws` and `refine`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.refined import Refined, refined, together
from favour.classify import classes
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation
from favour.graph.capture import split_example
from favour.graph.node import Graph
from favour.methods.control import control_of
from favour.methods.sampling import Sampler, check_count
from favour.predictor.arguments import accepts_arrays
from favour.predictor.program import Program

# Outputs of one input, up to which covectors go back and whole covariances are kept.
MOST_OUTPUTS = 512

_HELD = 2**23  # draws times outputs held at once


class Drawing(nn.Module):
    """Half a `Predictor`."""

    program: Program

    @property
    def graph(self) -> Graph:
        """The network as captured, dropout overrides applied."""
        return self.program.graph

    @accepts_arrays
    def sample(self, *args: Any, n: int, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        """Draw n outputs of the network itself (not of the belief), (n, batch, *event)."""
        drawn = self.program.sample(self.program.inputs(args, kwargs), n, generator)
        return pytree.tree_unflatten(drawn, self.graph.out_spec)

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
        return classes.draws(self, args, kwargs, n)  # type: ignore[arg-type]

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
        check_count(n)
        if n < 2:
            raise InvalidValue(f"`n` is {n}; a covariance and a standard error take at least two draws.")
        args, kwargs = ((x,), {}) if isinstance(x, Belief) else split_example(x)
        program = self.program
        leaves = program.inputs(args, kwargs)
        if program.rows(leaves) == 0:
            raise InvalidValue("`x` is an empty batch; there is nothing to refine.")
        with torch.no_grad():
            place = self._output(output)
            parts = [self._refined(part, n, generator, combine, place) for part in self._slices(leaves, n, place)]
        return together(parts)

    def _output(self, output: int | None) -> int:
        shapes = {i: o for i, o in enumerate(self.graph.outputs) if getattr(o, "shape", None) is not None}
        real = [i for i, o in shapes.items() if o.dtype is not None and o.dtype.is_floating_point]
        if output is None and len(real) != 1:
            raise InvalidValue(f"the model has {len(real)} outputs; choose one with `output`, out of {real}.")
        place = real[0] if output is None else output
        if place not in real:
            raise InvalidValue(f"`output` is {output}; the model's outputs with a belief are {real}.")
        return place

    def _slices(self, leaves: list[Any], n: int, place: int) -> list[list[Any]]:
        program = self.program
        posterior, batched = program.posterior(), program.batched()
        plan, _ = program.plan()
        plan.sizes = program.sizes_besides_batch(leaves)
        outputs = plan.entries(self.graph.outputs[place].shape)
        if outputs > MOST_OUTPUTS:
            raise UnsupportedOperation(
                f"`refine` follows the covariance of all outputs of an input, {outputs} here and at most "
                f"{MOST_OUTPUTS}. Refine a model that returns fewer (the pixels or averages that matter), or take "
                "`predict.sample`."
            )
        rows = max(1, _HELD // (n * max(outputs, 1)))
        found = []
        for part in program.slices(leaves, posterior):
            size = program.rows(part) or 1
            for i in range(0, max(size, 1), rows):
                cut = slice(i, i + rows)
                found.append([leaf[cut] if b and size > rows else leaf for leaf, b in zip(part, batched, strict=True)])
        return found

    def _refined(
        self, leaves: list[Any], n: int, generator: torch.Generator | None, combine: bool, place: int
    ) -> Refined:
        program = self.program
        posterior = program.posterior()
        bound, method = program.bind(leaves, posterior)
        analytic = method.run(bound)[place]
        if not isinstance(analytic, Belief):
            raise InvalidType(f"output {place} is a {type(analytic).__name__} and no belief.")
        bound, _ = program.bind(leaves, posterior)
        control, values = control_of(method, bound, place)
        lines: list[Tensor] = []

        def seen(drawn: dict[str, Tensor]) -> None:
            if control.sources:
                lines.append(control.at(drawn))

        sampler = Sampler(bound.graph, posterior.names, [name for name, _ in bound.sources])
        points = {node: values[node.name] for node in bound.graph.nodes if node.kind != "call"}
        draws = sampler(points, n, posterior, generator, program.numerics.memory, seen)[place]
        shape = control.covariance.shape[:2]
        line = torch.cat(lines) if lines else draws.new_zeros(n, *shape)
        return refined(draws, line, control.covariance, analytic, combine, control.missing)
