"""Which operations a file may name.

A graph from a file is computed as it says, so what it may say is limited to

1. operations that have a rule (`favour.rules`), a user's own included,
2. operations without one that networks apply to what is certain: sizes, masks, positions, indices (`_PLAIN`),
3. Python's arithmetic on sizes.

All of them are functions of their arguments and read nothing else: none draws numbers, writes to its arguments, returns
memory that nobody wrote, reads files, or has an argument that switches its own checks off. Indices are checked by torch
on the CPU. Everything that says `empty` is read as `zeros`, so that code which fills such a tensor still computes the
same, and code which does not cannot show what lies in memory.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from favour.errors import CorruptFile, UnsupportedOperation
from favour.graph.traits import Argument, Operation, has_rule

SIZE_OPERATORS = {
    f.__name__: f
    for f in (
        operator.getitem,
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.truediv,
        operator.mod,
        operator.neg,
        operator.pow,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        math.ceil,
        math.floor,
        torch.sym_max,
        torch.sym_min,
        torch.sym_int,
        torch.sym_float,
    )
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# By what they compute; every functional overload of a name is meant.
_PLAIN = _names("""
    eq ne lt le gt ge isclose isfinite isinf isnan isneginf isposinf isin signbit
    logical_and logical_or logical_not logical_xor any all
    bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__
    bitwise_left_shift bitwise_right_shift
    add sub rsub mul multiply subtract div divide true_divide floor_divide remainder fmod pow float_power reciprocal
    neg negative abs absolute sign sgn square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2
    sin cos tan asin acos atan atan2 arctan2 sinh cosh tanh asinh acosh atanh sinc hypot copysign
    floor ceil round trunc fix frac clamp clamp_min clamp_max clip maximum minimum fmax fmin max min
    erf erfc erfinv special_erfcx special_ndtr special_ndtri special_log_ndtr lgamma digamma xlogy logit i0
    lerp addcmul addcdiv heaviside nan_to_num threshold glu where fill deg2rad rad2deg
    arange linspace zeros ones full eye scalar_tensor zeros_like ones_like full_like new_zeros new_ones new_full
    tril triu tril_indices triu_indices meshgrid one_hot cartesian_prod
    sym_size sym_numel sym_stride sym_storage_offset
    view view_as reshape reshape_as expand expand_as permute transpose t T mT H numpy_T adjoint flatten unflatten
    squeeze unsqueeze select slice narrow split split_with_sizes chunk tensor_split unbind cat concat stack hstack
    vstack dstack column_stack atleast_1d atleast_2d atleast_3d ravel moveaxis movedim swapaxes swapdims broadcast_to
    broadcast_tensors repeat tile flip fliplr flipud roll rot90 diagonal diag diag_embed unfold pad
    constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d pixel_shuffle pixel_unshuffle im2col col2im view_as_real view_as_complex real imag complex polar
    select_scatter slice_scatter diagonal_scatter
    to _to_copy type_as clone contiguous detach alias lift_fresh_copy positive conj resolve_conj resolve_neg
    index index_select index_put index_add index_copy index_fill gather take_along_dim scatter scatter_add
    scatter_reduce masked_fill embedding bucketize
    sum mean prod amax amin aminmax argmax argmin cumsum cumprod cummax cummin logcumsumexp logsumexp var std var_mean
    std_mean median norm linalg_vector_norm count_nonzero nansum nanmean sort argsort topk diff
    mm bmm matmul mv dot vdot outer inner addmm addmv addbmm baddbmm linear einsum cross linalg_cross cdist
    cosine_similarity softmax log_softmax _softmax _log_softmax _safe_softmax
    layer_norm group_norm batch_norm instance_norm rms_norm native_layer_norm native_group_norm
    relu relu6 gelu silu elu selu celu leaky_relu prelu sigmoid log_sigmoid softplus hardtanh hardsigmoid hardswish mish
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator
    _weight_norm trapezoid fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_rfft2
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
    _assert_async _assert_tensor_metadata _assert_scalar sym_constrain_range sym_constrain_range_for_size
""")

# Memory that nobody wrote, and what is read for it: the same arguments, but for the order of memory.
_FILLED = {"empty.memory_format": "zeros.default", "empty_like.default": "zeros_like.default"}
_FILLED |= {"new_empty.default": "new_zeros.default"}


def operation_name(target: Operation) -> str:
    """How a file names an operation.

    Raises:
        UnsupportedOperation: No file may name it.
    """
    name = str(target) if isinstance(target, torch._ops.OpOverload) else f"python.{getattr(target, '__name__', '')}"
    known = _admitted(target) or SIZE_OPERATORS.get(name.removeprefix("python.")) is target
    if not known and name.removeprefix("aten.") not in _FILLED:
        raise UnsupportedOperation(
            f"an operation `{target}` cannot be written to a file: it has no rule and is none of those that files may "
            "name. Register a rule for it with `@favour.rule(...)`, also before loading."
        )
    return name


def operation(name: str) -> Any:
    """The operation that a file names.

    Raises:
        CorruptFile: It is none that a file may name.
    """
    namespace, _, rest = name.partition(".")
    if namespace == "python" and rest in SIZE_OPERATORS:
        return SIZE_OPERATORS[rest]
    overload = _overload(namespace, _FILLED.get(rest, rest) if namespace == "aten" else rest)
    if not isinstance(overload, torch._ops.OpOverload):
        raise CorruptFile(f"the file uses an operation `{name[:80]}` that this version of torch does not have.")
    if not _admitted(overload):
        raise CorruptFile(
            f"the file uses an operation `{name[:80]}`, which has no rule and is none of those that files may name; "
            "if you trust it, register a rule for it before loading."
        )
    return overload


def _overload(namespace: str, name: str) -> Any:
    packet, _, overload = name.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)


def without_memory_format(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name of what is read for an operation."""
    filled = name.removeprefix("aten.") in _FILLED
    return {k: v for k, v in kwargs.items() if k != "memory_format"} if filled else kwargs


def _admitted(target: Operation) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if has_rule(target):
        return True
    packet = str(target).split(".")[1]
    return target.namespace == "aten" and packet in _PLAIN and functional(target)


def functional(target: torch._ops.OpOverload) -> bool:
    """Whether an operation neither writes to its arguments nor draws numbers."""
    schema = target._schema
    drawn = torch.Tag.nondeterministic_seeded in target.tags and not _can_be_silent(schema)
    return not schema.is_mutable and not drawn and not any(a.is_out for a in schema.arguments)


def _can_be_silent(schema: Argument) -> bool:
    """Whether an argument says that nothing is drawn; `favour.graph.node.draws_numbers` reads it."""
    return any(a.name in ("dropout", "dropout_p", "train", "training") for a in schema.arguments)


# Beyond those above, what a whole prediction takes once it is a program of its own: factorisations, and transposes of
# linear operations, which torch has as their derivatives. None of them reads indices.
_PROGRAM = _names("""
    linalg_cholesky_ex linalg_cholesky linalg_solve_triangular linalg_qr linalg_eigh _linalg_eigh linalg_eigvalsh
    linalg_svd _linalg_svd linalg_vecdot cholesky_solve special_erfc special_expm1 tensordot kron block_diag
    avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
""")


def program_operation(target: Operation) -> None:
    """Raise `CorruptFile` unless a program that `favour.export` wrote may call this."""
    if _admitted(target) or target in _NUMBERS:
        return
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and functional(target)
    if not known or str(target).split(".")[1] not in _PROGRAM:
        raise CorruptFile(f"the graph calls `{str(target)[:80]}`, which is not an operation that files may name")


def check_program_name(name: str) -> None:
    """The same for `torch.ops.aten.relu.default`, before it is looked up for anything else; other names pass."""
    if name.startswith("torch.ops.aten."):
        program_operation(_overload("aten", name.removeprefix("torch.ops.aten.")) or name)


_NUMBERS = {*SIZE_OPERATORS.values(), math.trunc, torch.sym_not, torch.sym_ite}
