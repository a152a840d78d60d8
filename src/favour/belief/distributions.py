"""A belief in `torch.distributions`."""

from __future__ import annotations

import torch
import torch.distributions as td
from torch import Tensor

from favour.belief.covariance import Covariance, Dense, DiagonalPlusFactor, flatten_event


def distribution(mean: Tensor, covariance: Covariance) -> td.Distribution:
    """See `Belief.to_distribution`."""
    wide = torch.promote_types(mean.dtype, torch.float32)
    mean, cov = flatten_event(mean, 1).to(wide), covariance.to(wide)
    if isinstance(cov, DiagonalPlusFactor) and (cov.rank == 0 or bool((cov.diag > 0).all())):
        lam = flatten_event(cov.diag, 1)
        if cov.rank:
            return td.LowRankMultivariateNormal(mean, flatten_event(cov.factor, 2).permute(1, 2, 0), lam)
        cov.precision()  # refuses zeros
        return td.Independent(td.Normal(mean, lam.sqrt()), 1)
    if not isinstance(cov, Dense):
        cov.precision()  # refuses rank deficiency before anything n × n exists
        cov = Dense(cov.dense())
    return td.MultivariateNormal(mean, scale_tril=cov.cholesky())
