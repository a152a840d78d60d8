"""Every rewriting between torch.export and the steps of a prediction, in order.

A pass takes a graph to a graph that computes the same function; it works in place on a graph of ours. Its docstring
says what it assumes. After a capture, once, whatever will be uncertain:

| pass              | does                                                          | assumes of the graph             |
|-------------------|---------------------------------------------------------------|----------------------------------|
| `functionalise`   | writes in place become values                                 | as exported, views known         |
| `freeze`          | norms use running statistics                                  | captured in evaluation mode      |
| `one_batch`       | one symbol for the batch of all inputs                        | the inputs' batches are equal    |
| `spell_out_draws` | draws by hand become the operation that draws                 | nothing writes in place          |
| `decompose`       | composites become operations with rules, attention its parts  | nothing writes in place          |
| `unroll`          | recurrent layers step by step, weights drawn once             | a known number of steps          |

and for one combination of uncertain inputs and parameters, each told what is random in the graph as it is then:

| pass              | does                                                          | assumes of the graph             |
|-------------------|---------------------------------------------------------------|----------------------------------|
| `derive`          | what code makes of parameters alone is a weight again         | dropout configured               |
| `draw_parameters` | parameters read as tensors become tensors, the batch in front | weights derived                  |
| `widen_lookups`   | lookups in uncertain tables get the batch in front            | the same                         |
| `make_real`       | complex numbers are pairs, Fourier transforms matrices        | nothing                          |
| `spell_out`       | functions without a rule in terms of those with one           | nothing                          |
| `commute`         | dropout behind what commutes with it; outcomes of draws       | a draw is made once              |
| `find_roots`      | roots of sums of squares as one operation                     | nothing                          |
| `find_entropies`  | Σ p log p of a softmax as one operation                       | nothing                          |
| `fuse`            | element-wise code on one tensor is one function               | nobody looks inside any more     |
| `spell_out_…`     | comparisons and extremes of two tensors likewise              | code on one tensor is fused      |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from favour.graph.node import Graph, Node
from favour.passes.marking import Marks
from favour.passes.normalise.commuting import commute
from favour.passes.normalise.complex import make_real
from favour.passes.normalise.decompose import decompose, one_batch, widen_lookups
from favour.passes.normalise.derived import DerivedNode, derive
from favour.passes.normalise.drawn import draw_parameters
from favour.passes.normalise.elementary import spell_out, spell_out_comparisons
from favour.passes.normalise.entropies import find_entropies
from favour.passes.normalise.frozen import freeze
from favour.passes.normalise.fusion import fuse
from favour.passes.normalise.inplace import functionalise
from favour.passes.normalise.randomness import spell_out_draws
from favour.passes.normalise.recurrent import unroll
from favour.passes.normalise.roots import find_roots


def _told(rewriting: Callable[[Graph, set[Node]], None]) -> Callable[[Graph, Marks], None]:
    """For a pass that is told once what is random, and does not ask again while it rewrites."""
    return lambda graph, marked: rewriting(graph, marked(graph))


CAPTURED: tuple[Callable[[Graph], None], ...] = (freeze, one_batch, spell_out_draws, decompose, unroll)
WEIGHTS: tuple[Callable[[Graph, Marks], None], ...] = (_told(derive), _told(draw_parameters), _told(widen_lookups))
TENSORS: tuple[Callable[[Graph, Marks], None], ...] = (
    _told(make_real),
    _told(spell_out),
    commute,
    _told(find_roots),
    _told(find_entropies),
    _told(fuse),
    _told(spell_out_comparisons),
)


def normalise(graph: Graph, views: Mapping[Node, Node]) -> None:
    """All that follows a capture.

    Args:
        graph: As exported.
        views: What is a view of what.
    """
    functionalise(graph, views)
    for rewriting in CAPTURED:
        rewriting(graph)


def prepare(graph: Graph, marked: Marks) -> None:
    """All that a plan needs.

    Args:
        graph: A private copy, dropout configured.
        marked: Finds the random nodes of a graph.
    """
    for rewriting in WEIGHTS:
        rewriting(graph, marked)
    for rewriting in TENSORS:  # weights made of parameters are settled
        rewriting(graph, lambda graph: _tensors(marked(graph)))


def _tensors(nodes: Collection[Node]) -> set[Node]:
    return {node for node in nodes if not isinstance(node, DerivedNode)}
