"""`favour.export`: a predictor as one file that needs neither favour nor the model's code to run.

The graph goes from the inputs to the mean, the variance, and class probabilities with the JSD or an interval
(`favour.exporting.module` has the formulas). Any batch size; no random numbers. That is what a production system
gains over MC dropout: one pass instead of n, no generator that the runtime must have, the same answer every time, and
a file that any ONNX runtime takes. Results equal the predictor's up to rounding, which `export` checks before it
returns.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from favour.classify.calibration import Calibrated
from favour.errors import CaptureError, InvalidValue, ShapeMismatch, UnsupportedOperation
from favour.exporting.aligned import program_of
from favour.exporting.exported import FORMAT, Exported, Port, load_exported
from favour.exporting.module import (
    MEANINGS,
    REGRESSION,
    Answer,
    Choices,
    base_of,
    choose,
    dtype_name,
    example,
    input_nodes,
    input_ports,
    private,
)
from favour.exporting.plain import Plain, simplified
from favour.exporting.recording import ROWS
from favour.exporting.seen import of_examples
from favour.exporting.written_out import substitutes
from favour.files.replacing import replaced
from favour.graph.tracing import TRACING
from favour.passes.normalise.lookups import find_lookups
from favour.predictor.predictor import Predictor
from favour.progress import Progress

__all__ = ["export"]

FORMATS = (".onnx", ".pt2")
TOLERANCE = 1e-4  # relative to the largest number of an output
_ROWS = (1, 4)  # batch sizes of the check, none of those that were recorded


def export(
    predict: Predictor | Calibrated,
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    labels: Sequence[str] | None = None,
    level: float = 0.95,
    noise: float = 0.0,
    covariance: bool | None = None,
    output: str | int | None = None,
    examples: Any = None,
    check: bool = True,
) -> str:
    """Write a predictor as a self-contained graph with named outputs and a dynamic batch.

    Args:
        predict: From `favour.compile`, `favour.load` or `favour.calibrate` (without `sources`).
        path: Ends in `.onnx` (for onnxruntime and others) or `.pt2` (`torch.export`).
        kind: `"regression"`, or how logits become classes: `"softmax"`, `"binary"`, `"multilabel"`, `"ordinal"` (see
            `favour.probabilities`). By default what the model ends in says: a softmax or sigmoid is not taken twice. Of
            other outputs (C,) with C ≥ 2 are classes and others numbers: say `"regression"` for several numbers.
        labels: Names of the classes, for people.
        level: Of the interval of a regression: of observations for a predictor of `favour.calibrate` or with `noise`,
            else of the network's own spread, which holds fewer of them; the file's descriptions say which.
        noise: Variance of the observation noise that a regression's variance and interval include.
        covariance: Write the covariance of the outputs too; by default for 2 to 10 of them.
        output: Which output, by name or index, of a model with several.
        examples: Inputs that the model was trained on: an array, a tuple, or a dict by the inputs' names. Their means
            and ranges and the quantiles of their scores go into the file, not they themselves: the page of
            `favour serve` draws inputs like them, and says of a prediction how unusual it is among them.
        check: Run the file and compare it with the predictor, at two batch sizes.

    Returns:
        The path.

    Raises:
        InvalidValue, UnsupportedOperation: The arguments, or the predictor, cannot be exported; the message says why.
        CaptureError: `torch.export` or its ONNX translation failed, or the file's results differ.
        MissingExtra: The packages for ONNX are not installed.

    Example:
        >>> import favour, tempfile
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        ... )
        >>> predict = favour.compile(net, torch.zeros(2, 4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = favour.load_exported(export(predict, f"{folder}/net.pt2", labels=["a", "b", "c"]))
        >>> {name: array.shape for name, array in model(torch.randn(5, 4)).items()}
        {'mean': (5, 3), 'variance': (5, 3), 'probabilities': (5, 3), 'jsd': (5,), 'covariance': (5, 3, 3)}
    """
    target = os.fspath(path)
    form = os.path.splitext(target)[1].lower()
    if form not in FORMATS:
        raise InvalidValue(f"`path` is {target!r}; it must end in {' or '.join(FORMATS)}, which chooses the format.")
    folder = os.path.dirname(target) or "."
    if not os.path.isdir(folder):
        raise InvalidValue(f"there is no folder `{folder}` to write {os.path.basename(target)} to; make it first.")
    if form == ".onnx":
        from favour.exporting.onnx_file import packages
        from favour.exporting.onnx_file import write_onnx as write

        packages()
    else:
        from favour.exporting.archive import write
    with Progress(f"exporting to {os.path.basename(target)}") as progress, torch.no_grad():
        copy = private(predict)
        choices, belief = choose(copy, kind, level, noise, covariance, output)
        lookups = find_lookups(base_of(predict).graph)
        answer = Answer(copy, choices, lookups)
        inputs = input_ports(base_of(copy), lookups)
        described = _description(answer, inputs, belief.mean, labels)  # runs it once: what is kept must not be traced
        if examples is not None:
            described["seen"] = of_examples(Exported(target, form, described, _run(answer)), examples)
        progress.stage("tracing")
        program = _traced(answer, form)
        progress.stage("writing")
        with replaced(target) as temporary:
            write(program, temporary, described, dynamic_names(base_of(copy)))
            if check:
                progress.stage("checking")
                _compare(answer, load_exported(temporary, threads=1), target)
    return target


def _run(answer: Answer) -> Callable[[list[npt.NDArray]], list[npt.NDArray]]:
    """The answer itself, from arrays to arrays."""
    return lambda arrays: [t.numpy() for t in answer(*map(torch.from_numpy, arrays)).values()]


def dynamic_names(predict: Predictor) -> list[dict[int, str]]:
    """For each input, names of the sizes that may change."""
    tables = []
    for node in input_nodes(predict):
        shape = node.shape or ()
        tables.append({i: "batch" if i == 0 else s for i, s in enumerate(shape) if isinstance(s, str)})
    return tables


def _traced(answer: Answer, form: str) -> torch.export.ExportedProgram:
    """The graph, simplified; for ONNX in operations that it has. Recorded, where nothing but the batch may change."""
    base = base_of(answer.predict)
    take = _symbolic if any(table.keys() - {0} for table in dynamic_names(base)) else _recorded
    try:
        with TRACING, warnings.catch_warnings(), Plain(factorisations=form == ".pt2"):
            warnings.simplefilter("ignore")
            program = take(answer.eval(), base, form)
    except UnsupportedOperation:
        raise
    except Exception as error:
        raise CaptureError(
            f"torch.export could not trace the predictor: {type(error).__name__}: {str(error).strip()[:500]}"
        ) from error
    random = sorted(
        {str(n.target) for n in program.graph.nodes if torch.Tag.nondeterministic_seeded in _tags(n.target)}
    )
    if random:
        raise UnsupportedOperation(f"the graph draws random numbers ({', '.join(random)}), which cannot be exported.")
    return program


def _recorded(answer: Answer, base: Predictor, form: str) -> torch.export.ExportedProgram:
    return program_of(answer, (example(base, ROWS[0]), example(base, ROWS[1])), simplified, substitutes(form))


def _symbolic(answer: Answer, base: Predictor, form: str) -> torch.export.ExportedProgram:
    tensors = tuple(example(base, 3))
    dynamic, allowed = torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO
    shapes = tuple({i: dynamic if i == 0 else allowed for i in table} for table in dynamic_names(base))
    traced = torch.export.export(answer, tensors, dynamic_shapes=(shapes,), strict=False)
    if any("functorch" in str(getattr(n.target, "__module__", "")) for n in traced.graph.nodes):
        traced = traced.run_decompositions({})  # `vmap` as the batched operations it stands for
    module = simplified(traced.module(check_guards=False))
    return torch.export.export(module, tensors, dynamic_shapes=shapes, strict=False)


def _tags(target: Any) -> Sequence[Any]:
    return getattr(target, "tags", ())


def _description(answer: Answer, inputs: Sequence[Port], mean: Tensor, labels: Sequence[str] | None) -> dict[str, Any]:
    """What `favour.load_exported` reads; plain JSON."""
    import favour

    choices = answer.choices
    with torch.no_grad():
        named = answer(*example(base_of(answer.predict), 2))
    classes = named["probabilities"].shape[-1] if choices.link is not None else None
    if labels is not None:
        labels = [str(label) for label in labels]
        if classes is None or len(labels) != classes:
            raise ShapeMismatch(
                f"`labels` has {len(labels)} names; the model has {classes or 'no'} classes (outputs "
                f"{tuple(mean.shape[1:])})."
            )
    calibrated = isinstance(answer.predict, Calibrated)
    noted = _noted(choices, calibrated)
    which = " of observations" if calibrated or choices.noise else " of the network's spread, not of observations"
    return {
        "format": FORMAT,
        "checksum": True,
        "favour": favour.__version__,
        "kind": REGRESSION if choices.link is None else "classification",
        "link": choices.link,
        "classes": classes,
        "labels": labels,
        "level": choices.level if choices.link is None else None,
        "inputs": [
            {"name": p.name, "dtype": p.dtype, "shape": list(p.shape)}
            | ({} if p.least is None else {"least": p.least, "most": p.most})
            for p in inputs
        ],
        "lookups": bool(answer.lookups),
        "outputs": [
            {
                "name": name,
                "dtype": dtype_name(t.dtype),
                "shape": [None, *t.shape[1:]],
                "meaning": MEANINGS[name].format(which if name in ("lower", "upper") else noted),
            }
            for name, t in named.items()
        ],
    }


def _noted(choices: Choices, calibrated: bool) -> str:
    if choices.link is not None:
        return " (probabilities)" if choices.inside or choices.squashed else " (logits)"
    if calibrated:
        return ", fitted observation noise included"
    return f", observation noise {choices.noise:g} included" if choices.noise else ""


def _compare(answer: Answer, model: Exported, path: str) -> None:
    """Raise unless the file gives what the predictor gives."""
    for rows in _ROWS:
        tensors = example(base_of(answer.predict), rows, answer.lookups)
        want = answer(*tensors)
        try:
            have = model(*tensors)
        except Exception as error:
            raise CaptureError(
                f"{model.format} cannot run the exported graph with {rows} row(s): {type(error).__name__}: "
                f"{str(error).strip()[:500]}"
            ) from error
        for name, tensor in want.items():
            scale = tensor.abs().max().clamp(min=1e-30)
            if name == "jsd":  # a difference of entropies: its rounding is theirs, however small it is
                entropy = math.log(max(want["probabilities"].shape[-1], 2))
                scale = scale.clamp(min=4 * torch.finfo(tensor.dtype).eps * entropy / TOLERANCE)
            gap = float((torch.from_numpy(have[name]) - tensor).abs().max() / scale)
            if have[name].shape != tuple(tensor.shape) or not gap <= TOLERANCE:
                raise CaptureError(
                    f"the exported graph's `{name}` differs from the predictor's by {gap:.2g} (relative, at most "
                    f"{TOLERANCE:g} is allowed) for {rows} row(s), so `{path}` was not written. In float64 the "
                    "difference may vanish: export `predict.double()`; or write it anyway with check=False."
                )
