"""A predictor in words: its method, the noise it found, what it costs, and what the check at compile time said."""

from __future__ import annotations

from collections import Counter
from html import escape

from favour.inspect.selfcheck import SelfCheck
from favour.pages.notebook import card
from favour.program.propagator import Propagator

NAMES = 6  # of sources of one kind, before "and n more"


def noise_sources(predict: Propagator) -> dict[tuple[str, str], int]:
    """The sources of noise that reach an output for plain inputs, and how many draws each makes.

    Dropout is named by its module, a posterior by its parameter. A parameter is one draw however often it is read; a
    dropout module that is called twice draws twice.
    """
    plan = predict.plain_plan
    posterior = predict.posterior()
    read = {str(n.target) for n in plan.leaves if n.kind in ("parameter", "buffer")}
    drawn = [node for node in predict.graph.calls if node.draw is not None]  # a plan may join one to what reads it
    dropped = Counter(("dropout in", node.module or "forward") for node in drawn)
    return {**dropped, **{("posterior of", name): 1 for name in posterior.names if name in read}}


def noise(predict: Propagator) -> str:
    """The same in words.

    >>> import torch, favour
    >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
    >>> noise(favour.compile(net, torch.zeros(2, 4), check=False))
    '1 source of noise: dropout in `0`'
    """
    if predict.is_certain:
        return "nothing is uncertain"
    sources = noise_sources(predict)
    total = sum(sources.values())
    parts = []
    for kind in dict.fromkeys(kind for kind, _ in sources):
        names = [f"`{name}`" + (f" ({n} draws)" if n > 1 else "") for (k, name), n in sources.items() if k == kind]
        more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
        parts.append(f"{kind} {', '.join(names[:NAMES])}{more}")
    return f"{total} source{'s' * (total != 1)} of noise: {'; '.join(parts)}"


def method(predict: Propagator, checked: SelfCheck) -> str:
    """The settings that were asked for, the method that is taken, and its cost; `Predictor.cost` counts all of it."""
    cost = checked.cost
    here = "" if cost is None else f", {cost}"
    predicted = predict.method.cost(predict.plain_plan)
    said = [*predict.asked.asked(), *predict.numerics.asked()]
    return ", ".join([*said, f"takes {predict.method.name}, {predicted:.1f} forward passes by products alone{here}"])


def described(predict: Propagator, checked: SelfCheck) -> str:
    """One line each: method and cost, noise, check."""
    lines = [method(predict, checked), noise(predict)]
    if not predict.is_certain:
        lines.append(str(checked))
    return "\n".join(lines)


def html(predict: Propagator, checked: SelfCheck) -> str:
    """The same for notebooks."""
    rows = [["method", method(predict, checked)], ["noise", noise(predict)]]
    if not predict.is_certain:
        rows.append(["check", str(checked)])
    shapes = [n.shape for n in predict.graph.inputs if n is not None and n.shape]
    said = " and ".join("batch" + "".join(f" × {size}" for size in shape[1:]) for shape in shapes)
    return card("Predictor", [], rows, escape(f"Inputs: {said}. Call it like the model: predict(x)."))
