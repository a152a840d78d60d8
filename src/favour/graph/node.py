"""A captured model as plain data: nodes in topological order, each with the module path and source line it
came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.graph.traits import NONE, Draw, Operation, Traits, holds, traits_of


@dataclass(eq=False)
class Node:
    """One value of the graph: an input, a parameter or the result of an operation.

    Attributes:
        name: Unique name.
        kind: `"input"`, `"parameter"`, `"buffer"`, `"constant"` or `"call"`.
        target: For a call, the aten overload (or a Python operator on sizes); otherwise the qualified name.
        args, kwargs: Arguments of a call; other nodes appear as `Node`.
        shape: Sizes, symbolic ones as strings; None where the value is not a tensor.
        dtype: Of a tensor value, else None.
        module: Path of the module whose `forward` made the call.
        where: `file.py:line` in the user's code.
        drawn: Of a call that a pass has made, the captured call whose draws it takes.
    """

    name: str
    kind: str
    target: Operation
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int | str, ...] | None = None
    dtype: torch.dtype | None = None
    module: str = ""
    where: str = ""
    drawn: str = ""

    def __repr__(self) -> str:
        return f"%{self.name}"

    @property
    def origin(self) -> str:
        """The name of the captured call whose draws it takes: its own, where no pass has moved it."""
        return self.drawn or self.name

    @property
    def place(self) -> str:
        """Where this came from, for messages: module path and source line."""
        path = f"`{self.module}`" if self.module else "the model's own forward"
        return f"{path} ({self.where})" if self.where else path

    @property
    def traits(self) -> Traits:
        """What is known of its operation."""
        return traits_of(self.target) if self.kind == "call" else NONE

    @property
    def draw(self) -> Draw | None:
        """What a call draws, as dropout does."""
        return self.traits.draws

    def claims(self, trait: str) -> Any:
        """A trait that may depend on the further arguments, of this call."""
        return holds(getattr(self.traits, trait), *self.args[1:], **self.kwargs)

    @property
    def rate(self) -> Any:
        """Of a call that draws."""
        assert self.draw is not None
        return argument(self, self.draw.rate)

    @property
    def live(self) -> bool:
        """Whether a call that draws is switched on."""
        assert self.draw is not None
        return self.draw.live is None or bool(argument(self, self.draw.live))

    @property
    def inputs(self) -> list[Node]:
        """The nodes among the arguments, with repetitions, in order."""
        return list(nodes_in((self.args, self.kwargs)))


def argument(node: Node, position: int) -> Any:
    """An argument of a call by its position in the signature, wherever it stands."""
    if position < len(node.args):
        return node.args[position]
    declared = node.target._schema.arguments[position]
    return node.kwargs.get(declared.name, declared.default_value)


def with_argument(node: Node, position: int, value: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call with one of them replaced."""
    if position < len(node.args):
        return (*node.args[:position], value, *node.args[position + 1 :]), node.kwargs
    return node.args, {**node.kwargs, node.target._schema.arguments[position].name: value}


def nodes_in(structure: Any) -> Iterator[Node]:
    """Every `Node` in nested lists, tuples and dicts."""
    if isinstance(structure, Node):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from nodes_in(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from nodes_in(item)


_NUMBERS = {int, float, bool, type(None)}


def replace_nodes(structure: Any, function: Callable[[Node], Any]) -> Any:
    """Copy nested lists, tuples and dicts with every `Node` replaced by `function(node)`."""
    if isinstance(structure, Node):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        # Written for the usual arguments, nodes and numbers: every step of every call comes by here.
        return type(structure)(
            [
                function(item)
                if isinstance(item, Node)
                else item
                if type(item) in _NUMBERS
                else replace_nodes(item, function)
                for item in structure
            ]
        )
    if isinstance(structure, dict):
        return {key: replace_nodes(item, function) for key, item in structure.items()}
    return structure


def rewired(node: Node, swap: Callable[[Node], Any]) -> Node:
    """A copy of a node that reads other ones."""
    return replace(node, args=replace_nodes(node.args, swap), kwargs=replace_nodes(node.kwargs, swap))


@dataclass(eq=False)
class Graph:
    """A captured model.

    Attributes:
        nodes: Every node in topological order.
        inputs: Input nodes, in the order of the flattened call arguments; None for a leaf that is not used
            as a tensor (a flag, say), whose value was fixed at capture.
        outputs: One entry per flattened output; a `Node` or a constant.
        in_spec, out_spec: Tree structures of `(args, kwargs)` and of the result.
        fixed: The example's value of each input leaf that is not a tensor.
        constants: Tensors that export lifted out of the code, by node name.
        aliases: Qualified name to the one name used here, for parameters tied under several names.
        batched: Whether the model's tensors have a batch in front. Otherwise a call is one event, and those of the
            graph have an axis more in front than the model's.
    """

    nodes: list[Node]
    inputs: list[Node | None]
    outputs: list[Any]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    fixed: list[Any]
    constants: dict[str, Tensor]
    aliases: dict[str, str]
    batched: bool = True

    @property
    def calls(self) -> list[Node]:
        """What is computed, in order."""
        return [n for n in self.nodes if n.kind == "call"]

    def users(self) -> dict[Node, list[Node]]:
        """For each node, the nodes that read it."""
        table: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                table[source].append(node)
        return table

    def prune(self) -> None:
        """Drop calls that no output depends on."""
        alive = set(nodes_in(self.outputs))
        kept = []
        for node in reversed(self.nodes):
            if node in alive or node.kind != "call":
                alive.update(node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]

    @property
    def dropout_modules(self) -> list[str]:
        """Paths of the modules in which dropout happens."""
        return list(dict.fromkeys(n.module for n in self.nodes if n.draw is not None))


def draws_numbers(node: Node) -> bool:
    """Whether a call is random beside the draws favour knows; a recurrent layer without dropout is not."""
    tags = getattr(node.target, "tags", ())
    if node.kind != "call" or node.draw is not None or torch.Tag.nondeterministic_seeded not in tags:
        return False
    args = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    args |= {a.name: value for a, value in zip(node.target._schema.arguments, node.args, strict=False)}
    args |= node.kwargs
    silent = [args.get(name) == 0 for name in ("dropout", "dropout_p") if name in args]
    silent += [args[name] is False for name in ("train", "training") if name in args]
    return not any(silent)
