"""Predictors: what compile makes of a model and its noise, and the ways to run it."""
