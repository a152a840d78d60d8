"""Settings shared by all tests: one thread per process, no deadlines. Seeds: `conftest.py` above."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# Examples are the same in every run, and a slow machine is not a failure.
settings.register_profile(
    "favour", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("favour")

torch.set_num_threads(1)  # the tensors are small, and the workers share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
