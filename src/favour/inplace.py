"""In-place operations rewritten as ordinary ones.

`y.relu_()` becomes `z = relu(y)` and every later reader of `y` reads `z`. When `y` is a view of a larger
tensor that is read again later, the new value is scattered back into it (`x[:, 0] = 0` becomes a
`select_scatter`), so that the base sees the write too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from favour.errors import UnsupportedOperation

if TYPE_CHECKING:
    from favour.graph import Graph, Node

aten = torch.ops.aten

# A view's inverse: the overload that writes a new value of the view back into its base.
_SCATTER = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.unflatten.int,
}
_OTHER_VIEWS = {
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.split.Tensor,
    aten.chunk.default,
    aten.unbind.int,
    aten.diagonal.default,
    aten.movedim.int,
    aten.narrow.default,
    aten.squeeze.default,
}
_ALIASES = {aten.detach.default, aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default}
_WRITES = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}


def _out_of_place(target: Any) -> Any:
    """The overload without the underscore: `aten.relu_.default` to `aten.relu.default`, or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.startswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None)
    overload = target._overloadname
    return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None


def functionalise(graph: Graph) -> None:
    """Rewrite every in-place operation of `graph`, in place (the graph's, not the user's)."""
    from favour.graph import Node, nodes_in, replace_nodes

    current: dict[Node, Node] = {}  # a value to what it is now, after writes
    base_of: dict[Node, Node] = {}
    result: list[Node] = []

    def now(node: Node) -> Node:
        while node in current:
            node = current[node]
        return node

    remaining: dict[Node, int] = {}
    for node in graph.nodes:
        for source in node.inputs:
            remaining[source] = remaining.get(source, 0) + 1
    for source in nodes_in(graph.outputs):
        remaining[source] = remaining.get(source, 0) + 1

    for node in graph.nodes:
        originals = [n for n in node.inputs]
        for source in originals:
            remaining[source] -= 1
        node.args = replace_nodes(node.args, now)
        node.kwargs = replace_nodes(node.kwargs, now)
        if node.kind != "call":
            result.append(node)
            continue
        if node.target in _WRITES or _out_of_place(node.target) is not None:
            written = originals[0]
            _rewrite(node)
            result.append(node)
            current[now(written)] = node
            _write_back(node, written, base_of, remaining, result, current, now)
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise UnsupportedOperation(
                f"`{node.target}` at {node.place} writes into its argument and has no out-of-place form here; "
                "write the model without it."
            )
        if node.target in _SCATTER or node.target in _RESHAPES or node.target in _OTHER_VIEWS:
            base_of[node] = originals[0]
        result.append(node)
    graph.outputs = replace_nodes(graph.outputs, now)
    graph.nodes = result


def _rewrite(node: Node) -> None:
    """Give `node` the out-of-place form of its target."""
    if node.target is aten.copy_.default:
        # The value copied takes the destination's shape.
        node.target, node.args = aten.expand_as.default, (node.args[1], node.args[0])
    elif node.target in (aten.fill_.Scalar, aten.fill_.Tensor):
        node.target = aten.full_like.default if node.target is aten.fill_.Scalar else aten.expand_as.default
        node.args = node.args if node.target is aten.full_like.default else (node.args[1], node.args[0])
        node.kwargs = {}
    elif node.target is aten.zero_.default:
        node.target = aten.zeros_like.default
    else:
        node.target = _out_of_place(node.target)


def _write_back(
    node: Node,
    written: Node,
    base_of: dict[Node, Node],
    remaining: dict[Node, int],
    result: list[Node],
    current: dict[Node, Node],
    now: Any,
) -> None:
    """Carry a write through the chain of views up to every base that is read again."""
    from favour.graph import Node

    value, view, step = node, written, 0
    while view in base_of:
        base = base_of[view]
        if remaining.get(base, 0) == 0 and base not in base_of:
            return
        args: tuple
        if view.target in _SCATTER:
            target = _SCATTER[view.target]
            args = (now(base), value, *view.args[1:])
        elif view.target in _RESHAPES:
            target, args = aten.reshape_as.default, (value, now(base))
        else:
            raise UnsupportedOperation(
                f"`{node.target}` at {node.place} writes into a view made by `{view.target}` of a tensor that is "
                "used again; write the model without the in-place operation."
            )
        name = f"{node.name}_back{step}"
        value = Node(name, "call", target, args, {}, base.shape, base.dtype, node.module, node.where)
        result.append(value)
        current[now(base)] = value
        view, step = base, step + 1
