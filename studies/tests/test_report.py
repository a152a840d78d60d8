"""The report from small made-up results: every figure, table and sentence is there, and says what the numbers say."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from made_up_results import ALL, boot, classification, jsd, ood

from favour.errors import CorruptFile, FavourError, InvalidValue
from favour.pages import Axis, fences
from favour_studies.report import build
from favour_studies.report.readme import section

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VOID = {"meta", "link", "br", "path", "img", "hr"}


FIGURES = ["classification-mnist-dropout10", "classification-cifar10-dropout10", "regression-nll", "regression-boston"]
FIGURES += ["regression-energy", "ood", "jsd", "sine", "simplex"]
TABLES = ["headline-table", "runs-table", "trainings-table", "table-classification-mnist-dropout10", "table-regression"]
TABLES += ["table-all-classification-mnist-dropout10", "classification-bootstrap", "regression-bootstrap"]
TABLES += ["table-all-regression-boston-dropout10-validation", "table-ood-1", "table-ood-2", "table-ood-3"]
TABLES += ["ood-bootstrap", "table-jsd", "table-jsd-error", "table-simplex"]


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, **{name: make() for name, make in ALL.items()})


class Page(HTMLParser):
    """Ids by tag, the text of each element with an id, and whether tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.words, self.links = [], {}, {}, []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[k] for k in ("src", "href", "xlink:href") if k in given]
        if "id" in given:
            assert given["id"] not in self.ids, f"id {given['id']} twice"
            self.ids[given["id"]] = tag
        if tag not in VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append((tag, given.get("id")))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data):
        for _, name in self.open:
            if name:
                self.words[name] = self.words.get(name, "") + data


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_every_figure_and_table_is_there(folder):
    page = read(build(folder))
    assert [n for n in FIGURES if page.ids.get(f"figure-{n}") != "figure"] == []
    assert [n for n in TABLES if page.ids.get(n) != "table"] == []
    for name in ("headline", "runs", *ALL):
        assert page.ids[name] == "section" and f"#{name}" in page.links


def test_page_needs_nothing_from_elsewhere(folder):
    text = build(folder).read_text()
    assert all(link.startswith(("#", "data:")) for link in Page(text).links)
    assert not re.search(r"https?://|<script|@import|url\(", text)
    assert "default-src 'none'" in text


def test_headline_says_where_sampling_wins(folder):
    words = read(build(folder)).words["headline"]
    assert "≥ 1,000" in words and "wins in NLL, ECE" in words
    assert "AUROC of JSD ≤ 1*" in words  # few samples are better, yet sampling of equal time is not: no equal
    assert "45.7" not in words and "46×" in words  # 640 samples for the time of 14
    assert "Classification, ECE: not worse than 1,000 samples in 0 of 1 setting." in words
    assert "Cifar10, MLP, dropout 10% (by 0.0020)" in words
    assert "Regression, NLL: not worse than 1,000 samples in 2 of 2 settings, 2 of them better" in words


def test_every_estimator_is_judged_with_its_cost(folder):
    page = read(build(folder))
    words = page.words["headline"]
    worse = (
        "NLL by 192 draws (median cost 2 forward passes or 14 samples): not worse than 1,000 samples in 0 of 1 setting."
    )
    assert f"Classification, {worse} Worse: Mnist, MLP, dropout 10% (by 0.0020)." in words
    assert (
        "NLL by many draws (median cost 5 forward passes or 14 samples): not worse than 1,000 samples in 1 of 1"
        in words
    )
    assert "NLL by fresh samples (median cost 300 forward passes" in words
    assert "One adjoint pass with many draws matches 640 samples in NLL" in page.words["classification"]
    assert "a timed CPU, 2 threads" in page.words["runs"]
    table = page.words["classification-bootstrap"]
    assert "many draws" in table and "fresh samples" in table


def test_readings_follow_the_numbers(folder):
    before = read(build(folder)).words
    assert "The goal was 2: not met." in before["ood"] and "worse by 0.0020" in before["ood"]
    changed = ood()
    changed["summary"]["not_worse"] = 2
    for model in changed["pairs"][0]["models"]:
        model["bootstrap"] = [boot("auroc", "better", score="jsd")]
    write(folder, ood=changed)
    after = read(build(folder)).words["ood"]
    assert "The goal was 2: met." in after and "worse by" not in after
    assert "2 of them better" in after


def test_a_goal_is_told_of_the_method_it_is_set_for(folder):
    changed = ood()
    changed["summary"] |= {"ours": "many draws"}
    for model in changed["pairs"][0]["models"]:
        first = boot("auroc", "worse", score="jsd")
        model["bootstrap"] = [
            first,
            boot("auroc", "better", score="jsd_many", ours="many draws", estimator="many draws"),
        ]
    write(folder, ood=changed)
    words = read(build(folder)).words["ood"]
    assert words.count("The goal was 2") == 1 and "The goal was 2: met." in words
    assert words.index("by many draws") < words.index("in 0 of 2 settings")


def test_trainings_and_unfinished_runs_are_told(folder):
    words = read(build(folder)).words["runs"]
    assert "10% of the paper's epochs" in words and "abc1234" in words
    assert "Not finished when this was written: Calibration, regression" in words


def test_paper_numbers_stand_beside_ours(folder):
    words = read(build(folder)).words
    assert "91.2 ±1.0" in words["table-ood-1"] and "77.7 ±0.3" in words["table-ood-1"]
    assert "Not run: no network <here>" in words["table-ood-2"]
    assert "77.7" not in words["table-ood-3"]


def test_missing_experiment_says_how_to_run_it(tmp_path):
    words = read(build(write(tmp_path, jsd=jsd()))).words
    assert "favour reproduce ood --profile quick --data DATA" in words["ood"]
    assert "was not run" in words["classification"] and "was not run" not in words["jsd"]
    assert "headline" not in words


def test_missing_numbers_are_dashes(folder):
    content = classification()
    row = content["tasks"][0]["methods"][1]
    row["metrics"]["nll"], row["time"] = None, None
    content["tasks"][0]["headline"] |= {"forwards": None, "cached_samples": None, "naive_samples": None}
    content["tasks"][0]["bootstrap"] = []
    words = read(build(write(folder, classification=content))).words
    assert "a time that was not measured" in words["classification"]


def test_cut_off_file_is_named(folder):
    path = folder / "ood.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(CorruptFile, match=r"ood\.json"):
        build(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    "change", [{"pairs": [{"id": "x"}]}, {"format": 99}, {"experiment": "jsd"}, {"scores": None}, {"environment": 3}]
)
def test_wrong_layout_is_named(folder, change):
    write(folder, ood=ood() | change)
    with pytest.raises(CorruptFile, match=r"ood\.json"):
        build(folder)


def test_missing_key_and_wrong_type_are_named(folder):
    content = jsd()
    del content["panels"]
    write(folder, jsd=content)
    with pytest.raises(CorruptFile, match=r"jsd\.json has no panels"):
        build(folder)
    write(folder, jsd=[1, 2])
    with pytest.raises(FavourError, match=r"jsd\.json should hold an object"):
        build(folder)


def test_empty_and_missing_folders(tmp_path):
    with pytest.raises(InvalidValue, match="holds none of"):
        build(tmp_path)
    with pytest.raises(InvalidValue, match="no folder"):
        build(tmp_path / "nowhere")


def test_figures_are_files_too(folder):
    out = build(folder, folder / "elsewhere" / "page.html")
    assert out == folder / "elsewhere" / "page.html"
    names = {path.stem for path in (out.parent / "figures").iterdir()}
    assert names == {"classification-accuracy", "classification-ece", "classification-nll", "jsd", "sine", "simplex"}
    for path in (out.parent / "figures").iterdir():
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_readme_section(folder):
    text = section(folder, folder / "pictures", "pictures")
    ours = "| Classification: Mnist, MLP, dropout 10% | NLL | 64 | 14 | 5.2 | worse than 1,000 samples |"
    assert f"{ours} 640 | 14 | not worse than 1,000 samples |" in text and "| many draws: matched |" in text
    assert "sampling of equal time wins" in text
    for link in re.findall(r"\((pictures/.*?)\)", text):
        assert (folder / link).is_file()
    assert text.count("![") == 2


def test_ticks_are_distinct_and_inside():
    for low, high in ((0, 1), (47.5, 58.1), (-3, 3), (0.0, 4e-5), (5.7321, 5.7336), (960, 12000)):
        ticks = Axis(low, high).ticks()
        labels = [label for _, label in ticks]
        assert len(ticks) >= 3 and len(set(labels)) == len(labels)
        assert all(low - 1e-9 <= v <= high + 1e-9 for v, _ in ticks)
        if low > 1:
            assert all(abs(float(label.replace(",", "")) - v) < 1e-9 for v, label in ticks)
    assert [v for v, _ in Axis(1, 1000, log=True).ticks()] == pytest.approx([1, 10, 100, 1000])


def test_fences_leave_out_far_values_but_keep_what_is_asked():
    values = [1.0, 1.1, 1.2, 1.3, 50.0]
    assert fences(values) == (1.0, 1.3)
    assert fences(values, [50.0]) == (1.0, 50.0)


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no chromium on the path")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(folder, chromium, width, scheme):
    path = build(folder)
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    for name in [*(f"figure-{n}" for n in FIGURES), *TABLES]:
        box = page.locator(f"[id='{name}']").bounding_box()
        assert box is not None and box["width"] > 100 and box["height"] > 40, name
    drawn = "[...document.querySelectorAll('figure svg.chart[role=img]')].map(s => s.getBoundingClientRect().width)"
    widths = page.evaluate(drawn)
    assert len(widths) > 20 and min(widths) > 200
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll in their own boxes
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
    assert complaints == []
    assert [url for url in requests if url != path.as_uri() and not url.startswith("data:")] == []
    page.close()
