"""Monte Carlo, done as well as it can be: the baseline every other method is measured against, and a method itself.

With draws y_1 … y_n the belief has their mean ȳ and the covariance Σ_k (y_k − ȳ)(y_k − ȳ)ᵀ/(n − 1): a matrix where the
output is small, n columns where it is large. The same input in the same batch gets the same draws, by the seed.

The part of the network that no draw touches is run once. The rest is run for many draws at a time,
vectorised over a leading draw axis, in chunks that fit a memory budget. Each draw of a parameter is one
draw for the whole batch, as in training; dropout masks are drawn per input.

Dropout masks need one random number per entry, and drawing them is what a naive sampler spends its time on.
On a CPU they are made from 16-bit words of numpy's SFC64 generator, which is several times cheaper than
torch's uniform floats; a rate is thereby rounded to a multiple of 2⁻¹⁶. Where that would change p or q = 1
− p by more than a relative 10⁻⁴, under the error of 10⁶ samples, 32-bit words are used. The scale is that
of the rounded rate, so that means are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.covariance import Covariance, Dense, DiagonalPlusFactor
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation
from favour.graph.interpreter import call, interpret
from favour.graph.node import Graph, Node, draws_numbers, replace_nodes
from favour.graph.sizes import bound_sizes, size_of
from favour.graph.tracing import traced
from favour.methods.cost import output_entries, uncertain_share
from favour.methods.method import Bound, Method, Numerics, belief_of, check_whole, register
from favour.passes.marking import mark_uncertain
from favour.passes.plan.steps import Plan
from favour.posterior import Posterior
from favour.surrogate import flat
from favour.surrogate.value import Value, mean_of

# Bytes of activations in one chunk of draws: large enough to amortise calls, small enough for caches.
DEFAULT_MEMORY = 64 * 2**20

# Entries of a mask for one draw, up to which masks are balanced where that is asked.
BALANCED = 4096


@register
@dataclass(frozen=True, eq=False, repr=False)
class Sampling(Method):
    """Draws of the network. Cannot be compiled or exported: it makes random numbers.

    Args:
        n: Number of draws.
    """

    name = "sampling"
    fixed = False

    n: int = 200

    def run(self, bound: Bound) -> list[Any]:
        results = []
        for planned, drawn in zip(bound.plan.outputs, drawn_outputs(bound, self.n), strict=True):
            certain = not isinstance(planned, Node) or planned not in bound.plan.uncertain
            if isinstance(drawn, Tensor) and isinstance(planned, Node) and planned.shape is not None:
                results.append(belief_of(drawn[0]) if certain else empirical(drawn))
            else:
                results.append(drawn)
        return results

    def draws(self, bound: Bound, n: int | None) -> Tensor | None:
        return drawn_outputs(bound, self.n if n is None else max(n, 2))[0]

    def cost(self, plan: Plan) -> float:
        return 1 - uncertain_share(plan) + self.n * uncertain_share(plan)

    def memory(self, plan: Plan) -> int:
        return super().memory(plan) + self.n * output_entries(plan)

    def unchecked(self) -> str:
        return "its beliefs are samples themselves"

    def held(self) -> str:
        return f"{self.n} draws of the network; nothing is approximated, and nothing is exact."

    def untried(self) -> str:
        return f"more draws, favour.methods.Sampling(n={10 * self.n})"

    def validate(self, numerics: Numerics) -> None:
        check_whole("n", self.n, 2)


def drawn_outputs(bound: Bound, n: int, *, alike: bool = False) -> list[Any]:
    """n draws of every output of a call, by its seed; `alike`: with the same masks for every input of the batch."""
    if traced():
        name = "pooled" if alike else "sampling"
        raise UnsupportedOperation(
            f"method={name!r} makes random numbers and is not compiled; call it eagerly, or take method='dplr'."
        )
    leaves = {node: bound.leaves[node.name] for node in bound.graph.nodes if node.kind != "call"}
    device = next((v.device for v in map(mean_of, leaves.values()) if isinstance(v, Tensor)), None)
    generator = torch.Generator(device=device or "cpu").manual_seed(bound.numerics.seed)
    batch = bound.plan.batch if alike else None
    sampler = Sampler(bound.graph, bound.posterior.names, [name for name, _ in bound.sources], batch)
    return sampler(leaves, n, bound.posterior, generator, bound.numerics.memory)


def empirical(draws: Tensor) -> Belief:
    """Mean and covariance of draws (n, batch, *event)."""
    n, event = draws.shape[0], tuple(draws.shape[2:])
    mean = draws.mean(0)
    columns = (draws - mean) / (n - 1) ** 0.5
    rows = flat(columns)  # (n, batch, entries)
    covariance: Covariance
    if rows.shape[-1] <= n:
        covariance = Dense(torch.einsum("nbi,nbj->bij", rows, rows), event)
    else:
        covariance = DiagonalPlusFactor(torch.zeros_like(mean), columns)
    return Belief(mean, covariance=covariance, validate=False)


class Sampler:
    """Draws outputs of a captured network.

    Args:
        graph: The captured network, dropout overrides applied.
        posterior_names: Parameters with a posterior, by the graph's names.
        inputs: Names of the inputs that are uncertain.
        batch: Size of a first dimension along which masks are the same, so that what is drawn for an input does not
            depend on the others, and balanced (`MaskSource`); None draws them for each input and draw.
    """

    def __init__(
        self,
        graph: Graph,
        posterior_names: tuple[str, ...],
        inputs: Collection[str] = (),
        batch: int | str | None = None,
    ) -> None:
        self.graph, self.batch = graph, batch
        uncertain = mark_uncertain(graph, inputs, posterior_names)
        late: set[Node] = set(uncertain)
        for node in graph.nodes:  # whatever reads an uncertain node, its shape included, runs with the draws
            if node.kind == "call" and any(s in late for s in node.inputs):
                late.add(node)
        calls = graph.calls
        self.prologue = [n for n in calls if n not in late]
        self.tail = [n for n in calls if n in late]
        self.dropouts = [n for n in self.tail if n.draw is not None]
        unknown = [n for n in calls if draws_numbers(n)]
        if unknown:
            places = "; ".join(f"`{n.target}` at {n.place}" for n in unknown)
            raise UnsupportedOperation(f"the sampler does not know how to draw: {places}.")
        self.weights = [n for n in uncertain if n.kind in ("parameter", "buffer")]
        self.inputs = [n for n in uncertain if n.kind == "input"]
        self.leaves = [*self.weights, *self.inputs]  # that are drawn

    def __call__(
        self,
        values: dict[Node, Any],
        n: int,
        posterior: Posterior,
        generator: torch.Generator | None = None,
        memory: int | None = None,
        seen: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> list[Any]:
        """Draw n times.

        Args:
            values: Tensors of inputs, parameters, buffers and constants by node; of uncertain inputs `Value`.
            n: Number of draws.
            posterior: Where parameters with a posterior are drawn from.
            generator: Source of randomness; torch's global one by default.
            memory: Budget in bytes for the activations of one chunk.
            seen: Called with what each chunk drew, (count, …) by the node's name: masks, parameters and inputs.

        Returns:
            One entry per output of the graph, tensors of shape (n, *output shape).
        """
        check_count(n)
        values = interpret(self.prologue, dict(values), call)
        sizes = self._bind(values)
        random = MaskSource(generator, self._device(values), balanced=self.batch is not None)
        per_draw = sum(int(np.prod([size_of(s, sizes) for s in node.shape or ()])) for node in self.tail)
        per_draw += sum(mean_of(values[node]).numel() for node in self.leaves)
        width = next((v.element_size() for v in values.values() if isinstance(v, Tensor)), 4)
        chunk = max(1, min(n, (memory or DEFAULT_MEMORY) // max(1, per_draw * width)))
        pieces: list[list[Any]] = []
        # Those of all draws at once where the size of a chunk, which the batch decides, should not matter.
        whole = None if self.batch is None else [self._mask(d, values, sizes, n, random) for d in self.dropouts]
        for first in range(0, n, chunk):
            count = min(chunk, n - first)
            if whole is None:
                masks = [self._mask(node, values, sizes, count, random) for node in self.dropouts]
            else:
                masks = [mask[first : first + count] for mask in whole]
            leaves = self._weights(values, count, posterior, random.generator)
            leaves += [_drawn_input(values[node], count, random) for node in self.inputs]
            if seen is not None:
                drawn = [*zip(self.dropouts, masks, strict=True), *zip(self.leaves, leaves, strict=True)]
                seen({node.name: tensor for node, tensor in drawn})
            pieces.append(self._run(values, masks, leaves, count))
        return [self._joined([piece[i] for piece in pieces], n, values, o) for i, o in enumerate(self.graph.outputs)]

    def _run(self, values: dict[Node, Any], masks: list[Tensor], leaves: list[Tensor], count: int) -> list[Any]:
        outputs = dict.fromkeys(o for o in self.graph.outputs if isinstance(o, Node) and o not in values)
        late = [o for o in outputs if o.shape is not None] + [n for n in self.leaves if n in self.graph.outputs]
        known = dict(values)  # also sizes, which are no tensors and the same in every draw

        def once(drawn_masks: list[Tensor], drawn_leaves: list[Tensor]) -> list[Tensor]:
            mask = dict(zip(self.dropouts, drawn_masks, strict=True))

            def drawn(node: Node, env: Mapping[Node, Any]) -> Any:
                if node.draw is None:
                    return call(node, env)
                return node.draw.apply(env[node.args[0]], mask[node], replace_nodes(node.rate, env.__getitem__))

            env = interpret(self.tail, values | dict(zip(self.leaves, drawn_leaves, strict=True)), drawn)
            known.update((o, env[o]) for o in outputs if o.shape is None)
            return [env[o] for o in late]

        if late:
            known.update(zip(late, torch.func.vmap(once)(masks, leaves), strict=True))
        return [known[o] if isinstance(o, Node) else o for o in self.graph.outputs]

    def _joined(self, pieces: list[Any], n: int, values: Mapping[Node, Any], output: Any) -> Any:
        if not isinstance(output, Node) or not isinstance(pieces[0], Tensor):
            return pieces[0]
        if output in values and output not in self.leaves:  # the same in every draw
            return pieces[0].expand(n, *pieces[0].shape)
        return torch.cat(pieces)

    def _bind(self, values: Mapping[Node, Any]) -> dict[str, int]:
        """Symbolic sizes and their values in this call; some follow from values (`nonzero`), which are known here."""
        sizes = bound_sizes(
            self.graph, [None if n is None else getattr(values[n], "shape", None) for n in self.graph.inputs]
        )
        for node in self.prologue:
            if isinstance(values.get(node), Tensor):
                sizes |= {s: k for s, k in zip(node.shape or (), values[node].shape, strict=True) if isinstance(s, str)}
        return sizes

    def _device(self, values: Mapping[Node, Any]) -> torch.device:
        means = (mean_of(values[n]) for n in self.graph.inputs if n is not None)
        return next(v.device for v in means if isinstance(v, Tensor))

    def _mask(
        self, node: Node, values: Mapping[Node, Any], sizes: Mapping[str, int], count: int, random: MaskSource
    ) -> Tensor:
        assert node.shape is not None and node.dtype is not None
        draw, p = node.draw, node.rate
        assert draw is not None
        shape = tuple(size_of(s, sizes) for s in node.shape)
        if node.shape[0] == self.batch:
            shape = (1, *shape[1:])
        p = values[p] if isinstance(p, Node) else p
        draw.check_shape(p, shape, node.place)
        return draw.sample(random, (count, *draw.shape(shape)), p, node.dtype)

    def _weights(
        self, values: Mapping[Node, Any], count: int, posterior: Posterior, generator: torch.Generator | None
    ) -> list[Tensor]:
        if not self.weights:
            return []
        parameters = {str(n.target): values[n] for n in self.graph.nodes if n.kind in ("parameter", "buffer")}
        drawn = posterior.sample(parameters, count, generator)
        return [drawn[str(n.target)] for n in self.weights]


class MaskSource:
    """Random numbers for `favour.Draw`, and scaled dropout masks: 0 with probability p, 1/(1 − p) otherwise.

    `balanced`: a mask of few entries, such as one for each channel, falls in ⌊np⌋ or ⌈np⌉ of n draws, chosen at random:
    means come out nearly as they are, and variances have less noise. For many entries that is not worth its time.
    """

    def __init__(self, generator: torch.Generator | None, device: torch.device, balanced: bool = False) -> None:
        self.device = device
        self.generator = generator
        self.balanced = balanced
        if device.type == "cpu":
            seed = torch.randint(0, 2**63 - 1, (), generator=generator)
            self.words = np.random.Generator(np.random.SFC64(int(seed)))

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self.generator)

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers uniform in [0, 1)."""
        return torch.rand(shape, dtype=dtype, device=self.device, generator=self.generator)

    def scaled_mask(self, shape: tuple[int, ...], p: float | Tensor, dtype: torch.dtype) -> Tensor:
        if self.balanced and int(np.prod(shape[1:])) <= BALANCED:
            return self._balanced_mask(shape, p).to(dtype)
        if self.device.type != "cpu":
            uniform = torch.rand(shape, device=self.device, generator=self.generator)
            return ((uniform < 1 - p) / (1 - p)).to(dtype)
        rate = torch.as_tensor(p, dtype=torch.float64)
        bits = 16 if bool((_rounding(rate, 16) <= 1e-4 * torch.minimum(rate, 1 - rate)).all()) else 32
        dropped = (rate * 2**bits).round().clamp(max=2**bits - 1)  # how many of the 2^bits words drop an entry
        word = np.int16 if bits == 16 else np.int32
        drawn = np.frombuffer(self.words.bytes(bits // 8 * int(np.prod(shape))), dtype=word)
        threshold = (dropped - 2 ** (bits - 1)).to(torch.int32)  # words are uniform on −2^(bits − 1) … 2^(bits − 1) − 1
        kept = torch.from_numpy(drawn.copy()).reshape(shape) >= (threshold if threshold.ndim else int(threshold))
        scale = 1 / (1 - dropped * 2.0**-bits)
        return kept.to(dtype).mul_(scale.to(dtype) if scale.ndim else float(scale))

    def _balanced_mask(self, shape: tuple[int, ...], p: float | Tensor) -> Tensor:
        rate = torch.as_tensor(p, dtype=torch.float32, device=self.device)
        uniform = torch.rand((shape[0] + 1, *shape[1:]), device=self.device, generator=self.generator)
        falls = (shape[0] * rate + uniform[0]).floor()
        return (uniform[1:].argsort(0).argsort(0) >= falls) / (1 - rate)


def _drawn_input(value: Value, count: int, random: MaskSource) -> Tensor:
    """Draws of an uncertain input, (count, *shape)."""
    mean = value.mean
    drawn = mean.expand(count, *mean.shape)
    if value.diag is not None:
        drawn = drawn + value.diag.clamp_min(0).sqrt() * random.normal((count, *mean.shape), mean.dtype)
    if value.factor is not None:
        z = random.normal((count, *value.factor.shape[:2]), mean.dtype)
        drawn = drawn + torch.einsum("nkb,kb...->nb...", z, value.factor)
    return drawn


def _rounding(rate: Tensor, bits: int) -> Tensor:
    """How far a rate is from a multiple of 2^−bits."""
    return ((rate * 2**bits).round() * 2.0**-bits - rate).abs()


def check_count(n: Any) -> None:
    """Raise unless n is a number of draws."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise InvalidType(f"`n` is {n!r}; the number of draws is a whole number.")
    if n < 1:
        raise InvalidValue(f"`n` is {n}; draw at least one sample.")
