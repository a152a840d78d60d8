"""What predictions are expected to cost by counting (`Predictor.cost`), beside what they take, in eager code.

One thread of a CPU, float32, the default method but where a row says so. Batches are those of the table. The forward
pass is the model's own. One run: forward pass and prediction in turns, the least of several rounds.

    python benchmarks/expected.py [--only mlp unet] [--rounds 8]
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from common import keep_freed_memory, time_all, write
from torch import Tensor, nn

import favour
from favour.inspect.expected import expected
from favour_studies.bench.networks import lenet, mlp, resnet18, transformer

Case = tuple[nn.Module, Any, dict[str, Any]]


def made(name: str, head: str, inputs: dict[str, Tensor], **sizes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of `transformers` with random weights."""
    import transformers

    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes)), inputs


def spread(model: nn.Module, ends: tuple[str, ...]) -> dict[str, Tensor]:
    """A posterior of one variance for each weight whose name ends so: a thousandth of its mean square."""
    chosen = {n: p.detach() for n, p in model.named_parameters() if p.ndim > 1 and n.endswith(ends)}
    return {n: torch.full_like(p, 1e-3 * float(p.square().mean())) for n, p in chosen.items()}


class Block(nn.Sequential):
    """Two convolutions, each with batch norm, ReLU and dropout."""

    def __init__(self, inputs: int, outputs: int, p: float = 0.1) -> None:
        layers: list[nn.Module] = []
        for n in (inputs, outputs):
            layers += [nn.Conv2d(n, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.Dropout(p)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Two levels down, two up."""

    def __init__(self, widths: tuple[int, int, int] = (8, 16, 32)) -> None:
        super().__init__()
        a, b, c = widths
        self.down = nn.ModuleList([Block(1, a), Block(a, b), Block(b, c)])
        self.up = nn.ModuleList([Block(c + b, b), Block(b + a, a)])
        self.pool, self.wide, self.out = nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.Conv2d(a, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](self.pool(a))
        c = self.down[2](self.pool(b))
        b = self.up[0](torch.cat([self.wide(c), b], 1))
        return self.out(self.up[1](torch.cat([self.wide(b), a], 1)))


class Recurrent(nn.Module):
    """Dropout, a GRU, its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.gru, self.out = nn.Dropout(0.1), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.drop(x))[0][:, -1])


def words(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 60, (batch, length))}


def pixels(batch: int, side: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, side, side)}


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
RATES = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def bert(hidden: int = 64) -> Case:
    sizes = SMALL | {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    return *made("Bert", "ForSequenceClassification", words(16, 32), vocab_size=60, num_labels=3, **sizes), {}


def gpt2() -> Case:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 60, "num_labels": 3}
    return *made("GPT2", "ForSequenceClassification", words(16, 32), pad_token_id=0, **sizes), {}


def vit() -> Case:
    return *made("ViT", "ForImageClassification", pixels(16), image_size=32, patch_size=8, **SMALL, **RATES), {}


def t5() -> Case:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    return *made("T5", "EncoderModel", words(8, 32), **sizes), {}


def mamba() -> Case:
    sizes = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "vocab_size": 60, "use_cache": False}
    model, x = made("Mamba", "Model", words(8, 16), **sizes)
    return model, x, {"posterior": spread(model, ("out_proj.weight",))}


def convnext() -> Case:
    sizes = {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 2], "num_stages": 3, "patch_size": 2, "num_labels": 5}
    model, x = made("ConvNext", "ForImageClassification", pixels(8), drop_path_rate=0.1, **sizes)
    return model, x, {"posterior": spread(model, ("conv.weight", ".weight"))}


def resnet_posterior() -> Case:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
    model, x = made("ResNet", "ForImageClassification", pixels(16), **sizes)
    return model, x, {"posterior": spread(model, ("convolution.weight", "classifier.1.weight"))}


def highest(places: int) -> Case:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 3)), torch.randn(32, 3, places, places), {}


def laplace() -> Case:
    model = mlp(64, 128, 128, 10, p=0.0)
    return model, torch.randn(256, 64), {"posterior": spread(model, ("weight",))}


MODELS: dict[str, Callable[[], Case]] = {
    "MLP 64-128-128-10": lambda: (mlp(64, 128, 128, 10), torch.randn(256, 64), {}),
    "the same, tangents": lambda: (mlp(64, 128, 128, 10), torch.randn(256, 64), {"method": "adjoint"}),
    "the same, one input": lambda: (mlp(64, 128, 128, 10), torch.randn(1, 64), {}),
    "the same, dplr": lambda: (mlp(64, 128, 128, 10), torch.randn(256, 64), {"method": "dplr"}),
    "MLP with a posterior": laplace,
    "MLP 13-100-100-1": lambda: (mlp(13, 100, 100, 1), torch.randn(512, 13), {}),
    "MLP 784-400-400-10": lambda: (mlp(784, 400, 400, 10), torch.rand(128, 784), {}),
    "LeNet everywhere": lambda: (lenet(0.2, 0.1), torch.rand(64, 1, 28, 28), {}),
    "LeNet, two top layers": lambda: (lenet(0.2), torch.rand(64, 1, 28, 28), {}),
    "ResNet-18, slim": lambda: (resnet18((16, 32, 64, 128)), torch.rand(8, 3, 32, 32), {}),
    "ResNet with a posterior": resnet_posterior,
    "encoder 2 x 64": lambda: (transformer(64, 2), torch.rand(64, 1, 28, 28), {}),
    "BERT, small": bert,
    "BERT, wider": partial(bert, 128),
    "GPT-2, small": gpt2,
    "ViT, small": vit,
    "T5 encoder, small": t5,
    "Mamba with a posterior, small": mamba,
    "ConvNeXt with a posterior, small": convnext,
    "UNet": lambda: (UNet(), torch.rand(8, 1, 64, 64), {}),
    "UNet, variances": lambda: (UNet(), torch.rand(8, 1, 64, 64), {"method": "diag"}),
    "GRU of 20 steps": lambda: (Recurrent(), torch.randn(32, 20, 16), {}),
    "maximum over 16 x 16": lambda: highest(16),
}


def called(function: Callable[..., object], x: Any) -> Callable[[], object]:
    return partial(function, **x) if isinstance(x, Mapping) else partial(function, x)


def row(case: Case, rounds: int) -> dict[str, Any]:
    model, x, settings = case
    model = model.eval().requires_grad_(False)
    tensors = x if isinstance(x, Mapping) else {"": x}
    few = {k: t[:2] for k, t in tensors.items()}
    example = few if isinstance(x, Mapping) else few[""]
    inputs = next(iter(tensors.values())).shape[0]
    predict = favour.compile(model, example, check=False, **settings)
    args, kwargs = ((), few) if isinstance(x, Mapping) else ((few[""],), {})
    predict.cost(*args, **kwargs)
    own = None if any(isinstance(m, nn.TransformerEncoder) for m in model.modules()) else model  # fused in evaluation
    counted = expected(predict, args, kwargs, forward=own)
    forward = called(model, x)
    times = time_all({"forward": forward, "prediction": called(predict, x)}, rounds, 2)
    ratio = times["prediction"] / times["forward"]
    choice = predict.method.choose(predict.plain_plan) if hasattr(predict.method, "choose") else predict.method
    return {
        "method": choice.name,
        "inputs": inputs,
        "forward, milliseconds": times["forward"] * 1e3,
        "prediction, milliseconds": times["prediction"] * 1e3,
        "expected, milliseconds": counted.seconds(inputs) * 1e3,
        "forwards": ratio,
        "expected forwards": counted.forwards(inputs),
        "expected over measured": counted.forwards(inputs) / ratio,
        "products alone": choice.cost(predict.plain_plan),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="words that rows must contain")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", default="expected")
    asked = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for name, case in MODELS.items():
            if asked.only and not any(word.lower() in name.lower() for word in asked.only):
                continue
            torch.manual_seed(0)
            rows[name] = r = row(case(), asked.rounds)
            print(
                f"{name:34s} {r['method']:8s} {r['inputs']:4d} inputs {r['prediction, milliseconds']:8.2f} ms "
                f"{r['forwards']:7.1f} forward passes, expected {r['expected forwards']:7.1f} "
                f"({r['expected over measured']:.2f}), products alone {r['products alone']:6.1f}",
                flush=True,
            )
    off = [max(r["expected over measured"], 1 / r["expected over measured"]) for r in rows.values()]
    summary = {"rows": len(off), "within 1.5": sum(f <= 1.5 for f in off), "median factor": statistics.median(off)}
    print(summary)
    if not asked.only:
        write(asked.out, {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
