"""Run the benchmarks that need no data: `favour bench`, growth, cost, the choice of a method, and Algorithm 1's
convergence. With --peers also the comparison with other libraries, which installs them."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

commands: dict[str, list[str]] = {
    "favour bench": ["-m", "favour.cli", "bench", "--out", str(ROOT / "results" / "bench.json")],
    "benchmarks/growth.py": [str(HERE / "growth.py")],
    "benchmarks/algorithm1.py": [str(HERE / "algorithm1.py")],
    "benchmarks/cost.py": [str(HERE / "cost.py")],
    "benchmarks/choice.py": [str(HERE / "choice.py")],
}
if "--peers" in sys.argv:
    commands["benchmarks/peers.py"] = [str(HERE / "peers.py")]
for name, command in commands.items():
    print(f"==> {name}", flush=True)
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
