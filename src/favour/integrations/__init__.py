"""Predictors as parts of other libraries."""
