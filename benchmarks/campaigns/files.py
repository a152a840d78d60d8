"""Damaged and crafted model files, by the ten thousand.

Every trial makes a bad file from a good one, loads it as a user would, predicts if it loads, and says how it ended:

    refused         by an error of Favour's
    unchanged       it loaded and answered exactly what the good file answers (a copy without damage, say)
    answered        crafted files only: they are models of their own, whose answers have nothing to be compared with
    silent          damage that loaded and changed an answer
    unwritten       a crafted file whose answers show memory that nobody wrote
    raw, crash, hang        an error that is not Favour's; the process died; no end within a minute

    flips           one bit of one byte, anywhere in the file
    truncations     a file cut anywhere, or with bytes added
    crafted         graphs: operations of torch's drawn at random with arguments that do not fit (negative, enormous,
                    no number, of another type), sizes, tensors and settings changed. They carry no checksum, as files
                    of earlier versions do not, so that everything behind the checksum is met.
    bombs           members that grow when they are read, tensors said to be larger than their bytes

Workers are processes with 6 GiB of memory each; one that dies is a crash of the trial it was at, and is replaced.

    python benchmarks/campaigns/files.py [--trials 10000] [--seed 0] [--workers 2] [--quick]
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import favour
from favour.graph.operations import operation_name
from favour.graph.rehearsal import check_arguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

FORMS = ("favour", "onnx", "pt2")
SHARES = {"flips": 0.42, "truncations": 0.15, "crafted": 0.38, "bombs": 0.05}
BAD = ("silent", "unwritten", "raw", "crash", "hang")
MEMORY, PATIENCE = 6 * 2**30, 60.0
INTEGERS = (0, -1, 1, 2, 3, 7, -3, 255, 2**16, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 0.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), -float("inf"))
DTYPES = ("float32", "float64", "float16", "int64", "int8", "bool", "complex64", "qint8", "bits8")


class Trial(NamedTuple):
    number: int
    kind: str
    form: str


class Outcome(NamedTuple):
    trial: Trial
    ended: str
    words: str


# ------------------------------------------------------------------ the good files


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.dropout, self.top = nn.Embedding(10, 6), nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.dropout(torch.relu(self.table(x)).mean(1)))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models and inputs: a few layers, convolutions, tables."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)]
    pictures = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2), nn.Flatten()]
    return {
        "layers": (nn.Sequential(*layers), torch.randn(3, 4)),
        "convolution": (nn.Sequential(*pictures, nn.Linear(12, 2)), torch.randn(3, 1, 6, 6)),
        "tables": (Tables(), torch.randint(10, (3, 5))),
    }


def write_good(folder: Path) -> None:
    """The good files, and copies without a checksum for crafting."""
    for name, (model, x) in networks().items():
        predict = favour.compile(model.eval(), x, check=False)
        predict.save(folder / f"{name}.favour")
        for form in FORMS[1:] if name == "layers" else ():  # tracing takes long, and is not what is tried here
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                favour.export(predict, folder / f"{name}.{form}", check=False)


def answer(path: Path, x: Tensor) -> list[np.ndarray]:
    if path.suffix == ".favour":
        with torch.no_grad():
            belief = favour.load(path)(x)
        leaves = belief if isinstance(belief, tuple | list) else [belief]
        found = [t for b in leaves for t in ((b.mean, b.covariance_matrix) if isinstance(b, favour.Belief) else (b,))]
        return [
            t.detach().resolve_conj().resolve_neg().numpy() if isinstance(t, Tensor) else np.asarray(t) for t in found
        ]
    return list(favour.load_exported(path, **({"threads": 1} if path.suffix == ".onnx" else {}))(x).values())


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(s, t, equal_nan=s.dtype.kind == "f") for s, t in zip(a, b, strict=True)
    )


# ------------------------------------------------------------------ damage


def flipped(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    changed[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def truncated(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.1:
        return content + dice.randbytes(dice.randrange(1, 200))
    near = dice.random() < 0.3  # within the checksum and the directory
    return content[: -dice.randrange(1, 400) if near else dice.randrange(len(content))]


# ------------------------------------------------------------------ crafted predictors


def nasty(dice: random.Random, value: Any) -> Any:
    """Something of about the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return dice.choice(INTEGERS)
    if isinstance(value, float):
        return {"float": repr(dice.choice(FLOATS))}
    if isinstance(value, list):
        return [nasty(dice, v) for v in value] * dice.choice((0, 1, 1, 1, 2))
    if isinstance(value, dict) and "torch" in value:
        return {"torch": dice.choice(DTYPES)}
    return dice.choice([None, True, -1, 2**40, [], [1, -1], {"tuple": [1]}, {"float": "nan"}, "mean", value])


def overloads() -> list[Any]:
    """Every functional overload of aten, and a few that are not."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.partition(".")
        space, _, packet = packet.partition("::")
        if space == "aten":
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if isinstance(op, torch._ops.OpOverload):
                found.append(op)
    return found


def drawn_argument(dice: random.Random, kind: str, nodes: list[str]) -> Any:
    """An argument for a parameter of an operation's schema, fitting or not."""
    if kind.startswith("Optional") and dice.random() < 0.5:
        return None
    if dice.random() < 0.05:
        return nasty(dice, dice.choice([1, 1.0, True, [1], "x"]))
    if "List[Tensor]" in kind or "List[Optional[Tensor]]" in kind:
        return [{"node": dice.choice(nodes)} for _ in range(dice.randrange(4))]
    if "Tensor" in kind:
        return {"node": dice.choice(nodes)}
    small = dice.random() < 0.6
    if "List[int]" in kind or "List[SymInt]" in kind:
        return [dice.randrange(-2, 5) if small else dice.choice(INTEGERS) for _ in range(dice.randrange(5))]
    if "int" in kind.lower() or "number" in kind:
        return dice.randrange(-2, 5) if small else dice.choice(INTEGERS)
    if "float" in kind:
        return {"float": repr(dice.choice(FLOATS))}
    if "bool" in kind:
        return dice.random() < 0.5
    if "str" in kind:
        return dice.choice(["mean", "sum", "bilinear", "trunc", "constant", "bij,bjk->bik", "/etc/passwd"])
    return dice.choice([None, {"torch": dice.choice(DTYPES)}, {"device": dice.choice(["cpu", "meta", "cuda"])}, 1])


def add_call(graph: dict[str, Any], dice: random.Random, known: list[Any]) -> None:
    """One more call, whose result goes to the output, with the shape it has where torch can tell."""
    op = dice.choice(known)
    while dice.random() < 0.7:  # mostly what gets past the list
        try:
            operation_name(op)
            break
        except favour.FavourError:
            op = dice.choice(known)
    nodes = graph["nodes"]
    names = [n["name"] for n in nodes]
    args = [drawn_argument(dice, str(a.type), names) for a in op._schema.arguments if not a.kwarg_only]
    kwargs = {
        a.name: drawn_argument(dice, str(a.type), names)
        for a in op._schema.arguments
        if a.kwarg_only and dice.random() < 0.3
    }
    shape, dtype = described(op, args, kwargs, nodes, dice)
    where = {"module": "", "where": "", "kind": "call", "name": "crafted"}
    nodes.append({**where, "target": str(op), "args": args, "kwargs": {"dict": kwargs}, "shape": shape, "dtype": dtype})
    graph["outputs"] = [{"node": "crafted"}]


def described(
    op: Any, args: list[Any], kwargs: dict[str, Any], nodes: list[dict[str, Any]], dice: random.Random
) -> Any:
    """Shape and dtype of a call as a careful attacker would write them: those that torch's shapes give."""
    symbol = next(s for n in nodes if n["kind"] == "input" for s in n["shape"] if isinstance(s, str))

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(i) for i in item]
        if not isinstance(item, dict):
            return item
        if "node" in item:
            node = next(n for n in nodes if n["name"] == item["node"])
            if node["shape"] is None:
                return 2
            sizes = [2 if s == symbol else s for s in node["shape"]]
            return torch.empty(sizes, dtype=getattr(torch, node["dtype"]), device="meta")
        (kind, inner), *_ = item.items()
        return float(inner) if kind == "float" else getattr(torch, inner) if kind == "torch" else torch.device("meta")

    try:
        operation_name(op)  # other operations, and some arguments, would end this process as well
        given, named = [*map(value, args)], {k: value(v) for k, v in kwargs.items()}
        check_arguments(op, given, named)
        made = op(*given, **named)
        return [symbol if i == 0 and s == 2 else s for i, s in enumerate(made.shape)], str(made.dtype)[6:]
    except Exception:
        return dice.choice(nodes)["shape"], dice.choice(DTYPES[:4])


def crafted_predictor(content: bytes, dice: random.Random, known: list[Any]) -> bytes:
    values = torch.load(io.BytesIO(content), weights_only=True)
    values.pop("checksum", None)
    graph = json.loads(values["graph"])
    how = dice.choice(["call"] * 6 + ["argument"] * 4 + ["target", "shape", "tensor", "text", "wiring"])
    calls = [n for n in graph["nodes"] if n["kind"] == "call"]
    if how == "call":
        add_call(graph, dice, known)
    elif how == "argument":
        node = dice.choice(calls)
        place = dice.randrange(len(node["args"]))
        node["args"][place] = nasty(dice, node["args"][place])
    elif how == "target":
        dice.choice(calls)["target"] = str(dice.choice(known))
    elif how == "shape":
        node = dice.choice(graph["nodes"])
        node["shape"] = nasty(dice, node["shape"] or [2])
        if dice.random() < 0.5:
            node["shape"] = [dice.choice(["9**9**9", "s999", "1//0", "import os", "-1", "2**63", "s0" * 400, "(" * 90])]
    elif how == "tensor":
        name = dice.choice(list(values["store"]))
        tensor = values["store"][name]
        values["store"][name] = dice.choice(
            [
                tensor * float("nan"),
                tensor.flatten()[:0],
                tensor.double(),
                tensor.expand(2, *tensor.shape),
                tensor.flatten(),
                tensor.bool(),
            ]
        )
    elif how == "text":
        where = dice.choice(["settings", "posterior"])
        described_as = json.loads(values[where])
        key = dice.choice(list(described_as))
        described_as[key] = nasty(dice, described_as[key])
        values[where] = json.dumps(described_as)
    else:
        one, other = dice.choice(graph["nodes"]), dice.choice(graph["nodes"])
        one["name"], other["name"] = other["name"], one["name"]
    values["graph"] = json.dumps(graph)
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


# ------------------------------------------------------------------ crafted exports


def members(content: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for item in old.infolist():
            new.writestr(item.filename, change(item.filename.split("/", 1)[1], old.read(item)))
    return file.getvalue()


def crafted_archive(content: bytes, dice: random.Random, known: list[Any]) -> bytes:
    def change(name: str, inner: bytes) -> bytes:
        if name == "extra/favour.json":
            return inner.replace(b'"checksum": true, ', b"")
        if name == "data/weights/model_weights_config.json" and dice.random() < 0.2:
            described_as = json.loads(inner)
            meta = dice.choice(list(described_as["config"].values()))["tensor_meta"]
            key = dice.choice(["sizes", "strides"])
            meta[key] = [{"as_int": dice.choice(INTEGERS)} for _ in meta[key]]
            return json.dumps(described_as).encode()
        if name != "models/model.json":
            return inner
        described_as = json.loads(inner)
        node = dice.choice(described_as["graph_module"]["graph"]["nodes"])
        if dice.random() < 0.3:
            node["target"] = f"torch.ops.{dice.choice(known)}"
        elif node["inputs"]:
            argument = dice.choice(node["inputs"])["arg"]
            for key, value in argument.items():
                if key in ("as_int", "as_ints", "as_float", "as_bool"):
                    made = nasty(dice, value)
                    argument[key] = made if not isinstance(made, dict) else 1e308
        return json.dumps(described_as).encode()

    return members(content, change)


def crafted_onnx(content: bytes, dice: random.Random, known: list[Any]) -> bytes:
    import onnx

    model = onnx.load_from_string(content)
    texts = {p.key: p.value.replace('"checksum": true, ', "") for p in model.metadata_props if p.key == "favour"}
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, texts)
    node = dice.choice(model.graph.node)
    how = dice.choice(["operator", "input", "weight", "dims"])
    if how == "operator":
        node.op_type = dice.choice(
            ["Loop", "If", "RandomNormal", "Gather", "Reshape", "Scan", "Cos", "NoSuch", "MatMul"]
        )
    elif how == "input" and node.input:
        node.input[dice.randrange(len(node.input))] = dice.choice(["input", "nothing", "", node.output[0]])
    elif model.graph.initializer:
        tensor = dice.choice(model.graph.initializer)
        if how == "dims" and tensor.dims:
            tensor.dims[dice.randrange(len(tensor.dims))] = dice.choice(INTEGERS)
        else:
            tensor.raw_data = tensor.raw_data[: dice.randrange(len(tensor.raw_data) + 1)]
    return model.SerializeToString()


CRAFT = {"favour": crafted_predictor, "pt2": crafted_archive, "onnx": crafted_onnx}


def bomb(content: bytes, form: str, dice: random.Random) -> bytes:
    """Files that say they are larger than they are."""
    if form == "onnx":
        import onnx

        model = onnx.load_from_string(content)
        tensor = dice.choice(model.graph.initializer)
        del tensor.dims[:]
        tensor.dims.extend([2 ** dice.randrange(20, 62)])
        return model.SerializeToString()
    how = dice.choice(["deflated", "storage", "shape", "expanded"] if form == "favour" else ["deflated", "sizes"])

    def change(name: str, inner: bytes) -> bytes:
        if how == "deflated" and re.search(r"data/0$|weight_0$", name):
            return b"\0" * 2 ** dice.randrange(20, 26)
        if how == "storage" and name == "data.pkl":  # the number of entries, in one byte
            return re.sub(rb"(cpuq.)K.t", lambda m: m[1] + b"K\xfft", inner)
        if how == "shape" and name == "data.pkl":
            return inner.replace(b"K\x08", b"J\xff\xff\xff\x7f", 1)
        if how == "sizes" and name == "data/weights/model_weights_config.json":
            return re.sub(rb'"as_int": \d+', b'"as_int": %d' % (2 ** dice.randrange(20, 62)), inner, count=1)
        return inner

    if how == "expanded":
        values = torch.load(io.BytesIO(content), weights_only=True)
        values["starts"] = {"a": torch.zeros(1).expand(2 ** dice.randrange(20, 40), 4)}
        file = io.BytesIO()
        torch.save(values, file)
        return file.getvalue()
    return members(content, change, zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED)


# ------------------------------------------------------------------ trials


class Range:
    """Where a worker tries files: the good ones, their answers, and a place for bad ones."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed, self.known = seed, overloads()
        self.inputs = {name: x for name, (_, x) in networks().items()}
        self.good = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.wanted = {name: answer(folder / name, self.inputs[name.split(".")[0]]) for name in self.good}
        self.place = Path(tempfile.mkdtemp(prefix="files-campaign-"))

    def run(self, trial: Trial) -> Outcome:
        dice = random.Random(f"{self.seed} {trial.number}")
        name = dice.choice([n for n in self.good if n.endswith(trial.form)])
        content = self.good[name]
        if trial.kind == "flips":
            bad = flipped(content, dice)
        elif trial.kind == "truncations":
            bad = truncated(content, dice)
        elif trial.kind == "bombs":
            bad = bomb(content, trial.form, dice)
        else:
            bad = CRAFT[trial.form](content, dice, self.known)
        path = self.place / f"bad.{trial.form}"
        path.write_bytes(bad)
        x = self.inputs[name.split(".")[0]]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = answer(path, x)
                if same(found, self.wanted[name]):
                    return Outcome(trial, "unchanged", "")
                if trial.kind in ("flips", "truncations"):
                    return Outcome(trial, "silent", name)
                for fill in (1.25, -7.5):  # memory that is handed out again
                    [torch.full((size,), fill) for size in (4, 64, 1024, 2**14) for _ in range(50)]
                    if not same(answer(path, x), found):
                        return Outcome(trial, "unwritten", name)
            return Outcome(trial, "answered", "")
        except favour.FavourError as error:
            return Outcome(trial, "refused", type(error).__name__)
        except Exception as error:
            return Outcome(trial, "raw", f"{type(error).__name__}: {str(error)[:200]} {traceback.format_exc()[-400:]}")


def work(pipe: Connection, folder: str, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    ground = Range(Path(folder), seed)
    pipe.send(None)
    while (trial := pipe.recv()) is not None:
        pipe.send(ground.run(trial))


def trials(count: int) -> list[Trial]:
    found = []
    for kind, share in SHARES.items():
        for i in range(round(count * share)):
            form = FORMS[i % 3] if kind != "crafted" else ("favour", "favour", "favour", "pt2", "onnx")[i % 5]
            found.append(Trial(len(found), kind, form))
    return found


def outcomes(todo: list[Trial], folder: Path, seed: int, workers: int) -> Iterator[Outcome]:
    """Of all trials, by processes that are replaced when they die."""
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(todo))
    busy: dict[Any, tuple[Any, Trial | None, float]] = {}

    def start() -> None:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, str(folder), seed), daemon=True)
        process.start()
        there.close()
        busy[here] = process, None, time.monotonic() + 4 * PATIENCE

    for _ in range(workers):
        start()
    while busy:
        ready = wait(list(busy), timeout=1.0)
        for pipe, (process, trial, end) in list(busy.items()):
            ended = None
            if pipe in ready:
                try:
                    result = pipe.recv()
                    if result is not None:
                        yield result
                    if waiting:
                        following = waiting.pop()
                        pipe.send(following)
                        busy[pipe] = process, following, time.monotonic() + PATIENCE
                    else:
                        pipe.send(None)
                        del busy[pipe]
                except (EOFError, OSError):
                    process.join()
                    ended = "crash"
            elif time.monotonic() > end:
                process.kill()
                process.join()
                ended = "hang"
            if ended is not None:
                del busy[pipe]
                if trial is None:
                    raise RuntimeError(f"a worker could not start: exit code {process.exitcode}")
                yield Outcome(trial, ended, f"exit code {process.exitcode}")
                if waiting:
                    start()


def campaign(count: int, seed: int = 0, workers: int = 1) -> dict[str, Any]:
    """Counts by kind, form and end, and what was bad."""
    counts: dict[str, Counter[str]] = {}
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        write_good(Path(folder))
        for i, outcome in enumerate(outcomes(trials(count), Path(folder), seed, workers)):
            counts.setdefault(f"{outcome.trial.kind} .{outcome.trial.form}", Counter())[outcome.ended] += 1
            if outcome.ended in BAD:
                bad.append({**outcome.trial._asdict(), "ended": outcome.ended, "words": outcome.words})
                print(bad[-1], flush=True)
            if i % 500 == 499:
                print(i + 1, "trials", flush=True)
    total = sum(counts.values(), Counter())
    return {
        "trials": total.total(),
        "seed": seed,
        "bad": {name: total[name] for name in BAD},
        "ended": {name: dict(sorted(c.items())) for name, c in sorted(counts.items())},
        "examples": bad[:50],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="120 trials, and nothing is written")
    given = parser.parse_args()
    start = time.perf_counter()
    found = campaign(120 if given.quick else given.trials, given.seed, given.workers)
    found["seconds"] = round(time.perf_counter() - start)
    print(json.dumps(found, indent=1))
    if not given.quick:
        from common import RESULTS, write

        (RESULTS / "campaigns").mkdir(exist_ok=True)
        write("campaigns/files", found)


if __name__ == "__main__":
    main()
