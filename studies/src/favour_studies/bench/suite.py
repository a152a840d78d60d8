"""The benchmark itself: networks × methods × batch sizes, eager and compiled, beside three samplers.

For every network a large sample is drawn once and each method's covariance is judged against it. Then, batch size by
batch size, the plain forward pass, the samplers and the methods are timed in turns. The figure of merit is the
speed-up at equal error: the time a sampler takes for as many draws as the method is worth, over the method's own.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import favour
from favour.errors import InvalidValue, UnknownName
from favour_studies.bench import record, samplers
from favour_studies.bench.measure import Judgement, Reference, Time, once, time_all
from favour_studies.bench.networks import Network, Trained, chosen, prepare
from favour_studies.harness.memory import peak_memory

METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "adjoint": {"method": "adjoint"},
    "adjoint-bf16": {"method": "adjoint", "precision": "bf16"},
    "adjoint-r8": {"method": "adjoint", "rank": 8, "iterations": 3},
    "secants": {"method": "adjoint", "secant": True},
    "pairs": {"method": "adjoint", "pairs": 16},
    "directions": {"method": "adjoint", "directions": 3},
    "directions-bf16": {"method": "adjoint", "directions": 3, "precision": "bf16"},
    "dplr": {"method": "dplr"},
    "dplr-r1": {"method": "dplr", "rank": 1},
    "dplr-r2": {"method": "dplr", "rank": 2},
    "diag": {"method": "diag"},
}
DEFAULT_METHODS = "auto,dplr,diag"
BATCHES = (1, 32, 512)
MODES = ("eager", "compiled")
COVECTORS = 64  # a reverse sweep over more outputs than this is not attempted


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run was asked for."""

    networks: tuple[str, ...]
    methods: tuple[str, ...]
    batches: tuple[int, ...] = BATCHES
    device: str = "cpu"
    modes: tuple[str, ...] = MODES
    data: str | None = None
    checkpoints: str | None = None
    samples: float = 1.0  # times the networks' own numbers
    budget: float = 10.0  # seconds of timing per network and batch size
    limit: float = 4.0  # seconds a plain forward pass may take
    graphs: bool = False  # CUDA graphs for all that is compiled
    seed: int = 0

    def describe(self) -> dict[str, Any]:
        """For the record, without the user's folders."""
        folders = {k: "a local folder" for k in ("data", "checkpoints") if getattr(self, k) is not None}
        return dataclasses.asdict(self) | folders

    @property
    def compiler(self) -> dict[str, Any]:
        """Arguments of `torch.compile`, the same for all that is compiled.

        Guards are kept for tensors only: modules do not change while they are timed, and looking through all of their
        attributes takes longer than a small network.
        """
        keep = getattr(torch.compiler, "keep_tensor_guards_unsafe", None)
        options = {} if keep is None else {"guard_filter_fn": keep}
        return {"dynamic": False, "options": options | ({"triton.cudagraphs": True} if self.graphs else {})}


def methods(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of methods, given with commas between them.

    >>> methods("auto,diag")
    ('auto', 'diag')
    """
    wanted = (names or DEFAULT_METHODS).split(",") if isinstance(names, str | None) else list(names)
    wanted = [n.strip() for n in wanted]
    unknown = [n for n in wanted if n not in METHODS]
    if unknown:
        raise UnknownName(f"no method {', '.join(map(repr, unknown))}; there are {', '.join(METHODS)}.")
    return tuple(wanted)


def say(text: str) -> None:
    """A line on the error stream, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def run(
    networks: str | None = None,
    names: str | Sequence[str] | None = None,
    *,
    out: str | Path | None = None,
    append: bool = False,
    tell: Callable[[str], Any] = say,
    **options: Any,
) -> dict[str, Any]:
    """Run the benchmark and return its record.

    Args:
        networks: Names separated by commas (`favour_studies.bench.NETWORKS`); None for all.
        names: Methods, likewise (`favour_studies.bench.METHODS`).
        out: File of the record, rewritten after every network.
        append: Keep what the file holds of networks and batch sizes that are not measured now.
        tell: Called with lines about what goes on.
        **options: Fields of `Options`.

    Example:
        >>> result = run("mlp", "auto,diag", batches=(512,), out="bench.json")  # doctest: +SKIP
    """
    asked = Options(tuple(n.name for n in chosen(networks)), methods(names), **options)
    _check(asked)
    result: dict[str, Any] = {
        "format": record.FORMAT,
        "environment": record.environment(asked.device),
        "options": asked.describe(),
        "networks": {},
        "baselines": [],
        "rows": [],
        "skipped": [],
    }
    before = record.read(Path(out)) if append and out is not None and Path(out).is_file() else None
    for network in chosen(networks):
        with torch.no_grad():
            measure(network, asked, result, tell)
        if out is not None:
            record.write(Path(out), result if before is None else merged(before, result))
    return result if before is None else merged(before, result)


def _check(asked: Options) -> None:
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise InvalidValue("`device` is cuda, and torch finds no GPU here; use cpu.")
    unknown = [m for m in asked.modes if m not in MODES]
    if unknown or not asked.modes:
        raise InvalidValue(f"`modes` is {asked.modes}; choose from {', '.join(MODES)}.")
    if not asked.batches or min(asked.batches) < 1:
        raise InvalidValue(f"`batches` is {asked.batches}; give batch sizes of at least 1.")


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new record, and what the old one holds besides."""
    result = dict(new)
    result["networks"] = {**old["networks"], **new["networks"]}
    done = {(r["network"], r["batch"], r["device"]) for part in ("rows", "skipped") for r in new[part]}
    for part in ("baselines", "rows", "skipped"):
        kept = [r for r in old.get(part, []) if (r["network"], r["batch"], r["device"]) not in done]
        result[part] = [*kept, *new[part]]
    return result


# ------------------------------------------------------------------------------------------------------ one network


def measure(network: Network, asked: Options, result: dict[str, Any], tell: Callable[[str], Any]) -> None:
    """Everything about one network, added to the record."""
    folder = Path(asked.checkpoints) if asked.checkpoints else None
    with torch.enable_grad():
        trained = prepare(network, asked.data, folder, asked.device, tell)
    model = trained.model
    x = trained.batch(network.inputs, asked.device)
    reference = _reference(trained, x, asked, tell)
    result["networks"][network.name] = {
        "title": network.title,
        "weights": trained.origin,
        "parameters": sum(p.numel() for p in model.parameters()),
        "outputs": reference.mean.shape[-1],
        "inputs judged": network.inputs,
        "reference samples": reference.n,
        "error of n samples times √n": reference.constant,
        "the same from fourth moments": reference.law,
        "measured errors of samples": reference.measured,
        "code": result["environment"]["code"],
    }
    predictors: dict[str, favour.Predictor] = {}
    judged: dict[str, Judgement] = {}
    for name in asked.methods:
        why = _unsuitable(name, reference.mean.shape[-1])
        if why:
            result["skipped"] += [_place(network, name, b, None, asked) | {"why": why} for b in asked.batches]
            continue
        predictors[name] = favour.compile(model, x[:2], task=network.task, check=False, **METHODS[name])
        belief = predictors[name](x)
        judged[name] = reference.judge(belief.mean, belief.covariance_matrix)
    for size in asked.batches:
        _batch(trained, trained.batch(size, asked.device), predictors, judged, asked, result, tell)


def _unsuitable(method: str, outputs: int) -> str | None:
    settings = METHODS[method]
    if settings.get("method") == "adjoint" and "directions" not in settings and outputs > COVECTORS:
        return f"{outputs} outputs would need as many covectors; task='classification' takes a few directions instead"
    if settings.get("directions", 0) > outputs:
        return f"{settings['directions']} directions of {outputs} output{'s' * (outputs > 1)}"
    return None


def _place(network: Network, method: str | None, batch: int, mode: str | None, asked: Options) -> dict[str, Any]:
    return {"network": network.name, "method": method, "batch": batch, "mode": mode, "device": asked.device}


def _reference(trained: Trained, x: Tensor, asked: Options, tell: Callable[[str], Any]) -> Reference:
    network = trained.network
    n = max(100, int(network.samples[asked.device == "cuda"] * asked.samples))
    tell(f"{network.title}: {n} samples of {len(x)} inputs ({trained.origin})")
    predict = favour.compile(trained.model.head, trained.model.trunk(x)[:2], check=False)
    h, generator = trained.model.trunk(x), torch.Generator(asked.device).manual_seed(asked.seed)

    def sample(count: int) -> Tensor:
        return predict.sample(h, n=count, generator=generator)

    return Reference.draw(sample, n, min(n, 500))


def _batch(
    trained: Trained,
    x: Tensor,
    predictors: Mapping[str, favour.Predictor],
    judged: Mapping[str, Judgement],
    asked: Options,
    result: dict[str, Any],
    tell: Callable[[str], Any],
) -> None:
    """Time everything at one batch size."""
    network, model = trained.network, trained.model
    batch, device = len(x), asked.device
    seconds = _forward_seconds(model, x, asked)
    if seconds > asked.limit:
        why = f"a forward pass takes about {seconds:.1f} s, over the limit of {asked.limit:g} s"
        result["skipped"] += [
            _place(network, name, batch, mode, asked) | {"why": why} for name in predictors for mode in asked.modes
        ]
        return
    _fresh_compiler()
    compiles = "compiled" in asked.modes
    tell(f"{network.title}, batch {batch}: choosing how to sample")
    drawn = [
        samplers.naive(model, x),
        samplers.batched(model, x),
        samplers.cached(model, x, asked.compiler if compiles else None),
    ]
    candidates: dict[str, Callable[[], Any]] = {"forward": lambda: model(x)}
    if compiles:
        plain = samplers.compiled(model, **asked.compiler)
        candidates["forward, compiled"] = lambda: plain(x)
    for sampler in drawn:
        candidates[sampler.name] = sampler.chunk
        if sampler.fixed is not None:
            candidates[f"{sampler.name}, once"] = sampler.fixed
    rows: list[tuple[str, str]] = []
    for name, predict in predictors.items():
        for mode in asked.modes:
            call: Callable[..., Any] = predict
            if mode == "compiled":
                call = samplers.compiled(predict, fullgraph=True, **asked.compiler)
            tell(f"{network.title}, batch {batch}: {name}, {mode}")
            failure = _failure(call, x)
            if failure:
                result["skipped"].append(_place(network, name, batch, mode, asked) | {"why": failure})
                continue
            rows.append((name, mode))
            candidates[f"{name} | {mode}"] = _call(call, x)
    tell(f"{network.title}, batch {batch}: timing")
    times = time_all(candidates, device, asked.budget, (3, 40))
    costs = {s.name: _cost(s, times) for s in drawn}
    forward, compiled = times["forward"], times.get("forward, compiled")
    memory = peak_memory(lambda: model(x), device)
    result["baselines"].append(
        _place(network, None, batch, None, asked)
        | {
            "forward": forward.as_dict(),
            "forward, compiled": compiled.as_dict() if compiled else None,
            "memory": memory,
            "samplers": costs,
        }
    )
    for name, mode in rows:
        taken = times[f"{name} | {mode}"]
        counted = predictors[name] if device == "cpu" or mode == "eager" else candidates[f"{name} | {mode}"]
        used = peak_memory(_call(counted, x) if isinstance(counted, nn.Module) else counted, device)
        result["rows"].append(
            _place(network, name, batch, mode, asked)
            | {"time": taken.as_dict()}
            | ratios(taken, forward, compiled)
            | {"memory": used, "memory over forward": used / max(memory, 1)}
            | dataclasses.asdict(judged[name])
            | merit(taken.median, judged[name].worth, costs)
        )


def _forward_seconds(model: nn.Module, x: Tensor, asked: Options) -> float:
    """About how long a forward pass takes, from a few inputs; tried again where a busy machine may be to blame."""
    few = x[:32]
    least = float("inf")
    for attempt in range(4):
        least = min(least, *(once(lambda: model(few), asked.device) for _ in range(3)))
        if least * len(x) / len(few) <= asked.limit:
            break
        time.sleep(attempt * min(asked.limit, 1.0))
    return least * len(x) / len(few)


def ratios(taken: Time, forward: Time, compiled: Time | None) -> dict[str, Any]:
    """The cost in forward passes, and its spread: relative spreads of both times added."""
    relative = taken.spread / taken.median + forward.spread / forward.median
    forwards = taken.median / forward.median
    return {
        "forwards": forwards,
        "forwards spread": forwards * relative,
        "compiled forwards": taken.median / compiled.median if compiled else None,
    }


def merit(seconds: float, worth: float, costs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The cost in draws of each sampler, and the speed-up at equal error."""
    return {
        "samples": {name: seconds / c["seconds per draw"] for name, c in costs.items()},
        "speed-up": {name: (c["once"] + worth * c["seconds per draw"]) / seconds for name, c in costs.items()},
    }


def _cost(sampler: samplers.Timed, times: Mapping[str, Time]) -> dict[str, Any]:
    chunk = times[sampler.name]
    fixed = times.get(f"{sampler.name}, once")
    return {
        "variant": sampler.variant,
        "draws at a time": sampler.draws,
        "seconds per draw": chunk.median / sampler.draws,
        "spread per draw": chunk.spread / sampler.draws,
        "once": fixed.median if fixed else 0.0,
        "draws per forward": times["forward"].median * sampler.draws / chunk.median,
    }


def _call(function: Callable[..., Any], x: Tensor) -> Callable[[], Any]:
    return lambda: function(x)


def _failure(call: Callable[..., Any], x: Tensor) -> str | None:
    """Why a candidate cannot run, if it cannot: a compiler may refuse, or memory be short."""
    try:
        call(x)
    except Exception as error:
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
    return None


def _fresh_compiler() -> None:
    """Forget compiled code, and let every candidate here be compiled."""
    import torch._dynamo

    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
