"""Ordinary models in what people wrap around them: compilers, data parallelism, adapters, quantisation."""

from __future__ import annotations

import torch
from specimen import Specimen, specimen
from torch import nn

TORCH = specimen("torch")


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2),
                         nn.Linear(32, 3))  # fmt: skip


@TORCH
def compiled():
    return Specimen(torch.compile(small(), backend="eager"), torch.randn(5, 8))


@TORCH
def data_parallel():
    return Specimen(nn.DataParallel(small()), torch.randn(5, 8))


@TORCH
def distributed():
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Specimen(nn.parallel.DistributedDataParallel(small()), torch.randn(5, 8))


@TORCH
def quantised():
    model = torch.ao.quantization.quantize_dynamic(small(), {nn.Linear}, dtype=torch.qint8)
    return Specimen(model, torch.randn(5, 8))


@TORCH
def scripted():
    return Specimen(torch.jit.script(small()), torch.randn(5, 8))


@TORCH
def transformer():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.encoder(x).mean(1))

    return Specimen(Model(), torch.randn(4, 6, 16))


PEFT = specimen("peft")


def adapted(uncertain: tuple[str, ...] = (), **options) -> Specimen:
    import transformers
    from peft import LoraConfig, get_peft_model
    from text import RATES, SMALL, TEXT, words

    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **TEXT, **RATES))
    config = LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=False, **options)
    return Specimen(get_peft_model(model, config), words(), uncertain)


@PEFT
def lora():
    return adapted(lora_dropout=0.1)


@PEFT
def lora_posterior():
    return adapted(("lora_A.default.weight", "lora_B.default.weight"))
