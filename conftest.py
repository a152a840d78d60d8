"""Shared by tests and doctests: fixed seeds, one thread per process, no deadlines, and no check of every predictor."""

import pytest
import torch
import torch._dynamo
from hypothesis import HealthCheck, settings

import favour
from favour.inspect import selfcheck

# Examples are the same in every run, and a slow machine is not a failure.
settings.register_profile(
    "favour", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("favour")

torch.set_num_threads(1)  # the tensors are small, and the workers share the cores

# All predictors share the code of one class, and a process compiles those of many tests: which, is chance.
torch._dynamo.config.recompile_limit = 64


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _self_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`favour.compile` compares every predictor with samples, which thousands of tests do not need: those that do say
    `@pytest.mark.self_check`, and a `check=` that a test gives always counts. However busy the machine is, it draws all
    of its samples: tests of its budget set one."""
    monkeypatch.setattr(selfcheck, "LEAST_SECONDS", 60.0)
    if not request.node.get_closest_marker("self_check"):
        monkeypatch.setitem(favour.compile.__kwdefaults__, "check", False)
