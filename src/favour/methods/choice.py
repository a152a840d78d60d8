"""`method="auto"`: which method, from the sizes in the graph.

The unit of cost is one forward pass. With t the share of it that lies behind the first noise source,

    reverse sweep, k covectors    1 + t(1 + k) + t₂k with secants, + t(P + 2) with P groups of pairs
    dplr, rank r, K iterations    1 + t(1 + r + 2rK)

where t₂ is the share that an activation follows, both beside the element-wise work, which is the same. The reverse
sweep over all n outputs is exact for its surrogates, so it is taken while it stays affordable: in forward passes, or
in multiplications for each input where the network is small. With more outputs that are class scores (`task`) it is
taken over the leading directions of a softmax and the common shift of all scores (`directions`); else `dplr` gives
every output's marginal and the leading correlations.
`benchmarks/choice.py` compares these predictions with measured times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from favour.graph.capture import Node
from favour.graph.sizes import entries
from favour.methods.settings import Settings
from favour.passes.plan.steps import Plan

# Ranks where the user names none.
DEFAULT_RANK = {"dplr": 4, "adjoint": 0}

# `auto` goes through all outputs while that is predicted to cost at most this many forward passes.
AFFORDABLE = 24.0

# Or this many multiplications for each input, whatever that is in forward passes: some milliseconds on one core.
SMALL = 2e7

# `auto` takes secants while that is predicted to cost at most this many forward passes.
SECANT = 0.5

# Directions of a softmax where there are too many outputs; the common shift is one more.
DIRECTIONS = 8


@dataclass(frozen=True)
class Choice:
    """A method, its number of covectors (None: one per output) and its predicted cost in forward passes.

    `shift` says that one of the covectors is for the common shift of all class scores, `secant` that dropout's noise
    meets secants.
    """

    method: str
    covectors: int | None
    forwards: float
    shift: bool = False
    secant: bool = False


def multiplications(node: Node, sizes: Mapping[str, int] | None = None) -> int:
    """Multiplications per input of an operation that has a weight: one per output entry and weight of one output."""
    if node.shape is None:
        return 0
    weights = [s for s in node.inputs if s.kind == "parameter" and s.shape is not None and len(s.shape) > 1]
    return sum(entries(node.shape[1:], sizes or {}) * entries(w.shape[1:], {}) for w in weights if w.shape is not None)


def uncertain_share(plan: Plan, ends: bool = True) -> float:
    """t: the share of the multiplications whose input is uncertain; without those that end the network, t₂."""
    total = tail = 0
    for step in plan.steps:
        work = multiplications(step.node, plan.sizes)
        total += work
        if any(s in plan.uncertain and s.kind in ("call", "input") for s in step.node.inputs):
            tail += work if ends or not step.output else 0
    return tail / total if total else 1.0


def predicted(plan: Plan, settings: Settings, method: str, covectors: int) -> float:
    """Cost in forward passes."""
    t = uncertain_share(plan)
    if method == "adjoint":
        rank = settings.rank or 0
        pairs = settings.pairs + 2 if settings.pairs else 0
        marginals = rank + 2 * rank * settings.iterations
        secants = uncertain_share(plan, ends=False) * covectors if takes_secants(plan, settings, covectors) else 0.0
        return 1 + t * (1 + marginals + covectors + pairs) + secants
    if method == "dplr":
        rank = DEFAULT_RANK["dplr"] if settings.rank is None else settings.rank
        return 1 + t * (1 + rank + 2 * rank * settings.iterations)
    return 1 + t


def takes_secants(plan: Plan, settings: Settings, covectors: int) -> bool:
    """Whether the reverse sweep takes secants: as told, else with pairs, and in `auto` where they are cheap."""
    if settings.secant is not None:
        return settings.secant
    if settings.pairs:
        return True
    return settings.method == "auto" and uncertain_share(plan, ends=False) * covectors <= SECANT


def outputs(plan: Plan) -> list[Node]:
    """The uncertain outputs."""
    return [o for o in plan.outputs if isinstance(o, Node) and o in plan.uncertain and o.shape is not None]


def choose(plan: Plan, settings: Settings) -> Choice:
    """The method to run."""
    uncertain = outputs(plan)
    n = sum(plan.entries(o.shape) for o in uncertain)
    if settings.method not in ("auto", "adjoint"):
        return Choice(settings.method, None, predicted(plan, settings, settings.method, n))

    def swept(covectors: int | None, shift: bool = False) -> Choice:
        k = n if covectors is None else covectors
        cost = predicted(plan, settings, "adjoint", k)
        return Choice("adjoint", covectors, cost, shift, takes_secants(plan, settings, k))

    if settings.directions is not None:
        return swept(settings.directions if isinstance(settings.directions, int) else len(settings.directions))
    every = swept(None)
    if settings.method == "adjoint" or every.forwards <= AFFORDABLE:
        return every
    if settings.task == "classification" and all(o.shape is not None and len(o.shape) == 2 for o in uncertain):
        return swept(DIRECTIONS + 1, shift=True)
    asked = settings.secant or settings.pairs  # what only the reverse sweep has
    work = every.forwards * sum(multiplications(step.node, plan.sizes) for step in plan.steps)
    entries = every.forwards * sum(plan.entries(step.node.shape) for step in plan.steps)
    if asked or max(work, 10 * entries) <= SMALL:
        return every
    return Choice("dplr", None, predicted(plan, settings, "dplr", n))
