"""Unmodified models from `transformers`, small and untrained, and a trained encoder, against their own samples."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from networks import digits, moments, relative_error, sampling_error
from torch import nn

import favour

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 3}
TEXT = {"vocab_size": 50, "max_position_embeddings": 16}


def tokens(masked=True):
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    ids = {"input_ids": torch.randint(0, 50, (3, 7))}
    return ids | {"attention_mask": mask} if masked else ids


def pixels():
    return {"pixel_values": torch.randn(3, 3, 16, 16)}


def llama():
    """Its RMS norm is written by hand, its heads share keys, its positions are rotations."""
    more = {"num_key_value_heads": 2, "attention_dropout": 0.1, "pad_token_id": 0, "use_cache": False}
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL, **TEXT, **more)), tokens()


class Pooled(nn.Module):
    """The mean of the last hidden states."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask).last_hidden_state.mean(1)


def t5():
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return Pooled(transformers.T5EncoderModel(config)), tokens()


class LastLogits(nn.Module):
    """Logits of the next token."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).logits[:, -1]


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **TEXT)), tokens()


def distilbert():
    config = transformers.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=3, **TEXT)
    return transformers.DistilBertForSequenceClassification(config), tokens()


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    special = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config = transformers.GPT2Config(vocab_size=50, **sizes, **special)
    return LastLogits(transformers.GPT2LMHeadModel(config)), tokens(masked=False)


def vit():
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SMALL, **rates)
    return transformers.ViTForImageClassification(config), pixels()


def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=3, **sizes)), pixels()


def convnext():
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=3, **sizes)), pixels()


# Model, and parameters with a mean-field posterior beside the model's own dropout.
MODELS = {
    "bert": (bert, ()),
    "bert, uncertain weights": (bert, ("query.weight", "dense.weight", "embeddings.weight")),
    "bert, uncertain norms": (bert, ("LayerNorm.weight", "LayerNorm.bias")),
    "distilbert": (distilbert, ()),
    "gpt2": (gpt2, ()),
    "gpt2, uncertain weights": (gpt2, ("c_attn.weight", "c_attn.bias", "wpe.weight", "ln_1.weight")),
    "vit": (vit, ()),
    "vit, uncertain weights": (vit, ("q_proj.weight", "query.weight", "cls_token", "position_embeddings")),
    "resnet": (resnet, ("convolution.weight", "classifier.1.weight", "normalization.weight")),
    "convnext": (convnext, ("pwconv1.weight", "classifier.weight", "layer_scale_parameter")),
    "llama": (llama, ("layernorm.weight",)),
    "t5": (t5, ()),
}
# Of the mean in standard deviations, averaged and the worst, and of the covariance. 2,000 draws alone make an error of
# about 0.02 and 0.04 to 0.08.
OF_MEAN, OF_WORST, OF_COVARIANCE = 0.1, 0.3, 0.2


def scores(output):
    return output.logits if hasattr(output, "logits") else output


@pytest.mark.parametrize("name", MODELS)
def test_model_from_transformers(name):
    build, uncertain = MODELS[name]
    torch.manual_seed(0)
    model, example = build()
    model.eval()
    posterior = {
        n: (0.1 * p.detach().abs().mean()).square().expand(p.shape).clone()
        for n, p in model.named_parameters()
        if n.endswith(tuple(uncertain)) and uncertain
    }
    predict = favour.compile(model, example, posterior=posterior or None, method="adjoint")
    output = predict(**example)
    assert type(output) is type(model(**example)) or isinstance(model, LastLogits | Pooled)
    belief = scores(output)
    assert isinstance(belief, favour.Belief)
    draws = scores(predict.sample(**example, n=2000, generator=torch.Generator().manual_seed(1)))
    mean, matrix = moments(draws)
    off = (belief.mean - mean).abs() / draws.std(0)
    relative = relative_error(belief.covariance_matrix, matrix)
    print(f"{name}: mean {off.mean():.3f}, worst {off.max():.3f} standard deviations, covariance {relative:.3f}")
    assert off.mean() < OF_MEAN and off.max() < OF_WORST
    assert relative < OF_COVARIANCE
    assert not model.training


def test_silenced_model_is_the_model():
    torch.manual_seed(0)
    model, example = bert()
    predict = favour.compile(model, example)
    silent = favour.compile(model, example, dropout=dict.fromkeys(predict.graph.dropout_modules, 0.0))
    torch.testing.assert_close(silent(**example).logits.mean, model.eval()(**example).logits, atol=1e-5, rtol=1e-5)
    assert "bert.encoder.layer.0.attention.self" in predict.graph.dropout_modules


def test_another_batch_size_and_mask():
    torch.manual_seed(0)
    model, example = bert()
    predict = favour.compile(model, example)
    wide = {k: v.repeat(2, 1)[:5] for k, v in example.items()}
    torch.testing.assert_close(predict(**wide).logits.mean[:3], predict(**example).logits.mean, atol=1e-5, rtol=1e-5)
    other = dict(example, attention_mask=torch.ones_like(example["attention_mask"]))
    assert not torch.allclose(predict(**other).logits.mean[1], predict(**example).logits.mean[1])


# ------------------------------------------------------------ a trained encoder


class RowEncoder(nn.Module):
    """Digits as sequences of 8 rows."""

    def __init__(self, norm_first):
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(0.1 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.unflatten(1, (8, 8))) + self.place).mean(1))


@cache
def encoder(norm_first):
    torch.manual_seed(0)
    images, labels, test, _ = digits()
    model = RowEncoder(norm_first)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(250):
        rows = torch.randint(0, len(images), (64,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimiser.step()
    return model.eval(), test[:16]


def errors(model, x, draws, **settings):
    """|error of the mean| in standard deviations, averaged and the worst, and the relative error of the covariance."""
    belief = favour.compile(model, x, method="adjoint", **settings)(x)
    mean, matrix = moments(draws)
    off = (belief.mean - mean).abs() / draws.std(0)
    return off.mean().item(), off.max().item(), relative_error(belief.covariance_matrix, matrix)


@cache
def sampled(norm_first):
    model, x = encoder(norm_first)
    predict = favour.compile(model, x, method="adjoint")
    return predict.sample(x, n=10_000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm_first", [False, True])
def test_trained_encoder(norm_first, monkeypatch):
    from favour.rules import norm

    model, x = encoder(norm_first)
    draws = sampled(norm_first)
    off, worst, relative = errors(model, x, draws)
    print(f"norm first {norm_first}: mean {off:.3f}, worst {worst:.3f}, covariance {relative:.3f}")
    alone = {n: sampling_error(moments(draws)[1], n) for n in (10, 100, 1000)}
    print("covariance by sampling:", {n: round(e, 3) for n, e in alone.items()})
    assert off < 0.3
    assert relative < (0.27 if norm_first else 0.2)  # norms first: see below

    def plain(x, grouped, c, centred):
        return torch.zeros_like(c[..., :1]), torch.zeros_like(c)

    monkeypatch.setattr(norm, "spread_of", plain)
    naive, _, naive_relative = errors(model, x, draws)
    print(f"linearised norms: mean {naive:.3f}, covariance {naive_relative:.3f}")
    assert off < naive / 2, (off, naive)
    assert relative < naive_relative + 0.02, (relative, naive_relative)


@pytest.mark.xfail(strict=True, reason="dropout of attention weights is skewed, which second moments do not show")
def test_trained_encoder_with_norms_first():
    model, x = encoder(True)
    assert errors(model, x, sampled(True))[2] < 0.2


def test_without_dropped_attention_weights_norms_first_are_as_good():
    """The one noise that is left out of `test_trained_encoder_with_norms_first` is what spoils it."""
    model, x = encoder(True)
    silent = {"dropout": {f"encoder.layers.{i}.self_attn": 0.0 for i in range(2)}}
    draws = favour.compile(model, x, **silent).sample(x, n=3000, generator=torch.Generator().manual_seed(0))
    off, worst, relative = errors(model, x, draws, **silent)
    print(f"no dropped attention weights: mean {off:.3f}, worst {worst:.3f}, covariance {relative:.3f}")
    assert off < 0.15 and relative < 0.15
