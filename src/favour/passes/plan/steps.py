"""From a captured graph to the list of steps a method runs.

Everything that is not random (`favour.passes.marking`) is run as the model wrote it. A plan

1. applies dropout overrides and removes dropout that never drops,
2. rewrites the graph (`favour.passes.pipeline`),
3. looks up a rule for each uncertain node and reports all that are missing in one message (`checks`),
4. finds where the forward methods may compress: a step is *closed* when nothing uncertain but its own result
   is still to be read, neither a tensor nor a draw of a parameter that will be used again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from favour.errors import InvalidType, InvalidValue, ShapeMismatch, UnknownName
from favour.graph.node import Graph, Node, nodes_in, replace_nodes, with_argument
from favour.graph.sizes import entries
from favour.graph.traits import Argument
from favour.passes.marking import mark_uncertain
from favour.passes.normalise.commuting import rule_for
from favour.passes.normalise.derived import DerivedNode, final_reads
from favour.passes.normalise.fusion import FusedNode
from favour.passes.pipeline import prepare
from favour.passes.plan.checks import batch_of, check_rules, sizes_text
from favour.posterior import Posterior
from favour.rules.registry import Rule

aten = torch.ops.aten


@dataclass(eq=False)
class Step:
    """One node to run.

    Attributes:
        node: What to compute.
        rule: How, for an uncertain node; None runs the operation as it is.
        closed: Nothing uncertain but this result is still to be read.
        forked: The result is read by more than one operation.
        output: The result is (one of) the model's outputs.
        done: Nodes that nobody reads after this step.
        uses, mixed: Of a weight that is made of parameters, see `Weight`.
    """

    node: Node
    rule: Rule | None = None
    closed: bool = False
    forked: bool = False
    output: bool = False
    done: list[Node] = field(default_factory=list)
    uses: int = 1
    mixed: bool = False

    @property
    def uncertain(self) -> bool:
        """Whether the result is random, and a rule makes it."""
        return self.rule is not None or isinstance(self.node, FusedNode)


@dataclass(eq=False)
class Plan:
    """Steps for one combination of uncertain inputs."""

    steps: list[Step]
    outputs: list[Any]
    uncertain: set[Node]
    uses: dict[str, int]
    leaves: list[Node]
    sizes: dict[str, int] = field(default_factory=dict)  # symbolic ones besides the batch, for estimates
    correction: tuple[dict[str, int], float] | None = None  # measured memory over predicted, and at which sizes
    mixed: set[str] = field(default_factory=set)  # parameters read several times, in ways that differ; see `Weight`
    batch: int | str | None = None  # the size of dimension 0, as in the nodes' shapes
    row_wise: bool = False  # known to keep the inputs of a batch apart; see `favour.methods.rows`

    def entries(self, shape: tuple[int | str, ...] | None) -> int:
        """How many numbers a tensor holds per input; a symbolic size that is not known counts as 1."""
        return entries((shape or ())[1:], self.sizes)

    def __post_init__(self) -> None:
        # By step, what nobody reads after it.
        self.done = {s.node: [n for n in s.done if n is not s.node or not s.output] for s in self.steps}

    def bind(self, values: Mapping[str, Any]) -> dict[Node, Any]:
        """Values of inputs, parameters and constants by node, given them by name."""
        return {node: values[node.name] for node in self.leaves}


def configure(graph: Graph, dropout: Mapping[str, Any] | None) -> Graph:
    """A copy of `graph` with dropout rates replaced by module name, and dead dropout removed."""
    dropout = dict(dropout or {})
    known = graph.dropout_modules
    unknown = [name for name in dropout if name not in known]
    if unknown:
        raise UnknownName(
            f"`dropout` names {unknown}, where the model has no dropout. It has dropout in: "
            f"{known if known else 'no module'}."
        )
    for name, p in dropout.items():
        if isinstance(p, bool) or not isinstance(p, (int, float, torch.Tensor)):
            raise InvalidType(f"`dropout` gives `{name}` the rate {p!r}; a number or a tensor is needed.")
    copies: dict[Node, Node] = {}
    constants = dict(graph.constants)

    def copied(node: Node) -> Node:
        return copies[node]

    nodes: list[Node] = []
    for node in graph.nodes:
        args, kwargs = replace_nodes(node.args, copied), replace_nodes(node.kwargs, copied)
        if node.draw is not None:
            p = dropout.get(node.module, replace_nodes(node.rate, copied))
            live = node.live
            if not isinstance(p, Node):
                node.draw.check(p, f"`{node.module}`" if node.module in dropout else node.place)
            if not live and node.module in dropout and not (isinstance(p, (int, float)) and p == 0):
                raise InvalidValue(
                    f"`dropout` gives `{node.module}` a rate, and the dropout there is switched off whatever the "
                    "training flag: an adapter silenced it (pass it `keep_dropout=True`), or the code does."
                )
            if not live or (not isinstance(p, (Node, torch.Tensor)) and p == 0):
                copies[node] = args[0]
                continue
            if isinstance(p, torch.Tensor):
                p = _rate_node(p, node, constants)
                nodes.append(p)
            args, kwargs = with_argument(replace(node, args=args, kwargs=kwargs), node.draw.rate, p)
        new = Node(node.name, node.kind, node.target, args, kwargs, node.shape, node.dtype, node.module, node.where)
        copies[node] = new
        nodes.append(new)
    inputs = [None if n is None else copies[n] for n in graph.inputs]
    outputs = replace_nodes(graph.outputs, copied)
    result = replace(graph, nodes=nodes, inputs=inputs, outputs=outputs, constants=constants)
    result.prune()
    return result


def _rate_node(p: torch.Tensor, node: Node, constants: dict[str, torch.Tensor]) -> Node:
    """A constant of the graph, so that the rates move with the predictor and are saved with it."""
    event = node.shape[1:] if node.shape is not None else ()
    if p.ndim > len(event) or any(a not in (1, b) for a, b in zip(reversed(p.shape), reversed(event), strict=False)):
        raise ShapeMismatch(
            f"`dropout` gives `{node.module}` rates of shape {tuple(p.shape)}, which do not broadcast to "
            f"its event {sizes_text(event)}; give one number, or one for each neuron."
        )
    name = f"{node.name}_rate"
    constants[name] = p.detach().to(node.dtype)
    return Node(name, "constant", name, shape=tuple(p.shape), dtype=node.dtype)


def converted(graph: Graph, dtypes: Mapping[torch.dtype, torch.dtype]) -> Graph:
    """A copy of `graph` for tensors of other dtypes: what was made or converted in the code follows."""

    def new(value: Argument) -> Any:
        return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

    result = configure(graph, None)
    for node in result.nodes:
        node.dtype = new(node.dtype)
        node.args = tuple(new(a) for a in node.args)
        node.kwargs = {k: new(v) for k, v in node.kwargs.items()}
    return result


def truncate(graph: Graph, at: str) -> Graph:
    """The part of `graph` up to the output of module `at`."""
    inside = [n for n in graph.nodes if n.kind == "call" and (n.module == at or n.module.startswith(at + "."))]
    if not inside:
        modules = sorted({n.module for n in graph.nodes if n.module})
        raise UnknownName(f"`at` names {at!r}, which made no call in the captured model. Modules: {modules}.")
    last = inside[-1]
    result = replace(graph, outputs=[last], out_spec=torch.utils._pytree.tree_structure(0))
    result.prune()
    return result


def make_plan(graph: Graph, inputs: Collection[str], posterior: Posterior) -> Plan:
    """Plan a prediction in which the named inputs are beliefs.

    Raises:
        UnsupportedOperation: Names every operation without a rule, with module path and source line.
    """
    canonical = {graph.aliases.get(name, name) for name in posterior.names}
    graph = configure(graph, None)  # a private copy: fusion rewrites nodes

    def marked(graph: Graph) -> set[Node]:
        return mark_uncertain(graph, inputs, canonical)

    prepare(graph, marked)
    uncertain = marked(graph)
    check_rules(graph, uncertain)
    users = graph.users()
    reads = {name: final_reads(n, users) for name, n in _weights(uncertain)}
    uses = {name: len(pairs) for name, pairs in reads.items()}
    leaves = [n for n in graph.nodes if n.kind != "call"]
    mixed = {name for name, pairs in reads.items() if len(pairs) > 1 and _mixed(pairs)}
    steps = _steps(graph, uncertain, posterior, reads)
    for step in steps:
        if isinstance(step.node, DerivedNode):
            step.uses, step.mixed = uses[step.node.name], step.node.name in mixed
    return Plan(steps, graph.outputs, uncertain, uses, leaves, mixed=mixed, batch=batch_of(graph))


def _weights(uncertain: Collection[Node]) -> list[tuple[str, Node]]:
    """Uncertain parameters, and weights made of them, by name."""
    parameters = [(str(n.target), n) for n in uncertain if n.kind in ("parameter", "buffer")]
    return [*parameters, *[(n.name, n) for n in uncertain if isinstance(n, DerivedNode)]]


def _mixed(reads: Collection[tuple[Node, Node]]) -> bool:
    """Whether a parameter is read otherwise than by lookups alone, or by one operation on one vector per input."""
    if any(isinstance(weight, DerivedNode) for _, weight in reads):
        return True
    if all(user.target is aten.embedding.default for user, _ in reads):
        return False
    ways = {(user.target, len(s.shape or ())) for user, _ in reads for s in user.inputs[:1]}
    return len(ways) > 1 or any(dims != 2 for _, dims in ways)


def _steps(
    graph: Graph, uncertain: set[Node], posterior: Posterior, reads: Mapping[str, Collection[tuple[Node, Node]]]
) -> list[Step]:
    outputs = set(nodes_in(graph.outputs))
    last_read: dict[Node, int] = {}
    for i, node in enumerate(graph.nodes):
        for source in node.inputs:
            last_read[source] = i
    end = len(graph.nodes)
    for node in outputs:
        last_read[node] = end
    # Draws shared by all layers are alive from the first to the last layer that has them.
    carriers = [graph.aliases.get(name, name) for name in posterior.latents]
    spans: list[tuple[int, int]] = []
    places = {node: i for i, node in enumerate(graph.nodes)}
    by_name = {name: sorted(places[user] for user, _ in pairs) for name, pairs in reads.items()}
    touched = sorted(i for name in carriers for i in by_name.get(name, ()))
    if touched:
        spans.append((touched[0], touched[-1]))
    spans += [(indices[0], indices[-1]) for indices in by_name.values() if len(indices) > 1]

    users = graph.users()
    done: dict[int, list[Node]] = {}
    for node, i in last_read.items():
        done.setdefault(i, []).append(node)
    steps, alive = [], set()
    for i, node in enumerate(graph.nodes):
        if node.kind != "call" and node not in uncertain:
            continue
        random = node in uncertain and node.kind in ("call", "input") and not isinstance(node, DerivedNode)
        if random and last_read.get(node, -1) > i:
            alive.add(node)
        alive -= {n for n in done.get(i, []) if n is not node}
        # Several results at once (`split`), compressed one by one, would lose what they share.
        several = node.kind == "call" and node.shape is None
        closed = not several and alive <= {node} and not any(first <= i < last for first, last in spans)
        if node.kind == "call":
            forked = _reads(node, users, outputs) > 1
            steps.append(
                Step(
                    node,
                    rule_for(node.target) if node in uncertain else None,
                    closed and random,
                    forked,
                    node in outputs,
                    done.get(i, []),
                )
            )
    return steps


def _reads(node: Node, users: Mapping[Node, Collection[Node]], outputs: Collection[Node]) -> int:
    """How often a result is read; the readers of one of several results count for all of them."""
    return (node in outputs) + sum(
        _reads(user, users, outputs) if user.target is operator.getitem else user.inputs.count(node)
        for user in users[node]
    )
