"""Networks of the size people deploy: a pass beside the forward pass, its memory, and what compiling it takes.

Batch 32, pictures of 224 × 224 or 128 tokens, architectures of `transformers` with random weights. One run, in turns:
the plain forward pass, the belief in float32 and with sweeps in bf16. On a GPU, peak memory is what the allocator
counts above what is there before the pass.

    python benchmarks/real.py [--models vit resnet18 …] [--batch 32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from common import time_all, write
from torch import Tensor, nn

import favour

WIDE = {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "layer_type": "bottleneck"}
SLIM = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}


def pictures(batch: int) -> Tensor:
    """Pictures of noise."""
    return torch.randn(batch, 3, 224, 224)


def tokens(batch: int) -> Tensor:
    """Rows of 128 tokens."""
    return torch.randint(0, 30000, (batch, 128))


def vit() -> nn.Module:
    """ViT-B/16 with dropout .1 and 10 outputs."""
    import transformers

    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=10, **rates))


def bert() -> nn.Module:
    """BERT-base with 2 classes."""
    import transformers

    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=2))


def resnet18() -> nn.Module:
    """ResNet-18 with dropout behind every ReLU and 10 outputs."""
    import transformers

    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10, **SLIM))
    for module in model.modules():
        if isinstance(getattr(module, "activation", None), nn.ReLU):
            module.activation = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
    return model


def resnet50() -> nn.Module:
    """ResNet-50 with dropout in a head of two layers."""
    import transformers

    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10, **WIDE))
    head = [nn.Dropout(0.1), nn.Linear(2048, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10)]
    model.classifier = nn.Sequential(nn.Flatten(), *head)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "vit": (vit, pictures),
    "bert": (bert, tokens),
    "resnet18": (resnet18, pictures),
    "resnet50": (resnet50, pictures),
}


def peak(run: Callable[[], Any]) -> float:
    """GiB of a GPU that a call takes above what is there."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def row(name: str, batch: int, rounds: int, device: str) -> dict[str, float | str]:
    """One network."""
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make().eval().requires_grad_(False).to(device)
    x = data(batch).to(device)
    start = time.perf_counter()
    predict = favour.compile(model, x[:2], method="adjoint", check=False)
    seconds = time.perf_counter() - start
    narrow = favour.compile(model, x[:2], method="adjoint", precision="bf16", check=False)
    calls = {"forward": lambda: model(x), "float32": lambda: predict(x), "bf16": lambda: narrow(x)}
    with torch.no_grad():
        times = time_all(calls, rounds, 1)
        found: dict[str, float | str] = {
            "network": (make.__doc__ or "").rstrip("."),
            "seconds to compile": seconds,
            "forward, milliseconds": 1e3 * times["forward"],
            "float32 sweeps, forward passes": times["float32"] / times["forward"],
            "bf16 sweeps, forward passes": times["bf16"] / times["forward"],
        }
        if device == "cuda":
            plain = peak(calls["forward"])
            found["forward, peak GiB"] = plain
            found["float32 sweeps, peak of the forward's"] = peak(calls["float32"]) / plain
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="real", help="name under results/")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {}
    for name in given.models:
        rows[name] = row(name, given.batch, given.rounds, device)
        print(name, rows[name], flush=True)
        write(given.out, {"batch": given.batch, "rows": rows})


if __name__ == "__main__":
    main()
