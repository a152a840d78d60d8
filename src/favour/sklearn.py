"""scikit-learn estimators: see `favour.integrations.sklearn` and `favour.integrations.trained`."""

from favour.integrations.sklearn import FavourClassifier, FavourRegressor
from favour.integrations.trained import TrainedClassifier, TrainedRegressor

__all__ = ["FavourClassifier", "FavourRegressor", "TrainedClassifier", "TrainedRegressor"]
