"""scikit-learn estimators: see `favour.integrations.sklearn`."""

from favour.integrations.sklearn import FavourClassifier, FavourRegressor

__all__ = ["FavourClassifier", "FavourRegressor"]
