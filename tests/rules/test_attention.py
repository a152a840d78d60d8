"""Softmax, attention, and what the capture makes of them."""

from __future__ import annotations

import pytest
import torch
from calls import close, covariance
from networks import moments, relative_error
from test_norms import draws, uncertain
from torch import nn

import favour
from favour.passes.capture import capture
from favour.rules import RULES
from favour.surrogate.value import Context, Value

F64 = torch.float64
aten = torch.ops.aten
CTX = Context(module="layer", place="layer (model.py:1)")


@pytest.mark.parametrize("spread", [0.2, 0.6])
@pytest.mark.parametrize("op", [aten.softmax.int, aten.log_softmax.int], ids=str)
def test_softmax_against_draws(op, spread):
    x = uncertain(8, spread, 3)
    surrogate = RULES[op].function(CTX, x, -1)
    samples = op(draws(x), -1)
    error = ((surrogate.mean - samples.mean(0)) / samples.std(0)).abs().max()
    naive = ((op(x.mean, -1) - samples.mean(0)) / samples.std(0)).abs().max()
    assert error < naive / 3 and error < (0.02 if spread < 0.5 else 0.1), (error, naive)
    ((_, G),) = surrogate.maps
    columns = torch.cat([G.apply(torch.diag_embed(x.diag.sqrt()).transpose(0, 1)), G.apply(x.blocks["z"])])
    got = torch.einsum("kbi,kbj->bij", columns, columns)
    got = got + sum(covariance(noise, x.shape) for noise in surrogate.noises)
    assert relative_error(got, moments(samples)[1]) < (0.02 if spread < 0.5 else 0.15)


def test_softmax_means_sum_to_one_however_uncertain():
    x = uncertain(5, 5.0, 2)
    mean = RULES[aten.softmax.int].function(CTX, x, -1).mean
    assert (mean >= 0).all()
    close(mean.sum(-1), torch.ones(2, dtype=F64))


def second_order(p, v):
    """½ tr(H V H V) with the Hessian of each p_i written out."""
    n = len(p)
    result = []
    for i in range(n):
        e = torch.eye(n, dtype=F64)[i] - p
        H = p[i] * (torch.outer(e, e) - p.diag() + torch.outer(p, p))
        result.append(0.5 * torch.trace(H @ v.diag() @ H @ v.diag()))
    return torch.stack(result)


def test_second_order_term_equals_the_hessian():
    from favour.rules.attention import _second_order

    torch.manual_seed(0)
    p, v = torch.randn(6, dtype=F64).softmax(0), torch.rand(6, dtype=F64)
    close(_second_order(p[None], v[None], 1)[0], second_order(p, v))


class Attend(nn.Module):
    """One call of scaled dot-product attention behind dropout."""

    def __init__(self, heads=4, groups=4, p=0.0, **options):
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 8 * groups)
        self.drop, self.p, self.options = nn.Dropout(0.1), p, options
        self.groups = groups

    def forward(self, x, mask=None):
        x = self.drop(x)
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.groups, 4)).transpose(1, 2).chunk(2, 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask, self.p, **self.options)
        return y.transpose(1, 2).flatten(2).mean(1)


CALLS = {
    "plain": ({}, None),
    "causal": ({"is_causal": True}, None),
    "scaled": ({"scale": 0.1}, None),
    "grouped": ({"groups": 2, "enable_gqa": True}, None),
    "mask": ({}, "bool"),
    "added": ({}, "float"),
}


@pytest.mark.parametrize("name", CALLS)
def test_written_out_attention_equals_the_operation(name):
    options, kind = CALLS[name]
    torch.manual_seed(0)
    model, x = Attend(**options).double(), torch.randn(3, 5, 16, dtype=F64)
    mask = {None: None, "bool": torch.rand(3, 1, 5, 5) > 0.3, "float": torch.randn(3, 1, 5, 5, dtype=F64)}[kind]
    if kind == "bool":
        mask[0, :, 2] = False  # a position that may look at nothing
    example = (x,) if mask is None else (x, mask)
    predict = favour.compile(model, example, dropout={"drop": 0.0})
    close(predict(*example).mean, model.eval()(*example))


def test_attention_dropout_is_a_noise_of_its_own():
    torch.manual_seed(0)
    model, x = Attend(p=0.2).double(), torch.randn(3, 5, 16, dtype=F64)
    graph = capture(model, x)
    assert not any("scaled_dot_product" in str(n.target) for n in graph.nodes)
    assert graph.dropout_modules == ["drop", ""]
    only = favour.compile(model, x, dropout={"drop": 0.0}, method="adjoint")
    belief, samples = only(x), only.sample(x, n=20_000, generator=torch.Generator().manual_seed(0))
    mean, matrix = moments(samples)
    assert ((belief.mean - mean).abs() / samples.std(0)).max() < 0.05
    # Everything before the dropout is certain and everything behind it linear: exact up to sampling.
    assert relative_error(belief.covariance_matrix, matrix) < 0.05
    silent = favour.compile(model, x, dropout={"drop": 0.0, "": 0.0})(x)
    assert torch.count_nonzero(silent.variance) == 0


def test_attention_against_sampling():
    torch.manual_seed(0)
    model, x = Attend(p=0.1).double(), torch.randn(3, 5, 16, dtype=F64)
    predict = favour.compile(model, x, method="adjoint")
    samples = predict.sample(x, n=20_000, generator=torch.Generator().manual_seed(0))
    belief, (mean, matrix) = predict(x), moments(samples)
    assert ((belief.mean - mean).abs() / samples.std(0)).max() < 0.1
    assert relative_error(belief.covariance_matrix, matrix) < 0.1


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention_equals_torch(weights, masked):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

        def forward(self, x, other):
            padding = torch.zeros(x.shape[0], 4, dtype=torch.bool)
            padding[:, -1] = True
            forbidden = torch.ones(5, 4, dtype=torch.bool).triu(1) if masked else None
            y, w = self.attend(
                x, other, other, key_padding_mask=padding if masked else None, attn_mask=forbidden, need_weights=weights
            )
            own = self.attend(x, x, x, need_weights=False)[0]
            return y + own if w is None else (y + own, w)

    torch.manual_seed(0)
    model = Wrapped().double()
    args = torch.randn(3, 5, 8, dtype=F64), torch.randn(3, 4, 8, dtype=F64)
    got = favour.compile(model, args, dropout={"attend": 0.0})(*args)
    expected = model.eval()(*args)
    for a, b in zip(got if weights else (got,), expected if weights else (expected,), strict=True):
        close(a.mean, b)
    assert type(model.attend) is nn.MultiheadAttention  # the user's model stays as it is
    live = favour.compile(model, args)(*args)
    assert (live[0] if weights else live).variance.min() > 0


def encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 1, nn.LayerNorm(16))


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True), 1)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
LAYERS = {
    "encoder": (encoder(), lambda m, x, y: m(x)),
    "encoder, padding": (encoder(activation="gelu"), lambda m, x, y: m(x, src_key_padding_mask=PADDING[: x.shape[0]])),
    "encoder, causal": (encoder(), lambda m, x, y: m(x, mask=CAUSAL, is_causal=True)),
    "encoder, causal and no hint": (encoder(), lambda m, x, y: m(x, mask=CAUSAL)),
    "encoder, boolean mask": (encoder(), lambda m, x, y: m(x, mask=CAUSAL < 0)),
    "decoder": (decoder(), lambda m, x, y: m(y, x)),
    "decoder, masks": (decoder(), lambda m, x, y: m(y, x, CAUSAL[:4, :4], memory_mask=CAUSAL[:4] < 0)),
    "transformer": (nn.Transformer(16, 2, 1, 1, 32, 0.1, batch_first=True), lambda m, x, y: m(x, y)),
    "extra rows": (
        nn.MultiheadAttention(16, 2, 0.1, batch_first=True, add_bias_kv=True),
        lambda m, x, y: m(y, x, x, attn_mask=CAUSAL[:4])[0],
    ),
    "a row of zeros": (
        nn.MultiheadAttention(16, 2, 0.1, batch_first=True, add_zero_attn=True),
        lambda m, x, y: m(y, x, x, need_weights=False)[0],
    ),
    "other sizes": (
        nn.MultiheadAttention(16, 2, 0.1, batch_first=True, kdim=16, vdim=6),
        lambda m, x, y: m(y, x, x[..., :6])[0],
    ),
}


class Layer(nn.Module):
    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x, y):
        return self.call(self.module, x, y).mean(1)


@pytest.mark.parametrize("name", LAYERS)
def test_torch_layers(name):
    torch.manual_seed(0)
    model = Layer(*LAYERS[name]).eval()
    args = torch.randn(3, 5, 16), torch.randn(3, 4, 16)
    predict = favour.compile(model, args, method="adjoint")
    silent = favour.compile(model, args, dropout=dict.fromkeys(predict.graph.dropout_modules, 0.0))
    torch.testing.assert_close(silent(*args).mean, model(*args), atol=1e-5, rtol=1e-5)
    belief, draws = predict(*args), predict.sample(*args, n=2000, generator=torch.Generator().manual_seed(1)).detach()
    mean, matrix = moments(draws)
    assert ((belief.mean - mean).abs() / draws.std(0)).mean() < 0.1
    assert relative_error(belief.covariance_matrix, matrix) < 0.2


@pytest.mark.parametrize("spread", [1.0, 10.0, 1e4])
@pytest.mark.parametrize("rank", [1, 4, 12])
def test_softmax_variance_stays_below_what_probabilities_allow(spread, rank):
    """m(1 − m), with many columns that are large together too."""
    torch.manual_seed(0)
    mean = torch.randn(3, 6, dtype=F64)
    x = Value(mean, None, {"z": spread * torch.randn(rank, 3, 6, dtype=F64)})
    surrogate = RULES[aten.softmax.int].function(CTX, x, -1)
    ((_, G),) = surrogate.maps
    total = G.apply(x.factor).square().sum(0) + sum(noise.diag() for noise in surrogate.noises)
    m = surrogate.mean
    assert (m >= 0).all() and (total <= m * (1 - m) * (1 + 1e-9) + 1e-12).all()


def test_softmax_of_one_class_is_certain_in_float32():
    x = Value(torch.tensor([[3.0]]), torch.tensor([[1e8]]))
    surrogate = RULES[aten.softmax.int].function(CTX, x, -1)
    ((_, G),) = surrogate.maps
    assert surrogate.mean == 1
    assert G.square(x.variance) + sum(noise.diag() for noise in surrogate.noises) <= 1e-6


def test_log_sum_exp_of_wide_entries():
    """Behind standard deviations far above 1, lse is the maximum: mean and variance against draws, and their bounds."""
    torch.manual_seed(0)
    mean = torch.randn(4, 10, dtype=F64)
    for spread in (0.3, 30.0, 1e4):
        v = torch.full_like(mean, spread**2)
        surrogate = RULES[aten.logsumexp.default].function(CTX, Value(mean, v), [-1])
        ((_, G),) = surrogate.maps
        total = G.square(v) + sum(noise.diag() for noise in surrogate.noises)
        drawn = (mean + spread * torch.randn(20_000, 4, 10, dtype=F64)).logsumexp(-1)
        log_mean = RULES[aten.log_softmax.int].function(CTX, Value(mean, v), -1).mean
        close(mean - log_mean, surrogate.mean.unsqueeze(-1).expand(4, 10))
        assert ((surrogate.mean - drawn.mean(0)).abs() <= 0.8 * spread).all()  # √(2 log 10) for 1.54
        assert (total <= spread**2 * (1 + 1e-9)).all()
        assert (surrogate.mean >= mean.logsumexp(-1)).all()
