"""How good predictions are: see `favour.inspect.metrics`."""

from favour.inspect.metrics import (
    accuracy,
    adaptive_ece,
    aupr,
    aurc,
    auroc,
    brier,
    coverage,
    coverage_at_risk,
    crps,
    ece,
    fpr95,
    gaussian_nll,
    nll,
    pavpu,
    regression_calibration_error,
    risk_coverage,
)

__all__ = [
    "accuracy",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "coverage",
    "coverage_at_risk",
    "crps",
    "ece",
    "fpr95",
    "gaussian_nll",
    "nll",
    "pavpu",
    "regression_calibration_error",
    "risk_coverage",
]
