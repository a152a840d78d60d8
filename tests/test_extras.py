"""Every extra alone: installed from a wheel into an environment of its own, where what its pages promise is tried.

One environment holds what Favour itself requires. Each extra gets another that sees this one through a path file, so
that PyTorch is fetched once; apart from it there are only Favour and the packages of the extra itself. Run with
`make test-extras`; versions are those of constraints.txt.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import favour

pytestmark = pytest.mark.extras

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BARE = """
import favour, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)).eval()
x = torch.randn(8, 4)
predict = favour.compile(model, x[:2])
"""

TRIED = {
    "": BARE
    + """
predict.save("bare.favour")
assert torch.equal(favour.load("bare.favour")(x).mean, predict(x).mean)
favour.export(predict, "bare.pt2")
assert favour.load_exported("bare.pt2")(x.numpy())["probabilities"].shape == (8, 3)
assert favour.check(predict, x[:2], n=200)
import importlib.util
assert not [m for m in ("scipy", "pyarrow", "typer", "sklearn", "onnx", "pandas") if importlib.util.find_spec(m)]
run("favour", "--help", code=2, says="favour[cli]")
""",
    "cli": """
run("favour", "--help", says="rate")
run("favour", "--version", says="favour")
run("favour", "export", "model.favour", "--out", "again.pt2", says="classification")
run("favour", "export", "model.favour", "--out", "again.onnx", code=1, says="favour[export]")
run("favour", "rate", "model.favour", "x.csv", "--out", "r.parquet", code=1, says="favour[rate]")
run("favour", "serve", "model.pt2", code=1, says="favour[serve]")
run("favour", "demo", code=1, says="favour[demo]")
run("favour", "bench", code=1, says="pip install ./studies")
""",
    "plots": BARE
    + """
import matplotlib; matplotlib.use("Agg")
import favour.plots
favour.plots.reliability(predict.probabilities(x), torch.arange(8) % 3).figure.savefig("r.png")
""",
    "sklearn": """
import numpy as np
from favour.sklearn import FavourRegressor
x = np.random.default_rng(0).standard_normal((60, 3)).astype("float32")
mean, deviation = FavourRegressor(epochs=2).fit(x, x.sum(1)).predict(x, return_std=True)
assert np.isfinite(mean).all() and np.isfinite(deviation).all()
""",
    "botorch": """
import favour, torch
import favour.botorch
from botorch.acquisition import LogExpectedImprovement
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)).double().eval()
model = favour.botorch.FavourModel(favour.compile(net, torch.zeros(2, 2, dtype=torch.float64)))
found = LogExpectedImprovement(model, best_f=0.0)(torch.rand(5, 1, 2, dtype=torch.float64))
assert found.shape == (5,)
""",
    "export": BARE
    + """
favour.export(predict, "made.onnx")
assert favour.load_exported("made.onnx")(x.numpy())["probabilities"].shape == (8, 3)
""",
    "cli,export": """
run("favour", "export", "model.favour", "--out", "made.onnx", says="classification")
run("favour", "export", "my_models:net", "--weights", "w.safetensors", "--shape", "4", "--out", "w.onnx", says="3")
run("favour", "export", "my_models:net", "--weights", "w.safetensors", "--shape", "4", "--out", "w.pt2", says="3")
""",
    "rate": """
for model in ("model.onnx", "model.pt2", "model.favour"):
    run("favour", "rate", model, "x.csv", "--out", f"rated-{model}.parquet", "--id", "key", says="rated 8 rows")
run("favour", "rate", "my_models:net", "x.csv", "--weights", "w.safetensors", "--out", "w.csv", says="rated 8 rows")
run("favour", "rate", "my_models:pixels", "photographs", "--size", "4", "--out", "images.parquet", says="rated 2 rows")
import os, pyarrow.parquet as pq
found = [pq.read_table(f"rated-model.{form}.parquet")["prediction"].to_pylist() for form in ("onnx", "pt2", "favour")]
assert found[0] == found[1] == found[2]
assert os.path.isfile("w.csv")
""",
    "ray": """
for model in ("model.onnx", "model.pt2"):
    run("favour", "rate", model, "x.csv", "--out", f"ray-{model}/", "--engine", "ray", "--workers", "1", says="rated 8")
run("favour", "rate", "model.onnx", "x.csv", "--out", "one.csv", says="rated 8 rows")
""",
    "serve": """
import json, subprocess, time, urllib.request
for model, port in (("model.onnx", 18231), ("model.pt2", 18232)):
    server = subprocess.Popen([command("favour"), "serve", model, "--port", str(port)])
    try:
        for _ in range(300):
            time.sleep(0.2)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                assert server.poll() is None, "the server is gone"
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/predict",
            json.dumps({"inputs": [[1, 2, 3, 4]]}).encode(),
            {"content-type": "application/json"},
        )
        answer = json.load(urllib.request.urlopen(request))
        assert answer["rows"] == 1 and "probabilities" in answer["outputs"]
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/").status == 200
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").status == 200
    finally:
        server.terminate()
        server.wait()
""",
    "demo": """
run("favour", "demo", "--epochs", "2", "--out", "report", says="report")
""",
    "docs": """
import subprocess
subprocess.run([command("mkdocs"), "--version"], check=True)
import latex2mathml.converter, mkdocstrings, material
""",
    "peers": """
import einops, opt_einsum, pyro, torchbnn
import ivon
import favour.adapters
""",
}

# What every script may use: a command of its environment, and what it has to say.
HELPERS = """
import os, subprocess, sys

def command(name):
    return os.path.join(os.path.dirname(sys.executable), name)

def run(name, *arguments, code=0, says=""):
    done = subprocess.run([command(name), *arguments], capture_output=True, text=True)
    shown = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, (arguments, done.returncode, shown[-3000:])
    assert says in shown, (arguments, says, shown[-3000:])
"""

MODELS = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def pixels():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(48, 2))
"""


def quiet() -> dict[str, str]:
    """The environment without this one's packages."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return {**kept, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def install(environment: Path, *what: str) -> None:
    pip = (str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    done = subprocess.run([*pip, *what], capture_output=True, text=True, env=quiet())
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the tree."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(out), str(copy)]
    subprocess.run(pip, check=True, capture_output=True, env=quiet())
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="session")
def required(tmp_path_factory) -> Path:
    """An environment with what Favour itself requires, and without Favour."""
    folder = tmp_path_factory.mktemp("required") / "venv"
    venv.create(folder, with_pip=True)
    install(folder, *PROJECT["dependencies"])
    return folder


def site_packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python*")) / "site-packages"


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """Models and data that the scripts use."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)).eval()
    predict = favour.compile(net, torch.zeros(2, 4))
    predict.save(folder / "model.favour")
    for form in ("onnx", "pt2"):
        favour.export(predict, folder / f"model.{form}")
    save_file(net.state_dict(), folder / "w.safetensors")
    (folder / "my_models.py").write_text(MODELS)
    x = np.random.default_rng(0).standard_normal((8, 4))
    lines = [f"k{i}," + ",".join(map(str, row)) for i, row in enumerate(x)]
    (folder / "x.csv").write_text("\n".join(["key,a,b,c,d", *lines]) + "\n")
    (folder / "photographs").mkdir()
    for i in range(2):
        Image.new("RGB", (6, 5), (100 * i, 50, 25)).save(folder / "photographs" / f"{i}.png")
    return folder


def test_every_extra_is_tried():
    """But `dev`, in which all other tests run."""
    assert {part for extra in TRIED for part in extra.split(",")} == {"", *PROJECT["optional-dependencies"]} - {"dev"}


@pytest.mark.parametrize("extra", TRIED, ids=lambda extra: extra or "none")
@pytest.mark.filterwarnings("ignore")
def test_extra_alone(tmp_path, required, wheel, files, extra):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    (site_packages(environment) / "required.pth").write_text(str(site_packages(required)))
    install(environment, f"favour[{extra}] @ {wheel.as_uri()}" if extra else str(wheel))
    work = tmp_path / "work"
    shutil.copytree(files, work)
    script = HELPERS + TRIED[extra]
    python = str(environment / "bin" / "python")
    done = subprocess.run([python, "-c", script], cwd=work, capture_output=True, text=True, env=quiet(), timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
