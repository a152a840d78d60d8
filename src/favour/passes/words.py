"""The particular operations that passes look for or write, in the ways that models spell them.

A pass that asks what an operation does reads its traits. What is here is where a pass means one operation: a product,
a comparison, a choice.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

ADD = {aten.add.Tensor, aten.add.Scalar}
SUB = {aten.sub.Tensor, aten.sub.Scalar}
MUL = {aten.mul.Tensor, aten.mul.Scalar}
DIV = {aten.div.Tensor, aten.div.Scalar}
MATMUL = {aten.matmul.default, aten.mm.default}
NOT = {aten.logical_not.default, aten.bitwise_not.default}
AND = {aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor}
BELOW = {aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor}
ABOVE = {aten.gt.Scalar, aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor}
FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
WHERE = {aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar}
CLAMP = {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default}
