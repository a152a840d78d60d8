"""Looking at a predictor: whether its beliefs hold, and whether it still describes its model."""
