"""`Belief`: a batch of Gaussians N(μ, Σ), the type of every prediction.

The first dimension of the mean is the batch, B; the others are the event, n elements in all, possibly none
(one number per row). Batch rows are independent of each other. Σ has one of the structures of
`favour.belief.covariance`.

    log density       log p(y) = −½ (n log 2π + log det Σ + m²)
    Mahalanobis       m = √((y − μ)ᵀ Σ⁻¹ (y − μ)),   m² ~ χ²_n
    entropy           ½ (n (1 + log 2π) + log det Σ)
    linear map        Wx + b ~ N(Wμ + b, WΣWᵀ)

Σ may be singular, down to zero. Moments, samples, intervals and linear maps never mind; whatever needs a
density raises `NoDensity` and says which rows have none.

Beliefs and covariances are pytree nodes, in and out of `torch.compile` and `torch.export`. Only eager code checks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributions as td
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_map

from favour.belief import arrays, pictures
from favour.belief.checking import check_arguments, check_fit, check_noise, chosen
from favour.belief.confidence import ConfidenceRegion, check_level, chi_square_quantile
from favour.belief.covariance import (
    Covariance,
    Dense,
    DiagonalPlusFactor,
    Directional,
    check_finite,
    flatten_event,
    square_root,
)
from favour.belief.distributions import distribution
from favour.belief.origin import kept
from favour.errors import ShapeMismatch, UnsupportedOperation
from favour.graph.tracing import traced

__all__ = ["Belief", "ConfidenceRegion", "chi_square_quantile"]


class Belief:
    """A batch of Gaussians with mean μ and structured covariance Σ.

    Give either `diag` and/or `factor`, for Σ = diag(λ) + Σ_k u_k u_kᵀ, or `covariance`. With neither, Σ = 0.

    Args:
        mean: μ, (B, *event), floating point.
        diag: λ ≥ 0, (B, *event); None means zeros.
        factor: the columns u_k, (rank, B, *event), rank axis first; None means rank 0.
        covariance: a (B, n, n) tensor or a `Covariance`, instead of diag and factor.
        validate: check shapes, dtypes and values. Reading values makes a GPU wait, so inner code may switch
            it off; nothing is ever checked inside compiled code.

    Raises:
        ShapeMismatch, InvalidType, InvalidValue: naming the argument, and the index of the first bad value.

    Example:
        >>> belief = Belief(torch.zeros(1, 2), diag=torch.ones(1, 2), factor=torch.ones(1, 1, 2))
        >>> belief
        Belief(batch=1, event=(2,), DiagonalPlusFactor(rank=1), float32)
        >>> belief.covariance_matrix
        tensor([[[2., 1.],
                 [1., 2.]]])
        >>> belief.log_prob(torch.ones(1, 2))
        tensor([-2.7205])
    """

    mean: Tensor
    covariance: Covariance

    def __init__(
        self,
        mean: Tensor,
        diag: Tensor | None = None,
        factor: Tensor | None = None,
        *,
        covariance: Tensor | Covariance | None = None,
        validate: bool = True,
    ):
        if validate := validate and not traced():
            check_arguments(mean, diag, factor, covariance)
        if covariance is None:
            diag = torch.zeros_like(mean) if diag is None else diag
            factor = mean.new_zeros((0, *mean.shape)) if factor is None else factor
            covariance = DiagonalPlusFactor(diag, factor)
        elif isinstance(covariance, Tensor):
            covariance = Dense(covariance, mean.shape[1:])
        self.mean, self.covariance = mean, covariance
        if validate:
            check_fit(mean, covariance)
            check_finite("mean", mean)
            covariance.check_values()

    @staticmethod
    def point(x: Tensor) -> Belief:
        """x as a belief without any uncertainty: Σ = 0.

        >>> Belief.point(torch.ones(2, 3)).variance.sum()
        tensor(0.)
        """
        return Belief(x)

    @staticmethod
    def cat(beliefs: Sequence[Belief]) -> Belief:
        """Beliefs over the same event, of the same structure, joined along the batch.

        >>> Belief.cat([Belief.point(torch.ones(2, 3)), Belief.point(torch.ones(1, 3))]).batch_size
        3
        """
        covariance = Covariance.cat([belief.covariance for belief in beliefs])
        return Belief(torch.cat([belief.mean for belief in beliefs]), covariance=covariance, validate=False)

    # ---- moments and structure

    @property
    def variance(self) -> Tensor:
        """Marginal variances diag(Σ), (B, *event)."""
        return self.covariance.diagonal()

    @property
    def stddev(self) -> Tensor:
        """Marginal standard deviations, (B, *event)."""
        return square_root(self.variance)

    @property
    def covariance_matrix(self) -> Tensor:
        """Σ over the flattened event, (B, n, n)."""
        return self.covariance.dense()

    @property
    def diag(self) -> Tensor:
        """λ of Σ = diag(λ) + UUᵀ, (B, *event): not the marginal variance, which is `variance`.

        Raises `UnsupportedOperation` for the other structures, as `factor` does.
        """
        return self._diagonal_plus_factor("diag").diag

    @property
    def factor(self) -> Tensor:
        """The columns of U in Σ = diag(λ) + UUᵀ, (rank, B, *event)."""
        return self._diagonal_plus_factor("factor").factor

    def _diagonal_plus_factor(self, name: str) -> DiagonalPlusFactor:
        if not isinstance(self.covariance, DiagonalPlusFactor):
            raise UnsupportedOperation(
                f"`{name}` belongs to a covariance diag(λ) + UUᵀ; this is {type(self.covariance).__name__}. "
                "Marginal variances are in `variance`; `covariance.as_diagonal_plus_factor()` writes any "
                "covariance as 0 + UUᵀ with n columns."
            )
        return self.covariance

    @property
    def directions(self) -> Tensor | None:
        """The orthonormal directions a `Directional` covariance covers, (k, B, *event); else None."""
        return self.covariance.basis if isinstance(self.covariance, Directional) else None

    @property
    def rank(self) -> int:
        """Number of factor columns, of directions, or n for a dense covariance."""
        return self.covariance.rank

    @property
    def batch_size(self) -> int:
        """B."""
        return self.mean.shape[0]

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one batch element."""
        return self.mean.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the mean."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """Device of the mean."""
        return self.mean.device

    @property
    def _n(self) -> int:
        return flatten_event(self.mean, 1).shape[-1]

    # ---- sampling

    def rsample(self, shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws (*shape, B, *event), differentiable in μ and Σ; for Λ + UUᵀ as μ + Λ^½x + Uy, O(n r) each."""
        return self.mean + self.covariance.draw(shape, generator)

    def sample(self, shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws (*shape, B, *event) without gradients."""
        with torch.no_grad():
            return self.rsample(shape, generator)

    # ---- density

    def log_prob(self, y: Tensor) -> Tensor:
        """log density at y, (B,); y is (B, *event), or (*S, B, *event) for (*S, B). Σ must be nonsingular."""
        lead, deviation = self._deviation(y)
        quadratic, logdet = self.covariance.density_terms(deviation)
        return (-0.5 * (self._n * math.log(2 * math.pi) + logdet + quadratic)).reshape(*lead, self.batch_size)

    def entropy(self) -> Tensor:
        """Differential entropy in nats, (B,). Needs a nonsingular Σ."""
        return 0.5 * (self._n * (1 + math.log(2 * math.pi)) + self.covariance.logdet())

    def mahalanobis(self, y: Tensor) -> Tensor:
        """Mahalanobis distance of y, not squared, shapes as for `log_prob`. Its square is χ²_n."""
        lead, deviation = self._deviation(y)
        return square_root(self.covariance.density_terms(deviation)[0]).reshape(*lead, self.batch_size)

    def solve(self, v: Tensor) -> Tensor:
        """Σ⁻¹v for v (B, *event) or (*S, B, *event)."""
        lead, folded = self._fold(v, "v")
        return self.covariance.solve(folded).reshape(*lead, *self.mean.shape)

    def _fold(self, y: Tensor, name: str) -> tuple[torch.Size, Tensor]:
        shape = self.mean.shape
        if self.event_shape == (1,) and y.shape == shape[:1]:  # one number for each input, without its own axis
            y = y.unsqueeze(1)
        cut = y.dim() - len(shape)
        if not traced() and (cut < 0 or y.shape[cut:] != shape):
            raise ShapeMismatch(
                f"`{name}` has shape {tuple(y.shape)}; this belief needs {tuple(shape)}, with any number of "
                "further dimensions in front."
            )
        return y.shape[:cut], y.unsqueeze(0) if cut == 0 else y.flatten(0, cut - 1)

    def _deviation(self, y: Tensor) -> tuple[torch.Size, Tensor]:
        lead, folded = self._fold(y, "y")
        wide = torch.promote_types(self.dtype, torch.float32)  # y − μ of nearby bfloat16 numbers is exact in it
        return lead, folded.to(wide) - self.mean.to(wide)

    def confidence_interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Marginal bounds μ ∓ z σ, each (B, *event): any one element lies between with probability `level`.

        This is the interval of what the belief is over. A predictor's belief is over its network's output, so it is
        the interval of the network's own spread: observations have noise besides, networks are wrong besides, and the
        interval holds far fewer of them than `level`. `favour.calibrate(predict, (x, y)).interval(x, level)` gives
        prediction intervals.

        >>> Belief(torch.zeros(1, 1), diag=torch.ones(1, 1)).confidence_interval(0.95)
        (tensor([[-1.9600]]), tensor([[1.9600]]))
        """
        check_level(level)
        z = -torch.special.ndtri(torch.tensor(0.5 * (1 - level), dtype=torch.float64))
        half = z * self.stddev
        return self.mean - half, self.mean + half

    def quantile(self, q: float | Tensor) -> Tensor:
        """Marginal quantiles μ + σ Φ⁻¹(q), (*q.shape, B, *event), of what the belief is over.

        Args:
            q: Probabilities above 0 and below 1, a number or a tensor.

        >>> Belief(torch.zeros(1, 1), diag=torch.ones(1, 1)).quantile(0.975)
        tensor([[1.9600]])
        """
        return arrays.quantile(self, q)

    def confidence_region(self, level: float = 0.95) -> ConfidenceRegion:
        """The ellipsoid of Mahalanobis distances up to √(χ²_n quantile): it holds `level` of the mass."""
        return ConfidenceRegion(self, level)

    def to_distribution(self) -> td.Distribution:
        """The same Gaussian in `torch.distributions`, with batch shape (B,) and the event flattened to (n,).

        A pure diagonal becomes an Independent Normal, a positive diagonal plus factor a
        LowRankMultivariateNormal, everything else a MultivariateNormal. Half precision is widened to float32.
        Raises `NoDensity` for a singular Σ. (torch.distributions itself refuses an empty batch.)
        """
        return distribution(self.mean, self.covariance)

    # ---- for people and for numpy

    def numpy(self) -> arrays.Arrays:
        """Mean and standard deviation as numpy arrays, (B, *event) each, without gradients.

        >>> mean, stddev = Belief(torch.zeros(2, 1, requires_grad=True), diag=torch.ones(2, 1)).numpy()
        >>> stddev.shape
        (2, 1)
        """
        return arrays.Arrays(arrays.array(self.mean), arrays.array(self.stddev))

    def plot(self, x: Any = None, *, row: int = 0, names: Sequence[str] | None = None, ax: Any = None) -> Any:
        """A picture: one number per input as a band over x, several as bars of one `row`; see `favour.plots.belief`."""
        return pictures.belief(self, x, row, names, ax)

    def _repr_html_(self) -> str:
        return arrays.html(self)

    def __len__(self) -> int:
        """The batch size."""
        return self.batch_size

    def __bool__(self) -> bool:
        return True  # a belief about no inputs is still a belief

    def __iter__(self) -> NoReturn:
        raise arrays.refused("unpacked or looped over")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise arrays.refused("turned into one array")

    # ---- new beliefs from this one

    def with_noise(self, variance: float | Tensor) -> Belief:
        """Adds independent noise: Σ + diag(variance), a number ≥ 0 or broadcastable to (B, *event).

        >>> Belief.point(torch.zeros(1, 2)).with_noise(0.5).variance
        tensor([[0.5000, 0.5000]])
        """
        added = torch.as_tensor(variance, dtype=self.dtype, device=self.device)
        if not traced():
            check_noise(added, self.mean)
        return Belief(self.mean, covariance=self.covariance.add_diagonal(added), validate=False)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Belief:
        """The belief over Wx + b, exact, dense m × m. weight (m, n) acts on the flattened event; bias (m,).

        Costs O(m n r + m² n) per batch row.

        >>> Belief(torch.ones(1, 2), diag=torch.ones(1, 2)).linear(torch.tensor([[1.0, 2.0]])).variance
        tensor([[5.]])
        """
        if not traced() and (weight.dim() != 2 or weight.shape[1] != self._n):
            raise ShapeMismatch(
                f"`weight` has shape {tuple(weight.shape)}; an event of shape {tuple(self.event_shape)} "
                f"needs (m, {self._n})."
            )
        mean = torch.nn.functional.linear(flatten_event(self.mean, 1), weight, bias)
        return Belief(mean, covariance=self.covariance.linear(weight), validate=False)

    def scale(self, c: float | Tensor) -> Belief:
        """The belief over c·x: mean cμ, covariance c²Σ; c a number or one per batch row, (B,).

        To widen the error bars alone: `Belief(b.mean, covariance=b.covariance.scale(c))`.
        """
        c = torch.as_tensor(c, dtype=self.dtype, device=self.device)
        covariance = self.covariance.scale(c.square())
        rows = c.reshape(-1, *[1] * len(self.event_shape)) if c.dim() else c
        return Belief(self.mean * rows, covariance=covariance, validate=False)

    def __getitem__(self, rows: int | slice | Tensor | Sequence[int]) -> Belief:
        """Selects batch rows by int (keeps a batch of one), slice, index tensor or array, mask or list."""
        rows = chosen(rows, self.batch_size, self.device)
        return kept(Belief(self.mean[rows], covariance=self.covariance[rows], validate=False), self, rows)

    def to(self, *args: Any, **kwargs: Any) -> Belief:
        """`torch.Tensor.to` on mean and covariance: device and/or floating-point dtype."""
        mean, covariance = self.mean.to(*args, **kwargs), self.covariance.to(*args, **kwargs)
        return kept(Belief(mean, covariance=covariance, validate=False), self)

    def cpu(self) -> Belief:
        """Moves to the CPU."""
        return self.to("cpu")

    def detach(self) -> Belief:
        """Detaches from the autograd graph."""
        return kept(Belief(self.mean.detach(), covariance=self.covariance.detach(), validate=False), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Belief:
        """A belief with tensors of its own; those that were computed with gradients stay part of that computation."""
        return tree_map(lambda t: copy.deepcopy(t, memo) if t.is_leaf else t.clone(), self)

    def __repr__(self) -> str:
        kind = type(self.covariance).__name__
        inner = "" if isinstance(self.covariance, Dense) else f"(rank={self.rank})"
        place = "" if self.device.type == "cpu" else f", {self.device}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Belief(batch={self.batch_size}, event={tuple(self.event_shape)}, {kind}{inner}, {dtype}{place})"


def _unflatten(leaves: Any, _: Any) -> Belief:
    belief = object.__new__(Belief)  # leaves may be placeholders of any kind: no checks
    belief.mean, belief.covariance = leaves
    return belief


register_pytree_node(
    Belief,
    lambda b: ([b.mean, b.covariance], None),
    _unflatten,
    serialized_type_name="favour.Belief",
    flatten_with_keys_fn=lambda b: (
        [(GetAttrKey("mean"), b.mean), (GetAttrKey("covariance"), b.covariance)],
        None,
    ),
)
