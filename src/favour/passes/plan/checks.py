"""What a plan cannot do, all of it in one message."""

from __future__ import annotations

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node, draws_numbers
from favour.passes.normalise.commuting import rule_for
from favour.passes.normalise.derived import DerivedNode
from favour.passes.normalise.fusion import FusedNode


def batch_of(graph: Graph) -> int | str | None:
    """The size of dimension 0, a symbol."""
    return next((n.shape[0] for n in graph.inputs if n is not None and n.shape), None)


def check_rules(graph: Graph, uncertain: set[Node]) -> None:
    """Raise one error that lists everything that cannot be done."""
    problems: list[str] = []
    batch = batch_of(graph)
    for node in graph.nodes:
        if draws_numbers(node):
            problems.append(f"`{node.target}` at {node.place} draws random numbers in a way favour does not know")
            continue
        if node.kind != "call" or node not in uncertain or isinstance(node, FusedNode):
            continue
        if getattr(node.target, "__name__", "") == "getitem":
            source, which = node.args
            if source.traits.indices and which != 0:
                problems.append(
                    f"the indices of `{source.target}` at {source.place} (`return_indices=True`) are read, and which "
                    "entry is the largest is random there: return or use the maxima only"
                )
            elif _misplaced(node, batch):
                problems.append(_where_the_batch_is(source, node, batch))
            continue
        entry = rule_for(node.target)
        derived = isinstance(node, DerivedNode)
        weights = [s for s in node.inputs if s in uncertain and is_weight(s) and not derived]
        if entry is None:
            problems.append(f"no rule for `{node.target}` at {node.place}")
        elif entry.exactness == "refused":
            problems.append(f"`{node.target}` at {node.place} has a discrete result, which has no mean and covariance")
        elif weights and not entry.weights:
            names = ", ".join(f"`{s.name if isinstance(s, DerivedNode) else s.target}`" for s in weights)
            problems.append(
                f"`{node.target}` at {node.place} reads {names}, but has no rule for an uncertain parameter"
            )
        elif not derived and _misplaced(node, batch):
            problems.append(_where_the_batch_is(node, node, batch))
    if problems:
        lines = "\n".join(f"  - {p}" for p in dict.fromkeys(problems))
        raise UnsupportedOperation(
            f"favour cannot propagate uncertainty through {len(problems)} operation(s):\n{lines}\n"
            "Register a rule with `@favour.rule(...)` (see docs/adding.md), or rewrite those lines."
        )


def is_weight(node: Node) -> bool:
    return node.kind in ("parameter", "buffer") or isinstance(node, DerivedNode)


def _misplaced(node: Node, batch: int | str | None) -> bool:
    return node.shape is not None and node.shape[:1] != (batch,)


def _where_the_batch_is(call: Node, result: Node, batch: int | str | None) -> str:
    assert result.shape is not None
    return (
        f"`{call.target}` at {call.place} makes a tensor of shape {sizes_text(result.shape)}, whose first "
        f"dimension is not the batch ({batch}); uncertain tensors keep the batch in front"
    )


def sizes_text(shape: tuple[int | str, ...]) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ")"
