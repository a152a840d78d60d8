"""Run the benchmarks that need no data: cost, the choice of a method, and Algorithm 1's convergence."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

for script in ("algorithm1.py", "cost.py", "choice.py"):
    print(f"==> benchmarks/{script}", flush=True)
    subprocess.run([sys.executable, HERE / script], check=True, cwd=HERE)
