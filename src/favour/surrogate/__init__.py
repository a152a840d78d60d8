"""The surrogate algebra: every operation as a linear map plus noise.

An operation y = f(x; θ) with uncertain x or θ is replaced by

    y ≈ m + Σ_i G_i (x_i − E[x_i]) + Σ_s n_s,        Cov[y] = Σ_ij G_i Cov[x_i, x_j] G_jᵀ + Σ_s N_s

with m = E[y], linear maps G_i (`LinearMap`) and noises n_s of covariance N_s (`Noise`), uncorrelated with
the x_i. Rules make surrogates, methods consume them, and neither knows the other.

| module        | what                                                                   |
|---------------|------------------------------------------------------------------------|
| `linear_map`  | G: its three primitives, what follows from them, compositions          |
| `structural`  | weighted patterns of zeros and ones, max routing                       |
| `matrices`    | matrices, contractions, one matrix for each axis                       |
| `convolution` | kernels                                                                |
| `jacobian`    | diagonal plus low rank: norms, softmax                                 |
| `noise`       | N                                                                      |
| `residual`    | what an element-wise function leaves over beside its line              |
| `carried`     | what forward sweeps know of a value beside its mean and variances      |
| `channels`    | of that, covariances within channels                                   |
| `siblings`    | covariances of values that were made from one                          |
| `attending`   | attention weights and values, which were                               |
| `surrogate`   | all of them together, and second derivatives                           |

Shapes. A tensor of the graph is (batch, *event). Deviations, factor columns and covectors carry one more
axis in front, the fold axis F: (F, batch, *event). A diagonal (variances) is (batch, *event).
"""

from favour.surrogate.carried import Carried, Cumulants, LoneCumulants
from favour.surrogate.generic import Generic
from favour.surrogate.gram import diagonal_columns, flat, inner, root, stored, weighted_gram
from favour.surrogate.linear_map import (
    Composition,
    Identity,
    LinearMap,
    Scaling,
    Unavailable,
    compose,
    identity,
    partners,
    scaled,
    scaling,
)
from favour.surrogate.noise import (
    Between,
    DenseNoise,
    DiagonalNoise,
    ImageNoise,
    LatentNoise,
    Noise,
    RotatedNoise,
    constant_between,
    diagonal_latent,
    factor_noise,
    products,
)
from favour.surrogate.residual import EffectiveDraw, Residual
from favour.surrogate.structural import Pattern, Routing, Structural, Sum, structural, weighted_sum
from favour.surrogate.surrogate import Pointwise, Second, Surrogate

__all__ = [
    "Between",
    "Carried",
    "Composition",
    "Cumulants",
    "DenseNoise",
    "DiagonalNoise",
    "EffectiveDraw",
    "Generic",
    "Identity",
    "ImageNoise",
    "LatentNoise",
    "LinearMap",
    "LoneCumulants",
    "Noise",
    "Pattern",
    "Pointwise",
    "Residual",
    "RotatedNoise",
    "Routing",
    "Scaling",
    "Second",
    "Structural",
    "Sum",
    "Surrogate",
    "Unavailable",
    "compose",
    "constant_between",
    "diagonal_columns",
    "diagonal_latent",
    "factor_noise",
    "flat",
    "identity",
    "inner",
    "partners",
    "products",
    "root",
    "scaled",
    "scaling",
    "stored",
    "structural",
    "weighted_gram",
    "weighted_sum",
]
