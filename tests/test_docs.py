"""The documentation does what it says: its code runs, its commands exist, its site builds without a warning.

Blocks of a page run in order, in one namespace, in an empty folder. A fence says what kind a block is:

    ```python              run
    ```{.python .slow}     run under the `slow` marker only, after the page's other blocks before it
    ```{.python .gpu}      run under the `gpu` marker only
    ```text                behind a block that prints: its output, numbers up to a tenth
    ```console             commands after "$ ": they exist, and so do their options
"""

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer.main
from browsing import SCHEMES, WIDTHS, assert_page_fits, started

import favour
import favour.cli
from favour.graph.traits import _TABLE
from favour.methods import METHODS, auto, dplr
from favour.rules.registry import RULES
from favour.surrogate.gaussian import KINDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)(`{3,})(.*?)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
FOREIGN = {"adapters.md", "estimators.md", "production.md", "scaling.md"}  # pages that import other libraries
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")

# What the README leaves to the reader's imagination.
README_NAMES = """
import torch

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = torch.nn.Linear(8, 64), torch.nn.Linear(64, 10)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x):
        return self.head(self.dropout(self.fc(x).relu()))


model, x = Model(), torch.randn(20, 8)
x_held_out, y_held_out = torch.randn(100, 8), torch.randn(100, 10)
variance = torch.full((64, 8), 0.01)
"""


@dataclasses.dataclass
class Block:
    """A fenced block: its language and classes, its code, and the line of the page where the code begins."""

    language: str
    classes: frozenset[str]
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        words = re.findall(r"[\w-]+", match[3].split("=")[0])
        indent = len(match[1])
        code = "".join(line[indent:] if line.strip() else "\n" for line in match[4].splitlines(keepends=True))
        line = text[: match.start(4)].count("\n") + 1
        found.append(Block(words[0] if words else "", frozenset(words[1:]), code, line))
    return found


def run(page: Path, wanted: frozenset[str], folder: Path) -> None:
    """Run the page's blocks whose classes are all `wanted`; compare what they print with the text behind them."""
    module = types.ModuleType("__main__")  # classes defined on a page need a module that holds them
    if page.name == "README.md":
        exec(README_NAMES, module.__dict__)
    torch.manual_seed(0)
    printed = None
    with contextlib.chdir(folder), torch.enable_grad(), same_rules():  # a page may switch gradients off
        for block in blocks(page.read_text()):
            if block.language == "python" and block.classes <= wanted:
                code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(code, module.__dict__)
                printed = output.getvalue()
            elif block.language == "text" and printed is not None:
                assert_same(printed, block.code, f"{page.name}:{block.line}")
                printed = None
            else:
                printed = None


@contextlib.contextmanager
def same_rules() -> Iterator[None]:
    """Rules, methods and kinds of posteriors that a page registers are forgotten behind it."""
    tables: list[dict] = [RULES, METHODS, KINDS, _TABLE]
    known = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, before in zip(tables, known, strict=True):
            table.clear()
            table.update(before)


def assert_same(printed: str, shown: str, where: str) -> None:
    """Equal words, and numbers that differ by a tenth or by 0.02: seeds do not fix the last digits everywhere."""

    def words(text: str) -> list[str]:
        return NUMBER.sub("#", text).split()

    def numbers(text: str) -> list[float]:
        return [float(number.replace(",", "")) for number in NUMBER.findall(text)]

    assert words(printed) == words(shown), f"{where} shows\n{shown}\nbut the code prints\n{printed}"
    pairs = zip(numbers(printed), numbers(shown), strict=True)
    off = [(a, b) for a, b in pairs if abs(a - b) > max(0.02, 0.1 * abs(a))]
    assert not off, f"{where}: printed and shown numbers differ: {off}; the code prints\n{printed}"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_python(*classes: str) -> list:
    """Pages that have such blocks, as parameters. Other libraries' warnings are their own affair."""
    wanted = frozenset(classes)
    return [
        pytest.param(page, id=name(page), marks=[pytest.mark.filterwarnings("ignore")] if page.name in FOREIGN else [])
        for page in PAGES
        if any(b.language == "python" and b.classes >= wanted for b in blocks(page.read_text()))
    ]


@pytest.mark.parametrize("page", with_python())
def test_code_runs(page, tmp_path):
    run(page, frozenset(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", with_python("slow"))
def test_slow_code_runs(page, tmp_path):
    run(page, frozenset({"slow"}), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("page", with_python("gpu"))
def test_gpu_code_runs(page, tmp_path):
    run(page, frozenset({"gpu"}), tmp_path)


def test_a_wrong_block_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 / 3)\n```\n\n```text\n0.5\n```\n")
    with pytest.raises(AssertionError, match="differ"):
        run(page, frozenset(), tmp_path)
    page.write_text("text\n\n```python\nx = 1\nundefined\n```\n")
    with pytest.raises(NameError) as error:
        run(page, frozenset(), tmp_path)
    assert error.traceback[-1].lineno == 4  # counted from 0: the page's own line


def commands(text: str) -> list[str]:
    """Commands of the console blocks, continued lines joined."""
    found = []
    for block in blocks(text):
        if block.language == "console":
            joined = block.code.replace("\\\n", " ")
            found += [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
    return found


COMMANDS = [(page, command) for page in PAGES for command in commands(page.read_text())]


@pytest.mark.parametrize("page, command", COMMANDS, ids=[f"{name(p)}: {c}" for p, c in COMMANDS])
def test_command_exists(page, command):
    check_command(command)


def check_command(command: str) -> None:
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=\S*", words[0]):  # VARIABLE=value in front
        words = words[1:]
    program, arguments = words[0], words[1:]
    if program == "favour":
        check_favour(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = {a for a in arguments if "=" not in a} - set(targets)
        assert not unknown, f"no such target: {unknown}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for wanted in re.findall(r"favour\[(.*?)\]", " ".join(arguments)):
            assert set(wanted.split(",")) <= set(extras), wanted
    elif program == "python":
        if arguments[0] == "-m":
            parts = arguments[1].split(".")
            assert parts[0] != "favour" or (ROOT / "src").joinpath(*parts).exists(), arguments[1]
        else:
            assert (ROOT / arguments[0]).exists(), arguments[0]
    else:
        assert program in ("pytest", "curl", "mkdocs", "torchrun", "ray", "docker"), f"unknown program {program!r}"


def check_favour(arguments: list[str]) -> None:
    """The command's own parser takes the arguments; nothing is run."""
    if not arguments or arguments == ["--version"] or arguments == ["--help"]:
        return
    group = typer.main.get_command(favour.cli.build())
    subcommand = group.commands.get(arguments[0])
    assert subcommand is not None, f"no command `favour {arguments[0]}`; there are {sorted(group.commands)}"
    try:
        subcommand.make_context(arguments[0], arguments[1:])
    except Exception as error:
        raise AssertionError(f"`favour {' '.join(arguments)}`: {error}") from error


@pytest.mark.parametrize(
    "command", ["favour dmeo", "favour demo --epoch 3", "favour rate a.onnx", "make tset", 'pip install "favour[x]"']
)
def test_a_wrong_command_is_found(command):
    with pytest.raises(AssertionError):
        check_command(command)


def test_every_public_name_is_in_the_api():
    """All that `import favour` offers is documented, itself or with its module."""
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    listed = set(re.findall(r"^::: favour\.([\w.]+)", pages, re.MULTILINE))
    listed |= {name.split(".")[0] for name in listed}
    for public in favour.__all__:
        thing = getattr(favour, public)
        home = getattr(thing, "__module__", thing.__name__).removeprefix("favour.")
        assert {public, home, f"{home}.{public}"} & listed, f"`favour.{public}` is not in docs/api/"


def test_numbers_of_the_cost_model_are_current():
    text = (ROOT / "docs" / "choosing.md").read_text()
    assert f"is at most {auto.AFFORDABLE:.0f} for all outputs" in text
    assert f"get {auto.DIRECTIONS} directions" in text and f"`dplr` of rank {dplr.RANK}," in text
    assert f"at most {auto.SMALL / 1e7:.0f}·10⁷ multiplications" in text


def test_every_promise_has_its_test():
    rows = re.findall(r"^\| .* \| `(\w+\.py)::(\w+)` \|$", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    for file, name in rows:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in path.read_text(), f"{file} has no {name}"


def test_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    rows = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\s-]+", line)]
    headers = len(re.findall(r"^\|[-|\s]+\|$", text, re.MULTILINE))
    assert len(rows) - headers <= 20
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 10 and not [link for link in links if not (ROOT / link).exists()]


def test_numbers_of_the_readme_are_generated():
    before = (ROOT / "README.md").read_text()
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.numbers() in before


def test_pictures_are_drawn_from_results():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assets = ROOT / "docs" / "assets"
    assert (assets / "error-against-time.svg").read_text() == pictures.error_against_time()
    assert (assets / "digits.svg").read_text() == pictures.digits()


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(p.relative_to(ROOT / "docs")) for p in PAGES if p.name != "README.md")


# What a browser fetches by itself: scripts, styles, pictures, fonts. Links that a reader may click are another matter.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\bsrc\s*=\s*["']?(?:https?:)?//[^\s"'>]+"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|prev|next))[^>]*?\bhref\s*=\s*["']?(?:https?:)?//[^\s"'>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]*\)|@import\s+["'](?:https?:)?//[^"']*"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.browser
def test_site_fits_and_its_search_works_from_a_folder(site):
    with started() as browser:
        assert_page_fits(browser, site / "index.html", unfold=False)
        page = browser.new_page(viewport={"width": 390, "height": 850})
        told = []
        page.on("console", lambda message: told.append(message.text))
        page.on(
            "request", lambda request: told.extend([request.url] * (not request.url.startswith(("file:", "data:"))))
        )
        for path in sorted(site.rglob("*.html")):
            if path.name != "404.html":  # a server's page, with addresses from its root
                for screen in WIDTHS:
                    page.set_viewport_size({"width": screen, "height": 850})
                    page.goto(path.as_uri())
                    for scheme in SCHEMES:
                        page.emulate_media(color_scheme=scheme)
                        width, height = page.evaluate(
                            "[document.documentElement.scrollWidth, document.body.scrollHeight]"
                        )
                        assert width <= screen and told == [], (path.name, screen, scheme, width, told)
                    assert height < 40_000, (path.name, height)
        page.set_viewport_size({"width": 1280, "height": 850})
        page.goto((site / "index.html").as_uri())
        page.click("input[name=query]")
        page.keyboard.type("Kronecker")
        page.wait_for_selector(".md-search-result__item", timeout=20_000)
        assert "Kronecker" in page.locator(".md-search-result__list").inner_text()
        page.close()


def test_site_builds_strictly_and_fetches_nothing(site):
    pages = [p for p in site.rglob("*.html") if p.name != "404.html"]
    assert len(pages) == len(PAGES) - 1
    for path in [*pages, *site.rglob("*.css")]:
        fetched = FETCHED.findall(path.read_text())
        assert not fetched, f"{path.name} fetches {fetched}"
    text = (site / "mathematics" / "linear.html").read_text()
    assert "<math" in text and "arithmatex" not in text and "$" not in re.sub(r"<(script|pre|code).*?</\1>", "", text)
    assert not list(site.rglob("*.py"))
    assert all(f"Favour {favour.__version__}" in path.read_text() for path in pages)


def test_what_is_fetched_is_found():
    for text in (
        '<link rel="preconnect" href="https://fonts.gstatic.com">',
        '<script async src="//cdn.example/x.js">',
        "@font-face { src: url(https://example/x.woff2) }",
    ):
        assert FETCHED.search(text), text
    for text in ('<a href="https://example.org">', '<link rel="stylesheet" href="assets/site.css">'):
        assert not FETCHED.search(text), text
