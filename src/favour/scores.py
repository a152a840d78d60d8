"""How unusual an input is: see `favour.classify.scores`."""

from favour.classify.scores import (
    EntropySplit,
    Mahalanobis,
    entropy,
    entropy_split,
    jsd,
    kl,
    least_confidence,
    logits,
    max_probability,
    of_draws,
)

__all__ = [
    "EntropySplit",
    "Mahalanobis",
    "entropy",
    "entropy_split",
    "jsd",
    "kl",
    "least_confidence",
    "logits",
    "max_probability",
    "of_draws",
]
