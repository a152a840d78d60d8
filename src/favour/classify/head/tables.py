"""Tables of the head's draws: masks and normal nodes.

Every unit is dropped in the same number of masks, and tables are shared by all inputs: the result is a deterministic
function of the input, and no random number is made when predicting. Eager code keeps the last tables of a head, which
depend on dropout rates, device and dtype only; compiled code holds them as constants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from favour.classify.head.find import Head, size
from favour.classify.head.masked import Tables
from favour.classify.predictive import mirrored_normals
from favour.graph.node import Node
from favour.graph.tracing import constant, traced
from favour.program.tensors import version_of


def tables(head: Head, env: Mapping[Node, Any], like: Tensor, rank: int) -> Tables:
    """Tables on the device and in the dtype of `like`, for a belief with `rank` columns at the cut."""
    if traced():
        return _made(head, env, like, rank)
    key = (like.device, like.dtype, rank, type(like))
    rates = [env[d.rate] for d in head.dropouts if isinstance(d.rate, Node)]
    known = head.tables
    if known is None or not known.fit(key, rates):
        with torch.inference_mode(False), torch.no_grad():
            known = _made(head, env, like, rank)
        known.key, known.rates = key, [(rate, version_of(rate)) for rate in rates]
        head.tables = known
    return known


def _made(head: Head, env: Mapping[Node, Any], like: Tensor, rank: int) -> Tables:
    outer, inner, last = head.outer, head.inner, head.last
    ending = None if last is None else head.folded.get(last)
    counts = [outer * inner if node is ending else outer for node in head.dropouts]
    ranks = tuple((n, math.prod(_mask_event(node))) for n, node in zip(counts, head.dropouts, strict=True))
    entries = size(last) if last is not None and head.random_last else 0
    sizes = ((outer, sum(head.normals.values()) + rank), (outer * inner, entries))
    flat = _flat(ranks, sizes, head.seed).to(like.device)
    *bits, normal, ending_normal = flat.split([(n + 1) * k for n, k in ranks] + [n * k for n, k in sizes])
    masks: dict[str, Tensor] = {}
    for node, table, (n, _) in zip(head.dropouts, bits, ranks, strict=True):
        p = env[node.rate] if isinstance(node.rate, Node) else node.rate
        mask = make_masks(node, p, table.reshape(n + 1, -1), like.dtype)
        masks[node.name] = mask.reshape(outer, inner, -1) if node is ending else mask.unsqueeze(1)
    *drawn, latent = normal.to(like).reshape(outer, -1).split([*head.normals.values(), rank], 1)
    normals = {
        node.name: t.reshape(outer, 1, *(node.shape or ())[1:]) for node, t in zip(head.normals, drawn, strict=True)
    }
    if last is not None and head.random_last:
        normals[last.name] = ending_normal.to(like).reshape(outer, inner, -1).mT.unsqueeze(1)
    return Tables(masks, normals, latent)


@functools.cache
def shuffled(n: int, size: int, seed: int) -> npt.NDArray:
    """A permutation of 0 … n − 1 in each column, and in the last row uniform numbers, (n + 1, size)."""
    random = np.random.Generator(np.random.PCG64(seed + 1))
    ranks = random.permuted(np.broadcast_to(np.arange(n, dtype=np.float32)[:, None], (n, size)), axis=0)
    return np.concatenate([ranks, random.random((1, size), dtype=np.float32)])


# A constant in compiled code, and in exported code as it is made outside torch; in one piece, since the compiler
# takes two constants from one function for the same.
@constant
def _flat(ranks: tuple[tuple[int, int], ...], normals: tuple[tuple[int, int], ...], seed: int) -> Tensor:
    """All tables, one after the other: `shuffled` and `normal_nodes`, for the sizes given."""
    parts = [shuffled(n, size, 1000 * seed + i).ravel() for i, (n, size) in enumerate(ranks)]
    parts += [mirrored_normals(n, size).astype(np.float32).ravel() for n, size in normals]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts]))


def make_masks(node: Node, p: Any, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Scaled masks (n, *event) from a table (n + 1, size): every unit is dropped ⌊pn + u⌋ times; each has mean one."""
    n = table.shape[0] - 1
    table = table.reshape(n + 1, *_mask_event(node))
    rate = p.detach().to(table) if isinstance(p, Tensor) else float(p)  # whole numbers have no derivative
    dropped = torch.floor(rate * n + table[n]).clamp(max=n - 1)
    return ((table[:n] >= dropped) * (n / (n - dropped))).to(dtype)


def _mask_event(node: Node) -> tuple[int, ...]:
    assert node.draw is not None
    return node.draw.shape((1, *(int(s) for s in (node.shape or ())[1:])))[1:]
