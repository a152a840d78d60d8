"""Monte Carlo, done as well as it can be: the baseline every other method is measured against.

The part of the network that no draw touches is run once. The rest is run for many draws at a time, vectorised over a leading
draw axis, in chunks that fit a memory budget. Each draw of a parameter is one draw for the whole batch, as in training;
dropout masks are drawn per input.

Dropout masks need one random number per entry, and drawing them is what a naive sampler spends its time on. On a CPU they are
made from 16-bit words of numpy's SFC64 generator, which is several times cheaper than torch's uniform floats; a rate is thereby
rounded to a multiple of 2⁻¹⁶ (a relative change of its variance p/q below 10⁻⁴ for p ≥ 0.1, under the error of 10⁶ samples).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from favour.errors import InvalidValue, UnsupportedOperation
from favour.graph import DROPOUTS, Graph, Node, nodes_in, replace_nodes
from favour.plan import mark_uncertain
from favour.posterior import Posterior

aten = torch.ops.aten

# Draws are run in chunks of about this many bytes of activations: large enough to amortise calls, small enough for caches.
DEFAULT_MEMORY = 64 * 2**20

_ELEMENTWISE_DROPOUT = {aten.dropout.default, torch.ops.favour.dropout.default}


class Sampler:
    """Draws outputs of a captured network.

    Args:
        graph: The captured network, dropout overrides applied.
        posterior: Gaussians over parameters, by the graph's names.
    """

    def __init__(self, graph: Graph, posterior_names: tuple[str, ...]) -> None:
        self.graph = graph
        uncertain = mark_uncertain(graph, (), posterior_names)
        late: set[Node] = set(uncertain)
        for node in graph.nodes:  # whatever reads an uncertain node, its shape included, runs with the draws
            if node.kind == "call" and any(s in late for s in node.inputs):
                late.add(node)
        calls = [n for n in graph.nodes if n.kind == "call"]
        self.prologue = [n for n in calls if n not in late]
        self.tail = [n for n in calls if n in late]
        self.dropouts = [n for n in self.tail if n.target in DROPOUTS]
        unknown = [n for n in self.dropouts if n.target not in _ELEMENTWISE_DROPOUT]
        unknown += [
            n
            for n in calls
            if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) and n.target not in DROPOUTS
        ]
        if unknown:
            places = "; ".join(f"`{n.target}` at {n.place}" for n in unknown)
            raise UnsupportedOperation(f"the sampler does not know how to draw: {places}.")
        self.weights = [n for n in uncertain if n.kind in ("parameter", "buffer")]

    def __call__(
        self,
        values: dict[Node, Any],
        n: int,
        posterior: Posterior,
        generator: torch.Generator | None = None,
        memory: int | None = None,
    ) -> list[Any]:
        """Draw n times.

        Args:
            values: Tensors of inputs, parameters, buffers and constants by node.
            n: Number of draws.
            posterior: Where parameters with a posterior are drawn from.
            generator: Source of randomness; torch's global one by default.
            memory: Budget in bytes for the activations of one chunk.

        Returns:
            One entry per output of the graph, tensors of shape (n, *output shape).
        """
        if n < 0:
            raise InvalidValue(f"`n` is {n}; the number of draws must not be negative.")
        values = dict(values)
        for node in self.prologue:
            values[node] = node.target(
                *replace_nodes(node.args, values.__getitem__), **replace_nodes(node.kwargs, values.__getitem__)
            )
        sizes = self._bind(values)
        random = MaskSource(generator, self._device(values))
        per_draw = sum(int(np.prod([_size(s, sizes) for s in node.shape or ()])) for node in self.tail)
        width = next((v.element_size() for v in values.values() if isinstance(v, Tensor)), 4)
        chunk = max(1, min(n, (memory or DEFAULT_MEMORY) // max(1, per_draw * width)))
        pieces: list[list[Any]] = []
        for first in range(0, n, chunk):
            count = min(chunk, n - first)
            masks = [self._mask(node, values, sizes, count, random) for node in self.dropouts]
            weights = self._weights(values, count, posterior, random.generator)
            pieces.append(self._run(values, masks, weights, count))
        return [self._joined([piece[i] for piece in pieces], n, values, o) for i, o in enumerate(self.graph.outputs)]

    def _run(self, values: dict[Node, Any], masks: list[Tensor], weights: list[Tensor], count: int) -> list[Any]:
        outputs = list(nodes_in(self.graph.outputs))
        late = [o for o in outputs if o in set(self.tail) or o in self.weights]

        def once(drawn_masks: list[Tensor], drawn_weights: list[Tensor]) -> list[Tensor]:
            env = dict(values)
            env.update(zip(self.weights, drawn_weights, strict=True))
            mask = dict(zip(self.dropouts, drawn_masks, strict=True))
            for node in self.tail:
                args = replace_nodes(node.args, env.__getitem__)
                if node in mask:
                    env[node] = args[0] * mask[node]
                else:
                    env[node] = node.target(*args, **replace_nodes(node.kwargs, env.__getitem__))
            return [env[o] for o in late]

        if not late:
            return [values[o] for o in outputs]
        drawn = dict(zip(late, torch.func.vmap(once)(masks, weights), strict=True))
        return [drawn.get(o, values.get(o)) if isinstance(o, Node) else o for o in self.graph.outputs]

    def _joined(self, pieces: list[Any], n: int, values: Mapping[Node, Any], output: Any) -> Any:
        if not isinstance(output, Node):
            return output
        if output not in set(self.tail):
            return values[output].expand(n, *values[output].shape)
        return torch.cat(pieces) if pieces else values[output]

    def _bind(self, values: Mapping[Node, Any]) -> dict[str, int]:
        """Symbolic sizes and their values in this call."""
        sizes: dict[str, int] = {}
        for node in self.graph.inputs:
            if node is not None and node.shape is not None:
                for symbol, size in zip(node.shape, values[node].shape, strict=True):
                    if isinstance(symbol, str):
                        sizes[symbol] = int(size)
        return sizes

    def _device(self, values: Mapping[Node, Any]) -> torch.device:
        return next(values[n].device for n in self.graph.inputs if n is not None)

    def _mask(
        self, node: Node, values: Mapping[Node, Any], sizes: Mapping[str, int], count: int, random: MaskSource
    ) -> Tensor:
        assert node.shape is not None and node.dtype is not None
        shape = (count, *[_size(s, sizes) for s in node.shape])
        p = node.args[1]
        p = values[p] if isinstance(p, Node) else p
        return random.scaled_mask(shape, p, node.dtype)

    def _weights(
        self, values: Mapping[Node, Any], count: int, posterior: Posterior, generator: torch.Generator | None
    ) -> list[Tensor]:
        if not self.weights:
            return []
        parameters = {str(n.target): values[n] for n in self.graph.nodes if n.kind in ("parameter", "buffer")}
        drawn = posterior.sample(parameters, count, generator)
        return [drawn[str(n.target)] for n in self.weights]


class MaskSource:
    """Scaled dropout masks: 0 with probability p, 1/(1 − p) otherwise."""

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self.device = device
        self.generator = generator
        if device.type == "cpu":
            seed = torch.randint(0, 2**63 - 1, (), generator=generator)
            self.words = np.random.Generator(np.random.SFC64(int(seed)))

    def scaled_mask(self, shape: tuple[int, ...], p: float | Tensor, dtype: torch.dtype) -> Tensor:
        keep = 1 - p
        if self.device.type != "cpu":
            uniform = torch.rand(shape, device=self.device, generator=self.generator)
            return ((uniform < keep) / keep).to(dtype)
        count = int(np.prod(shape))
        words = np.frombuffer(self.words.bytes(2 * count), dtype=np.int16).copy() if count else np.zeros(0, np.int16)
        drawn = torch.from_numpy(words).reshape(shape)  # uniform on −2¹⁵ … 2¹⁵ − 1
        if isinstance(p, Tensor):
            threshold = (p.double() * 2**16).round() - 2**15
            return (drawn >= threshold.to(torch.int32)).to(dtype) / keep.to(dtype)
        threshold = round(p * 2**16) - 2**15
        return (drawn >= threshold).to(dtype).mul_(1 / keep)


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    if size in sizes:
        return sizes[size]
    return int(sympy.sympify(size).subs(dict(sizes)))


DrawFunction = Callable[..., Any]
