"""Several outputs of one network, together.

The outputs of a network are functions of the same draws, so they are correlated: the belief of a detector's box and of
its score, say. Written one behind the other as a single vector,

    y = (y₁, …, y_m),      Σ = [Cov(y_a, y_b)]_ab,

they are one output of a graph that ends in a concatenation, and every method gives its covariance as it does for any
other output. `Joint` holds that belief and the model's own structure of outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.covariance import Covariance, Dense, DiagonalPlusFactor
from favour.errors import InvalidType, InvalidValue, ShapeMismatch, UnknownName
from favour.graph.dynamic import key_name
from favour.graph.node import Graph, Node
from favour.graph.sizes import size_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Where an output lies among the entries of the joint belief.

    Attributes:
        name: Its path in the structure of outputs: `logits`, `1`, `heads.0`.
        leaf: Its place among the flattened outputs.
        start, size: Its entries.
        shape: Of one batch element.
    """

    name: str
    leaf: int
    start: int
    size: int
    shape: tuple[int, ...]


class Joint:
    """A belief over all floating-point outputs of a network at once. Made by `Predictor.joint_outputs`.

    Attributes:
        belief: Over the outputs written one behind the other, (batch, n₁ + … + n_m).
        parts: The outputs it is about, in order.

    Example:
        >>> import favour
        >>> from torch import nn
        >>> class Heads(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.drop, self.a, self.b = nn.Dropout(0.2), nn.Linear(3, 2), nn.Linear(3, 4)
        ...
        ...     def forward(self, x):
        ...         h = self.drop(x)
        ...         return {"a": self.a(h), "b": self.b(h)}
        >>> joint = favour.compile(Heads(), torch.randn(2, 3)).joint_outputs(torch.randn(5, 3))
        >>> joint.names, joint.cross_covariance("a", "b").shape
        (['a', 'b'], torch.Size([5, 2, 4]))
        >>> draws = joint.sample((100,))
        >>> draws["a"].shape, draws["b"].shape
        (torch.Size([100, 5, 2]), torch.Size([100, 5, 4]))
    """

    def __init__(self, belief: Belief, parts: Sequence[Part], others: Mapping[int, Any], spec: pytree.TreeSpec) -> None:
        self.belief, self.parts = belief, tuple(parts)
        self._others, self._spec = dict(others), spec

    @property
    def names(self) -> list[str]:
        """Of the outputs that take part."""
        return [part.name for part in self.parts]

    @property
    def outputs(self) -> Any:
        """A belief for each output on its own, in the structure of the model's output; the rest as it is."""
        return self._structured({part.leaf: self.marginal(part) for part in self.parts})

    def marginal(self, output: str | int | Part) -> Belief:
        """The belief over one output, (batch, *event)."""
        part = self._part(output)
        rows = slice(part.start, part.start + part.size)
        mean = self.belief.mean[:, rows].unflatten(1, part.shape) if part.shape else self.belief.mean[:, part.start]
        return Belief(mean, covariance=_marginal(self.belief.covariance, rows, mean), validate=False)

    def cross_covariance(self, a: str | int, b: str | int) -> Tensor:
        """Cov(a, b) between two outputs over their flattened events, (batch, n_a, n_b), by name or number."""
        first, second = self._part(a), self._part(b)
        rows, columns = (slice(p.start, p.start + p.size) for p in (first, second))
        covariance = self.belief.covariance
        if isinstance(covariance, DiagonalPlusFactor):
            # Σ_ab = U_a U_bᵀ off the diagonal: nothing of the size of the whole Σ is made.
            U = covariance.factor
            block = torch.einsum("kbi,kbj->bij", U[:, :, rows], U[:, :, columns])
            return block + torch.diag_embed(covariance.diag[:, rows]) if rows == columns else block
        return covariance.dense()[:, rows, columns]

    def sample(self, shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Any:
        """Draws of all outputs together, (*shape, batch, *event) each, in the structure of the model's output."""
        draws = self.belief.sample(shape, generator)
        return self._structured({part.leaf: self._cut(draws, part) for part in self.parts})

    def log_prob(self, outputs: Any) -> Tensor:
        """Joint log density, (batch,), of values in the structure of the model's output."""
        leaves, spec = pytree.tree_flatten(outputs)
        if spec != self._spec:
            expected = self._structured({part.leaf: torch.zeros(()) for part in self.parts})
            raise InvalidType(
                f"the outputs are {_described(expected)}, and `log_prob` was given {_described(outputs)}."
            )
        batch = self.belief.batch_size
        rows = []
        for part in self.parts:
            value = leaves[part.leaf]
            if tuple(value.shape) != (batch, *part.shape):
                raise ShapeMismatch(
                    f"output `{part.name}` has shape {(batch, *part.shape)}, and `log_prob` was given "
                    f"{tuple(value.shape)}."
                )
            rows.append(value.reshape(batch, part.size))
        return self.belief.log_prob(torch.cat(rows, 1))

    def _part(self, output: str | int | Part) -> Part:
        if isinstance(output, Part):
            return output
        if isinstance(output, int):
            if not -len(self.parts) <= output < len(self.parts):
                raise InvalidValue(f"there is no output {output}; there are {len(self.parts)}: {self.names}.")
            return self.parts[output]
        for part in self.parts:
            if part.name == output:
                return part
        raise UnknownName(f"no output is called {output!r}; there are {self.names}.")

    def _cut(self, values: Tensor, part: Part) -> Tensor:
        piece = values[..., part.start : part.start + part.size]
        return piece.unflatten(-1, part.shape) if part.shape else piece.squeeze(-1)

    def _structured(self, leaves: Mapping[int, Any]) -> Any:
        every = {**self._others, **leaves}
        return pytree.tree_unflatten([every[i] for i in range(self._spec.num_leaves)], self._spec)

    def __repr__(self) -> str:
        outputs = ", ".join(f"{p.name}: {p.shape}" for p in self.parts)
        return f"Joint({outputs}; {self.belief!r})"


def _described(value: Any) -> str:
    """What a nest of outputs is, for an error."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _marginal(covariance: Covariance, rows: slice, mean: Tensor) -> Covariance:
    if isinstance(covariance, DiagonalPlusFactor):
        U = covariance.factor[:, :, rows]
        return DiagonalPlusFactor(covariance.diag[:, rows].reshape(mean.shape), U.reshape(U.shape[0], *mean.shape))
    return Dense(covariance.dense()[:, rows, rows], mean.shape[1:])


def takes_part(output: Any, batch: int | str | None) -> bool:
    """Whether an output of a graph is a floating-point tensor with the batch in front."""
    if not isinstance(output, Node) or not output.shape or output.dtype is None:
        return False
    return output.dtype.is_floating_point and output.shape[0] == batch


def batch_symbol(graph: Graph) -> int | str | None:
    """The size of the inputs' first dimension."""
    return next((n.shape[0] for n in graph.inputs if n is not None and n.shape), None)


def concatenated(graph: Graph) -> Graph:
    """`graph` with one output for all that take part, written one behind the other, and then the others.

    Raises:
        InvalidValue: No output is a floating-point tensor with the batch in front.
    """
    batch = batch_symbol(graph)
    together = [o for o in graph.outputs if takes_part(o, batch)]
    if not together or batch is None:
        raise InvalidValue("the model has no floating-point output with the batch in front, so no joint belief.")
    dtype = together[0].dtype
    for output in together[1:]:
        dtype = torch.promote_types(dtype, output.dtype)
    nodes = list(graph.nodes)

    def call(target: Any, *args: Any, shape: tuple[int | str, ...], **kwargs: Any) -> Node:
        node = Node(f"joint_{len(nodes)}", "call", target, args, kwargs, shape, dtype)
        nodes.append(node)
        return node

    rows: list[Node] = []
    for output in together:
        if output.dtype != dtype:
            output = call(aten.to.dtype, output, dtype, shape=output.shape)
        event = output.shape[1:]
        if not event:
            output = call(aten.unsqueeze.default, output, 1, shape=(batch, 1))
        elif len(event) > 1:
            output = call(aten.flatten.using_ints, output, 1, shape=(batch, _product(event)))
        rows.append(output)
    whole = call(aten.cat.default, rows, 1, shape=(batch, _sum([row.shape[1] for row in rows if row.shape])))
    outputs = [whole, *[o for o in graph.outputs if not takes_part(o, batch)]]
    spec = pytree.tree_structure([0] * len(outputs))
    return replace(graph, nodes=nodes, outputs=outputs, out_spec=spec)


def _product(sizes: Sequence[int | str]) -> int | str:
    if all(isinstance(s, int) for s in sizes):
        return int(torch.Size(sizes).numel())  # type: ignore[arg-type]
    return "*".join(f"({s})" for s in sizes)


def _sum(sizes: Sequence[int | str]) -> int | str:
    return sum(sizes) if all(isinstance(s, int) for s in sizes) else " + ".join(f"({s})" for s in sizes)  # type: ignore[arg-type]


def split(graph: Graph, results: Sequence[Any], sizes: Mapping[str, int]) -> Joint:
    """The results of a `concatenated` graph in terms of the graph it was made from."""
    batch = batch_symbol(graph)
    indices = pytree.tree_unflatten(list(range(graph.out_spec.num_leaves)), graph.out_spec)
    names = {leaf: ".".join(key_name(k) for k in path) for path, leaf in pytree.tree_flatten_with_path(indices)[0]}
    parts: list[Part] = []
    others: dict[int, Any] = {}
    rest = iter(results[1:])
    start = 0
    for leaf, output in enumerate(graph.outputs):
        if not takes_part(output, batch):
            others[leaf] = next(rest)
            continue
        shape = tuple(size_of(s, sizes) for s in output.shape[1:])
        size = torch.Size(shape).numel()
        parts.append(Part(names[leaf] or "output", leaf, start, size, shape))
        start += size
    return Joint(results[0], parts, others, graph.out_spec)


def _unflatten(leaves: Any, context: Any) -> Joint:
    parts, kept, spec = context
    return Joint(leaves[0], parts, dict(zip(kept, leaves[1:], strict=True)), spec)


pytree.register_pytree_node(
    Joint,
    lambda j: ([j.belief, *j._others.values()], (j.parts, tuple(j._others), j._spec)),
    _unflatten,
    serialized_type_name="favour.Joint",
)
