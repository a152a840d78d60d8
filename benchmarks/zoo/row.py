"""One row of the zoo, as JSON on the last line: run by benchmarks/zoo.py with the environment of the model's package.

python benchmarks/zoo/row.py PACKAGE/MODEL --draws 2000 [--build]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import signals  # noqa: F401
import tables  # noqa: F401
import text  # noqa: F401
import torch
import vision  # noqa: F401
import wrapped  # noqa: F401
from specimen import SPECIMENS, Specimen, draws, first_output, made

MANY = 64  # outputs beyond which variances alone are compared
CHECKED = 500  # draws of `favour.check`


def call(function: Any, example: Any) -> Any:
    if isinstance(example, dict):
        return function(**example)
    return function(*example) if isinstance(example, tuple) else function(example)


def seconds(function: Any, example: Any, rounds: int = 5) -> float:
    """Median time of a call."""
    taken = []
    with torch.no_grad():
        call(function, example)
        for _ in range(rounds):
            start = time.perf_counter()
            call(function, example)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def compared(found: Specimen, belief: Any, n: int) -> dict[str, float]:
    """Errors of mean and covariance beyond the sampling noise of n draws."""
    from favour.inspect.agreement import Tally

    tally = Tally(belief, variances=math.prod(belief.mean.shape[1:]) > MANY)
    for some in draws(found, n):
        tally.add(some)
    told = tally.statistics()
    spread = told["sampled_stddev"]
    live = spread > 1e-5 * spread.max()
    excess = ((told["mean_z"].square() - 1) / tally.n)[live]
    share = (told["covariance_gap"] - told["covariance_noise"]) / told["covariance_size"].clamp(min=1e-300)
    return {
        "mean error": math.sqrt(max(excess.mean().item(), 0)),
        "covariance error": math.sqrt(max(share.mean().item(), 0)),
        "scale": (told["stddev"].square().sum() / spread.square().sum()).sqrt().item(),
    }


def row(name: str, n: int) -> dict[str, Any]:
    import favour

    found = made(name)
    told: dict[str, Any] = {"compiles": False}
    posterior = found.posterior() or None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        try:
            predict = favour.compile(found.model, found.example, posterior=posterior, **found.options)
            told["compile seconds"] = time.perf_counter() - start
            with torch.no_grad():
                result = call(predict, found.example)
        except favour.FavourError as error:
            return told | {"refused": f"{type(error).__name__}: {error}"}
        told["warned"] = sorted({w.category.__name__ for w in caught if issubclass(w.category, favour.FavourWarning)})
    belief = first_output(result, (favour.Belief,))
    plain = seconds(found.model, found.example)
    told |= {
        "compiles": True,
        "method": predict.choice.method if predict.choice else "none",
        "outputs": math.prod(belief.mean.shape[1:]),
    }
    told["forward passes"] = seconds(predict, found.example) / plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            told["verdict"] = favour.check(predict, found.example, n=CHECKED, output=first_place(result)).verdict
        except favour.FavourError as error:
            told["verdict"] = f"{type(error).__name__}: {error}"[:200]
        told |= compared(found, belief, n)
    return told


def first_place(result: Any) -> int:
    """The number of the first belief among the outputs."""
    from torch.utils import _pytree as pytree

    import favour

    leaves = pytree.tree_leaves(result, is_leaf=lambda t: isinstance(t, favour.Belief))
    return next(i for i, leaf in enumerate(leaves) if isinstance(leaf, favour.Belief))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=sorted(SPECIMENS), metavar="PACKAGE/MODEL")
    parser.add_argument("--list", action="store_true", help="the names of all models")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--build", action="store_true", help="build the model and call it, without favour")
    given = parser.parse_args()
    if given.list:
        print(json.dumps(sorted(SPECIMENS)))
        return
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if given.build:
            result: dict[str, Any] = {"output": list(next(draws(made(given.name), 20)).shape)}
        else:
            result = row(given.name, given.draws)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        result = {"compiles": False, "broke": f"{type(error).__name__}: {error} ({where})"[:2000]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
