"""Rules: what each operation does to means and covariances. Importing this registers all of them."""

from favour.rules import activation, arithmetic, dropout, linear, norm, shape
from favour.rules.registry import RULES, elementwise, linear_map, operations_table, rule, supported_operations

__all__ = [
    "RULES",
    "activation",
    "arithmetic",
    "dropout",
    "elementwise",
    "linear",
    "linear_map",
    "norm",
    "operations_table",
    "rule",
    "shape",
    "supported_operations",
]
