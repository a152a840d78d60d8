"""The paper's experiments: one file each, with its data, its models and its training."""
