"""Layers of torch that a capture takes in another way than torch writes them.

**Multi-head attention with the batch in front.**

`torch.nn.MultiheadAttention` moves the batch behind the positions and folds it into the heads, while uncertain tensors
keep it in front. The copy of the model that is captured computes the same numbers in another layout:

    q, k, v: (batch, T, n) to (batch, heads, T, d),     y = dropout(softmax(q kᵀ/√d + mask)) v.

Calls that torch's layer understands and this one does not (no batch, batch second) go to torch's own code.

`torch.nn.TransformerEncoder` and `TransformerDecoder` look into a mask to find out whether it is causal, which a
capture cannot follow. The mask says all there is to say, so the copy does not look.

**Recurrent layers** refuse what cannot be unrolled (`favour.passes.normalise.recurrent`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from favour.errors import UnsupportedOperation


def put_batch_first(model: nn.Module) -> None:
    """Change the attention layers of `model`, a private copy."""
    for module in model.modules():
        if type(module) in _CAPTURED:
            module.__class__ = _CAPTURED[type(module)]


def check_recurrent(model: nn.Module) -> None:
    """Have the recurrent layers of `model`, a private copy, refuse what cannot be unrolled."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(_refusing(name), with_kwargs=True)


def _refusing(name: str) -> Callable[[nn.Module, tuple, dict[str, Any]], None]:
    def check(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        x: Any = args[0] if args else kwargs["input"]
        kind = type(module).__name__
        if isinstance(x, PackedSequence):
            raise UnsupportedOperation(
                f"the {kind} `{name}` is given a PackedSequence, whose layout depends on the lengths of the sequences; "
                "a prediction is one fixed sequence of operations. Pass the padded tensor (batch, T, n) and pick the "
                "state at each length from the layer's output, `output[torch.arange(batch), lengths - 1]`."
            )
        steps = x.shape[1 if module.batch_first and x.ndim == 3 else 0]
        if not isinstance(steps, int):
            raise UnsupportedOperation(
                f"the {kind} `{name}` (batch_first={module.batch_first}) is given a tensor of shape "
                f"{tuple(str(s) if not isinstance(s, int) else s for s in x.shape)}, so that it would run over the "
                "batch or over a dynamic size. The model's inputs have their batch in front and recurrent layers are "
                "unrolled over a fixed length: give (batch, T, n) with batch_first=True, or transpose inside the model."
            )

    return check


class BatchFirstAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention`, its parameters and arguments, with the batch in front throughout."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in the base class."""
        unknown = is_causal and attn_mask is None
        if query.ndim != 3 or not self.batch_first or unknown:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        q, k, v = self._projected(query, key, value)
        if self.bias_k is not None and self.bias_v is not None:
            rows = (query.shape[0], 1, self.embed_dim)
            k, v = torch.cat([k, self.bias_k.expand(rows)], 1), torch.cat([v, self.bias_v.expand(rows)], 1)
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        mask = self._mask(query, key_padding_mask, attn_mask)
        if mask is not None:  # the rows that were added are seen by all
            mask = F.pad(mask, (0, k.shape[1] - key.shape[1]))
        q, k, v = (self._heads(t) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = q * self.head_dim**-0.5 @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), p, self.training)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, p)
        return self.out_proj(y.transpose(1, 2).flatten(2)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return [F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _heads(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(self, query: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as numbers to add to the scores, of a shape that broadcasts to (batch, heads, T, S)."""

        def added(t: Tensor) -> Tensor:
            if t.dtype is not torch.bool:
                return t
            return torch.zeros_like(t, dtype=query.dtype).masked_fill(t, float("-inf"))

        total: Tensor | None = None
        if mask is not None:
            total = added(mask)
            if total.ndim == 3:
                total = total.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            rows = added(padding)[:, None, None, :]
            total = rows if total is None else total + rows
        return total


class CapturedEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` that takes a mask as it is."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As in the base class."""
        return super().forward(src, mask, src_key_padding_mask, bool(is_causal))


class CapturedDecoder(nn.TransformerDecoder):
    """`nn.TransformerDecoder` that takes a mask as it is."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As in the base class."""
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        return super().forward(tgt, memory, *masks, bool(tgt_is_causal), memory_is_causal)


_CAPTURED: dict[type, type] = {
    nn.MultiheadAttention: BatchFirstAttention,
    nn.TransformerEncoder: CapturedEncoder,
    nn.TransformerDecoder: CapturedDecoder,
}
