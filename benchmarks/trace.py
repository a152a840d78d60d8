"""Which of favour's files a reader has to open to follow `favour.compile` and `predict`, in the order they are met.

Every call of a function that is written in a file of favour counts as a visit of that file; importing it does not. The
first visits, in order, are what somebody reads who follows one prediction through the code, so their number is the
length of that walk. Three stages are told apart: compiling (with its check against samples, as by default), the first
prediction and a second one, by which all that is made once is there.

    mlp   784-400-400-10, ReLU, dropout .2
    cnn   two convolutions with batch normalisation and max-pooling, dropout, two linear layers

    python benchmarks/trace.py [--label now] [--show]

`--label` names the entry in results/trace.json; entries of other names are kept, so that a change of the code can be
held against what was there before it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import favour

ROOT = Path(favour.__file__).resolve().parent
RESULT = Path(__file__).resolve().parent.parent / "results" / "trace.json"


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """A multilayer perceptron and an example."""
    layers: list[nn.Module] = []
    for n, m in ((784, 400), (400, 400)):
        layers += [nn.Linear(n, m), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(400, 10)), torch.randn(8, 784)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """A small convolutional network and an example."""
    layers: list[nn.Module] = []
    for n, m in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(
        8, 1, 28, 28
    )


class Visits:
    """First visits of favour's files while it is active, and how many calls there were in all."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}  # and the function that was met first
        self.calls = 0
        self._known: dict[Any, str | None] = {}

    def _name(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if code not in self._known:
            path = Path(code.co_filename)
            inside = path.is_absolute() and path.is_relative_to(ROOT) and code.co_name != "<module>"
            self._known[code] = str(path.relative_to(ROOT)) if inside else None
        return self._known[code]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (name := self._name(frame)) is None or _importing(frame):
            return
        self.calls += 1
        self.files.setdefault(name, frame.f_code.co_qualname)

    def of(self, function: Callable[[], Any]) -> Any:
        sys.setprofile(self._profile)
        try:
            return function()
        finally:
            sys.setprofile(None)


def _importing(frame: FrameType | None) -> bool:
    """Whether a file's own body is being run further up: decorators, registrations."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and Path(frame.f_code.co_filename).is_relative_to(ROOT):
            return True
        frame = frame.f_back
    return False


def walk(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> dict[str, Any]:
    """Files by stage, in order of their first visits, and their number over all stages."""
    torch.manual_seed(0)
    model, x = make()
    stages: dict[str, Visits] = {"compile": Visits(), "first predict": Visits(), "predict": Visits()}
    predict = stages["compile"].of(lambda: favour.compile(model, x))
    for stage in ("first predict", "predict"):
        stages[stage].of(lambda: predict(x))
    seen = {file for visits in stages.values() for file in visits.files}
    return {
        "files": len(seen),
        **{
            stage: {"files": len(v.files), "calls": v.calls, "order": [f"{f}: {name}" for f, name in v.files.items()]}
            for stage, v in stages.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now")
    parser.add_argument("--show", action="store_true", help="print the files in order")
    options = parser.parse_args()
    entry = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "networks": {make.__name__: walk(make) for make in (mlp, cnn)},
    }
    for name, found in entry["networks"].items():
        parts = ", ".join(f"{stage} {found[stage]['files']}" for stage in ("compile", "first predict", "predict"))
        print(f"{name}: {found['files']} files ({parts})")
        if options.show:
            for stage in ("compile", "first predict", "predict"):
                print(f"  {stage}:", *found[stage]["order"], sep="\n    ")
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, options.label: entry}, indent=1) + "\n")


if __name__ == "__main__":
    main()
