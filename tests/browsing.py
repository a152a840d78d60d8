"""Pages in chromium, for every test that opens one: do they fit, stay silent, and ask for nothing?"""

import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
HIDDEN = "[...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth).map(b => b.innerText)"


@contextmanager
def started():
    """A browser; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the path")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def assert_page_fits(browser, path: Path, unfold: bool = True) -> None:
    """A file, at the widths and in the schemes above: nothing beside the screen, no complaint, no request outside."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            page = browser.new_page(viewport={"width": width, "height": 850}, color_scheme=scheme)
            complaints, requests = [], []
            page.on("console", lambda message, told=complaints: told.append(message.text))
            page.on("pageerror", lambda error, told=complaints: told.append(str(error)))
            page.on("request", lambda request, told=requests: told.append(request.url))
            page.goto(path.as_uri())
            if unfold:
                page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            where = f"{path.name} at {width} px, {scheme}"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{where} is too wide"
            assert page.evaluate(HIDDEN) == [], f"{where}: columns beside the screen"
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light"), where
            away = [url for url in requests if not url.startswith(("data:", "file:"))]
            assert away == [] and complaints == [], f"{where}: {away} {complaints}"
            page.close()
