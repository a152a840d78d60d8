"""Complex numbers as pairs of real ones: Fourier transforms and rotary embeddings at uncertain tensors.

A complex tensor z of shape S is the real tensor (Re z, Im z) of shape (*S, 2). What happens to it is then linear, or a
product, in real numbers: a transform along an axis of length n is the matrix of what it does to the 2n unit vectors
(n, for real input), which torch is asked for, and (a + ib)(c + id) = ac − bd + i(ad + bc).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node
from favour.passes.normalise.composites import arguments
from favour.passes.rewriting import Builder, Shape, rewrite

aten = torch.ops.aten

_ONE_AXIS = {
    aten.fft_fft.default,
    aten.fft_ifft.default,
    aten.fft_rfft.default,
    aten.fft_irfft.default,
    aten.fft_hfft.default,
}
# By axis: the transform of the last of the axes, and the one of the others.
_SEVERAL = {
    aten.fft_fft2.default: (aten.fft_fft.default, aten.fft_fft.default),
    aten.fft_fftn.default: (aten.fft_fft.default, aten.fft_fft.default),
    aten.fft_ifft2.default: (aten.fft_ifft.default, aten.fft_ifft.default),
    aten.fft_ifftn.default: (aten.fft_ifft.default, aten.fft_ifft.default),
    aten.fft_rfft2.default: (aten.fft_rfft.default, aten.fft_fft.default),
    aten.fft_rfftn.default: (aten.fft_rfft.default, aten.fft_fft.default),
    aten.fft_irfft2.default: (aten.fft_irfft.default, aten.fft_ifft.default),
    aten.fft_irfftn.default: (aten.fft_irfft.default, aten.fft_ifft.default),
}
_ALIKE = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.neg.default}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}


def make_real(graph: Graph, uncertain: Collection[Node]) -> None:
    """Rewrite what is complex and uncertain. Assumes that nothing writes in place."""
    complex_nodes = [n for n in graph.nodes if n in uncertain and n.dtype is not None and n.dtype.is_complex]
    if not complex_nodes:
        return
    if any(n in graph.outputs for n in complex_nodes):
        raise UnsupportedOperation(
            f"the output of `{complex_nodes[-1].target}` at {complex_nodes[-1].place} is complex; a belief is of real "
            "numbers: return `torch.view_as_real` of it."
        )
    rewrite(graph, _Pairs(uncertain))


class _Pairs:
    def __init__(self, uncertain: Collection[Node]) -> None:
        self.uncertain = uncertain
        self.pairs: set[Node] = set()  # real nodes that stand for complex ones

    def __call__(self, node: Node, new: Builder) -> Node | None:
        reads = any(s in self.pairs for s in node.inputs)
        if node not in self.uncertain or not (reads or (node.dtype is not None and node.dtype.is_complex)):
            return None
        new.dtype = torch.float64 if node.dtype in (torch.complex128, torch.float64) else torch.float32
        made = self._rewritten(node, new)
        if made is not None and node.dtype is not None and node.dtype.is_complex:
            self.pairs.add(made)
        return made

    def _rewritten(self, node: Node, new: Builder) -> Node | None:
        target, x = node.target, node.args[0]
        shape = _shape(node)
        if target is aten.view_as_complex.default or target is aten.view_as_real.default:
            return new.call(aten.alias.default, x, shape=_shape(x))
        if target in _ONE_AXIS:
            named_args = arguments(node)
            return self._transform(new, target, x, named_args["n"], named_args["dim"], named_args["norm"], shape)
        if target in _SEVERAL:
            return self._transforms(node, new)
        if target is aten.mul.Tensor:
            return self._product(new, x, node.args[1], shape)
        if target is aten.complex.default:
            return _joined(new, *node.args)
        if x not in self.pairs:
            return None
        if target in _ALIKE:
            return new.call(target, x, shape=(*shape, 2))
        if target in _SUMS and not node.kwargs and isinstance(node.args[1], Node):
            return new.call(target, x, self._pair(new, node.args[1]), shape=(*shape, 2))
        if target in (aten.view.default, aten.reshape.default):
            return new.call(aten.reshape.default, x, [*node.args[1], 2], shape=(*shape, 2))
        if target in (aten.transpose.int, aten.unsqueeze.default, aten.slice.Tensor, aten.select.int):
            rank = len(_shape(x)) - 1 + (target is aten.unsqueeze.default)
            dims = 2 if target is aten.transpose.int else 1
            args = [d % rank if i < dims else d for i, d in enumerate(node.args[1:])]
            return new.call(target, x, *args, shape=(*shape, 2))
        if target in (aten.real.default, aten.imag.default):
            return _part(new, x, int(target is aten.imag.default))
        if target is aten.abs.default:
            squares = new.call(aten.square.default, x, shape=_shape(x))
            return new.call(aten.sqrt.default, new.call(aten.sum.dim_IntList, squares, [-1], shape=shape), shape=shape)
        return None

    def _pair(self, new: Builder, x: Node) -> Node:
        return x if x in self.pairs else new.call(aten.view_as_real.default, x, shape=(*_shape(x), 2))

    def _product(self, new: Builder, x: Any, y: Any, shape: Shape) -> Node | None:
        if not isinstance(x, Node) or x not in self.pairs:
            x, y = y, x
        if not isinstance(y, Node):
            return None if isinstance(y, complex) else new.call(aten.mul.Tensor, x, y, shape=(*shape, 2))
        if y not in self.pairs and not (y.dtype is not None and y.dtype.is_complex):
            wide = new.call(aten.unsqueeze.default, y, -1, shape=(*_shape(y), 1))
            return new.call(aten.mul.Tensor, x, wide, shape=(*shape, 2))
        (a, b), (c, d) = ([_part(new, pair, i) for i in (0, 1)] for pair in (x, self._pair(new, y)))

        def product(p: Node, q: Node) -> Node:
            return new.call(aten.mul.Tensor, p, q, shape=shape)

        real = new.call(aten.sub.Tensor, product(a, c), product(b, d), shape=shape)
        return _joined(new, real, new.call(aten.add.Tensor, product(a, d), product(b, c), shape=shape))

    def _transforms(self, node: Node, new: Builder) -> Node | None:
        """Along several axes, one after the other; of a real result the one that makes it real is last."""
        args = arguments(node)
        last, other = _SEVERAL[node.target]
        x, sizes = args["self"], args["s"]
        rank = len(_shape(x)) - (x in self.pairs)
        dims = [d % rank for d in (args["dim"] or range(rank))]
        steps = [(other, i) for i in range(len(dims) - 1)]
        steps = [*steps, (last, -1)] if last is aten.fft_irfft.default else [(last, -1), *steps]
        shape = list(_shape(x)[:rank])
        for target, i in steps:
            n = sizes[i] if sizes else None
            if target is last and last is aten.fft_irfft.default:
                n = n or _shape(node)[dims[i]]
            shape[dims[i]] = _shape(node)[dims[i]]
            made = self._transform(new, target, x, n, dims[i], args["norm"], tuple(shape))
            if made is None:
                return None
            x = made
            self.pairs.add(x)
        return x

    def _transform(
        self, new: Builder, target: Any, x: Node, n: int | None, dim: int, norm: str | None, shape: Shape
    ) -> Node | None:
        """x times the matrix of the transform; `shape` is that of the result as torch has it."""
        pair = x in self.pairs
        rank = len(_shape(x)) - pair
        dim = dim % rank
        size = _shape(x)[dim]
        if not isinstance(size, int) or dim == 0:
            return None
        real = target in (aten.fft_irfft.default, aten.fft_hfft.default)
        out = shape[dim]
        assert isinstance(out, int)
        matrix = self._matrix(new, x, target, (size, out), n, norm, pair, real)
        axes = [i for i in range(rank) if i != dim] + [dim] + ([rank] if pair else [])
        rest = [_shape(x)[i] for i in axes[: rank - 1]]
        if any(isinstance(s, str) for s in rest[1:]):
            return None
        moved = new.call(aten.permute.default, x, axes, shape=tuple(_shape(x)[i] for i in axes))
        width = size * (2 if pair else 1)
        if pair:
            moved = new.call(aten.reshape.default, moved, [-1, *rest[1:], width], shape=(*rest, width))
        results = out * (1 if real else 2)
        made = new.call(aten.matmul.default, moved, matrix, shape=(*rest, results))
        if not real:
            made = new.call(aten.reshape.default, made, [-1, *rest[1:], out, 2], shape=(*rest, out, 2))
        back = list(range(dim)) + [rank - 1] + list(range(dim, rank - 1)) + ([] if real else [rank])
        return new.call(aten.permute.default, made, back, shape=shape if real else (*shape, 2))

    def _matrix(
        self,
        new: Builder,
        x: Node,
        target: Any,
        sizes: tuple[int, int],
        n: int | None,
        norm: str | None,
        pair: bool,
        real: bool,
    ) -> Node:
        """What the transform does to unit vectors, the rows; those of imaginary parts between those of real ones."""
        size, out = sizes
        ones = new.call(aten.new_ones.default, x, [size], shape=(size,))
        unit = new.call(aten.diag_embed.default, ones, shape=(size, size))
        units = [unit]
        if pair:
            none = new.call(aten.zeros_like.default, unit, shape=(size, size))
            units = [
                new.call(aten.complex.default, *parts, shape=(size, size), dtype=_complex(new.dtype))
                for parts in ((unit, none), (none, unit))
            ]
        rows = []
        for u in units:
            made = new.call(target, u, n, -1, norm, shape=(size, out), dtype=new.dtype if real else _complex(new.dtype))
            rows.append(made if real else new.call(aten.view_as_real.default, made, shape=(size, out, 2)))
        results = out * (1 if real else 2)
        if not pair:
            return new.call(aten.reshape.default, rows[0], [size, results], shape=(size, results))
        both = new.call(aten.stack.default, rows, 1, shape=(size, 2, *_shape(rows[0])[1:]))
        return new.call(aten.reshape.default, both, [2 * size, results], shape=(2 * size, results))


def _complex(dtype: torch.dtype | None) -> torch.dtype:
    return torch.complex128 if dtype is torch.float64 else torch.complex64


def _shape(x: Node) -> Shape:
    assert x.shape is not None
    return x.shape


def _part(new: Builder, pair: Node, which: int) -> Node:
    return new.call(aten.select.int, pair, len(_shape(pair)) - 1, which, shape=_shape(pair)[:-1])


def _joined(new: Builder, real: Node, imaginary: Node) -> Node:
    shape: Sequence[Any] = _shape(real)
    wide: Callable[[Node], Node] = lambda x: new.call(aten.unsqueeze.default, x, len(shape), shape=(*shape, 1))  # noqa: E731
    return new.call(aten.cat.default, [wide(real), wide(imaginary)], len(shape), shape=(*shape, 2))
