"""Golden results: what every case and ten networks gave when they were last looked at.

Norms per input, in double precision, of means and covariances; they hold to 1e-6 whatever moves. Where a number is
meant to change, `python tests/test_golden.py` writes them anew, says which changed, and the changelog says why.
Numbers that nothing computes any more are dropped by it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from calls import Call, covariance, dense, every
from cases import CASES, of_kind
from golden_networks import NETWORKS, SETTINGS, build
from torch import Tensor

import favour
from favour.errors import UnsupportedOperation

FILES = {kind: Path(__file__).parent / "golden" / f"{kind}.json" for kind in ("cases", "networks")}
TOLERANCE = 1e-6
Record = dict[str, list[list[float]]]


def norms(mean: Tensor, matrix: Tensor) -> list[list[float]]:
    """‖mean‖ and ‖Σ‖ for each input."""
    return [mean.reshape(len(mean), -1).norm(dim=1).tolist(), matrix.flatten(1).norm(dim=1).tolist()]


def of_case(case) -> Record:
    """Each result of a case: its mean, and the sum of what each argument and the operation's own noise contribute."""
    call = Call(case)
    found: Record = {}
    for i, surrogate in enumerate(call.surrogates()):
        mean = surrogate.mean
        if mean.ndim == 0:
            mean = mean.reshape(1)
        matrix = torch.zeros(mean.shape[0], *[mean[0].numel()] * 2, dtype=torch.float64)
        for noise in surrogate.noises:
            matrix += covariance(noise, mean.shape).detach().double()
        for value, G in surrogate.maps:
            J = dense(G, value.mean.shape, value.mean.dtype).double()
            whole = J @ torch.block_diag(*full(value)) @ J.T
            matrix += (
                whole.unflatten(0, matrix.shape[:2]).unflatten(2, matrix.shape[:2]).diagonal(0, 0, 2).movedim(-1, 0)
            )
        found[str(i)] = norms(mean.detach().double(), matrix)
    return found


def full(value) -> Tensor:
    """diag + factor factorᵀ of a Value, (B, n, n)."""
    rows = value.mean.shape[0]
    matrix = torch.diag_embed(value.diag.reshape(rows, -1).double())
    for block in value.blocks.values():
        u = block.reshape(len(block), rows, -1).double().permute(1, 2, 0)
        matrix = matrix + u @ u.mT
    return matrix


def of_network(name: str) -> Record:
    """Each setting, and the belief across inputs."""
    model, x = build(name)
    found: Record = {}
    with torch.no_grad():
        for setting, options in SETTINGS.items():
            predict = favour.compile(model, x, check=False, **options)
            belief = predict(x)
            found[setting] = norms(belief.mean, belief.covariance_matrix)
        joint = favour.compile(model, x, method="adjoint", secant=False, check=False).joint(x)
        found["joint"] = norms(joint.mean, joint.covariance_matrix)
    return found


def read(kind: str) -> dict[str, Record]:
    return json.loads(FILES[kind].read_text())


def differences(old: Record, new: Record) -> list[str]:
    """Where numbers differ, relative to their size."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new:
            found.append(f"{key} is {'new' if key in new else 'gone'}")
            continue
        a, b = torch.tensor(old[key], dtype=torch.float64), torch.tensor(new[key], dtype=torch.float64)
        gap = float(((a - b).abs() / (a.abs() + 1e-9)).max()) if a.shape == b.shape else float("inf")
        if not gap <= TOLERANCE:
            found.append(f"{key} differs by {gap:.2g}: {old[key]} was, {new[key]} is")
    return found


KNOWN = {kind: read(kind) if FILES[kind].exists() else {} for kind in FILES}


@every(*{c.kind for c in CASES} - {"refused"})
def test_case_is_as_it_was(case):
    found = differences(KNOWN["cases"].get(case.name, {}), of_case(case))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_is_as_it_was(name):
    found = differences(KNOWN["networks"].get(name, {}), of_network(name))
    assert not found, "\n".join(found)


def test_a_difference_is_seen():
    record = {"adjoint": [[1.0, 2.0], [3.0, 4.0]]}
    assert differences(record, record) == []
    assert differences(record, {"adjoint": [[1.0, 2.0], [3.0, 4.00001]]})
    assert differences(record, {}) == ["adjoint is gone"]


def main() -> None:
    torch.set_num_threads(1)
    made: dict[str, dict[str, Record]] = {"cases": {}, "networks": {}}
    for case in of_kind(*{c.kind for c in CASES} - {"refused"}):
        try:
            made["cases"][case.name] = of_case(case)
        except UnsupportedOperation as error:
            sys.exit(f"{case.name}: {error}")
    for name in NETWORKS:
        made["networks"][name] = of_network(name)
    for kind, records in made.items():
        for name, record in records.items():
            for line in differences(KNOWN[kind].get(name, {}), record):
                print(f"{name}: {line}")
        rounded = json.loads(json.dumps(records), parse_float=lambda t: float(f"{float(t):.10g}"))
        FILES[kind].parent.mkdir(exist_ok=True)
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(rounded[name])}" for name in sorted(rounded))
        FILES[kind].write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
