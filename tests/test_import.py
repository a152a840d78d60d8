"""What `import favour` brings with it."""

import subprocess
import sys

HEAVY = ["torch._dynamo", "torch._inductor", "matplotlib", "sklearn", "typer", "rich", "pandas", "scipy"]


def test_import_loads_neither_the_compiler_nor_an_extra():
    """The compiler alone takes a second to import; extras may be missing altogether."""
    code = (
        "import sys, torch; before = set(sys.modules); import favour; "
        f"print([m for m in {HEAVY!r} if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
