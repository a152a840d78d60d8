"""Beliefs: batches of Gaussians, how their covariance is held, and regions and intervals from them."""

from favour.belief.belief import Belief

__all__ = ["Belief"]
