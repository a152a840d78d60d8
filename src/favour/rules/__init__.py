"""Rules: what each operation does to means and covariances. Importing this registers all of them."""

from favour.rules import (
    activation,
    arithmetic,
    attention,
    channel_dropout,
    convolution,
    dropout,
    embedding,
    linear,
    norm,
    pooling,
    products,
    resample,
    shape,
)
from favour.rules.registry import RULES, elementwise, linear_map, operations_table, rule, supported_operations

__all__ = [
    "RULES",
    "activation",
    "arithmetic",
    "attention",
    "channel_dropout",
    "convolution",
    "dropout",
    "elementwise",
    "embedding",
    "linear",
    "linear_map",
    "norm",
    "operations_table",
    "pooling",
    "products",
    "resample",
    "rule",
    "shape",
    "supported_operations",
]
