"""Rows of the zoo, a line of JSON each: run by benchmarks/zoo.py with the environment of the models' package.

Each model has a process of its own, forked from one that has imported what all of them need. Times are of the
processor, in one thread, so that other work on the machine counts little. A row that grows is printed again.

python benchmarks/zoo/row.py PACKAGE/MODEL [PACKAGE/MODEL…] --draws 2000 [--parts beliefs] [--build]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
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
PATIENCE, LIMIT = 120, 600  # seconds for one exported file, and for one model
PARTS = ["beliefs", "files"]
NEEDED = ("favour", "torch._dynamo", "torch.export", "torch.onnx", "onnxscript", "onnxruntime", "scipy.stats")


def call(function: Any, example: Any) -> Any:
    if isinstance(example, dict):
        return function(**example)
    return function(*example) if isinstance(example, tuple) else function(example)


def seconds(function: Any, example: Any, least: float = 0.2) -> float:
    """Processor time of a call, over as many as take a while: the clock is coarse."""
    with torch.no_grad():
        call(function, example)
        start, calls = time.process_time(), 0
        while (taken := time.process_time() - start) < least:
            call(function, example)
            calls += 1
    return taken / calls


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


def exported(predict: Any, output: int | None) -> dict[str, Any]:
    """For each kind of file, the seconds it took to write and to compare with the predictor, or why there is none."""
    import favour

    def late(*_: Any) -> None:
        raise TimeoutError(f"no file within {PATIENCE} s")

    told: dict[str, Any] = {}
    signal.signal(signal.SIGPROF, late)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in ("pt2", "onnx"):
            start = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, PATIENCE)
            try:
                favour.export(predict, f"{folder}/model.{form}", output=output)
                told[form] = time.process_time() - start
            except favour.FavourError as error:
                told[form] = f"refused: {type(error).__name__}: {error}"[:500]
            except Exception as error:
                told[form] = f"broke: {type(error).__name__}: {error}"[:500]
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    return told


def row(name: str, n: int, parts: list[str]) -> dict[str, Any]:
    """What is found of the parts asked for: `beliefs` against n draws, `files` it can be written to."""
    import favour

    found = made(name)
    told: dict[str, Any] = {"compiles": False}
    posterior = found.posterior() or None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.process_time()
        try:
            predict = favour.compile(found.model, found.example, posterior=posterior, **found.options)
            told["compile seconds"] = time.process_time() - start
            with torch.no_grad():
                result = call(predict, found.example)
        except favour.FavourError as error:
            return told | {"refused": f"{type(error).__name__}: {error}"}
        told["warned"] = sorted({w.category.__name__ for w in caught if issubclass(w.category, favour.FavourWarning)})
    belief = first_output(result, (favour.Belief,))
    told["compiles"] = True
    if "beliefs" in parts:
        told |= believed(found, predict, belief, first_place(result), n)
        report(name, told)  # should the export be cut short
    if "files" in parts:
        told["files"] = exported(predict, named(result, belief))
    return told


def believed(found: Specimen, predict: Any, belief: Any, output: int, n: int) -> dict[str, Any]:
    """Cost, verdict and errors."""
    import favour

    plain = seconds(found.model, found.example)
    told: dict[str, Any] = {
        "method": predict.method.name,
        "outputs": math.prod(belief.mean.shape[1:]),
        "forward passes": seconds(predict, found.example) / plain,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            told["verdict"] = favour.check(predict, found.example, n=CHECKED, output=output).verdict
        except favour.FavourError as error:
            told["verdict"] = f"{type(error).__name__}: {error}"[:200]
        return told | compared(found, belief, n)


def first_place(result: Any) -> int:
    """The number of the first belief among the outputs."""
    from torch.utils import _pytree as pytree

    import favour

    leaves = pytree.tree_leaves(result, is_leaf=lambda t: isinstance(t, favour.Belief))
    return next(i for i, leaf in enumerate(leaves) if isinstance(leaf, favour.Belief))


def named(result: Any, belief: Any) -> Any:
    """Which of a model's outputs that is, for `favour.export`: None for the only one."""
    if not isinstance(result, (tuple, list, Mapping)):
        return None
    items = result.items() if isinstance(result, Mapping) else enumerate(result)
    return next((k for k, v in items if v is belief), None)


def report(name: str, told: dict[str, Any]) -> None:
    print(json.dumps({"name": name} | told), flush=True)


def one(name: str, given: argparse.Namespace) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    try:
        if given.build:
            result: dict[str, Any] = {"output": list(next(draws(made(name), 20)).shape)}
        else:
            result = row(name, given.draws, given.parts)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        result = {"compiles": False, "broke": f"{type(error).__name__}: {error} ({where})"[:2000]}
    report(name, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*sorted(SPECIMENS), []], metavar="PACKAGE/MODEL")
    parser.add_argument("--list", action="store_true", help="the names of all models")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--build", action="store_true", help="build the model and call it, without favour")
    given = parser.parse_args()
    if given.list:
        print(json.dumps(sorted(SPECIMENS)))
        return
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for needed in NEEDED:
        importlib.import_module(needed)
    with contextlib.suppress(Exception):  # a package that fails to load says so in the rows of its models
        importlib.import_module(given.names[0].split("/")[0].replace("-", "_"))
    for name in given.names:
        child = os.fork()
        if not child:
            one(name, given)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            report(name, {"compiles": False, "broke": f"no answer within {LIMIT} s, or a crash (status {status})"})


if __name__ == "__main__":
    main()
