"""The one walk through a graph, and that there is no other."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import favour
from favour.graph.interpreter import call, interpret, noiseless
from favour.graph.node import Node
from favour.passes.capture import capture

SOURCE = Path(favour.__file__).parent


def captured() -> tuple[nn.Module, torch.Tensor, favour.graph.node.Graph, dict[Node, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 2))
    x = torch.randn(4, 3)
    graph = capture(model, x)
    tensors = dict(model.named_parameters())
    values = {n: x if n.kind == "input" else tensors[str(n.target)] for n in graph.nodes if n.kind != "call"}
    return model, x, graph, values


def test_walk_without_noise_is_the_model_in_evaluation_mode() -> None:
    model, x, graph, values = captured()
    found = interpret(graph.calls, values, noiseless)
    torch.testing.assert_close(found[graph.outputs[0]], model.eval()(x))


def test_calls_are_made_as_written() -> None:
    model, x, graph, values = captured()
    torch.manual_seed(1)
    found = interpret(graph.calls, values, call)[graph.outputs[0]]
    torch.manual_seed(1)
    torch.testing.assert_close(found, model(x))


def test_handlers_see_what_was_made_and_what_is_done_goes() -> None:
    _, _, graph, values = captured()
    first, *_, last = graph.calls
    seen: list[set[Node]] = []

    def handle(node: Node, known: dict[Node, torch.Tensor]) -> int:
        seen.append(set(known))
        return len(seen)

    left = interpret(graph.calls, values, handle, {last: [first]})
    assert [len(s) for s in seen] == list(range(len(seen[0]), len(seen[0]) + len(graph.calls)))
    assert first not in left and left[last] == len(graph.calls)


def test_nobody_else_walks_through_a_graph() -> None:
    """Calls are made by the interpreter alone: nowhere else is a node's target applied to its resolved arguments."""
    apply = re.compile(r"\.target\(\s*\*")
    files = [p for p in SOURCE.rglob("*.py") if "exporting" not in p.parts]  # graphs of torch's there
    found = {str(p.relative_to(SOURCE)) for p in files if apply.search(p.read_text())}
    # A graph from a file, on shapes: inside the walk, checked before and after. And one call on means, in a sweep.
    assert found <= {"graph/interpreter.py", "graph/rehearsal.py", "methods/forward.py"}, found
