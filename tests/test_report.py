"""`flashtile report`: the page is whole and loads nothing; in headless Chromium, where there is one, it works."""

import html.parser
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from test_bench_records import documents  # noqa: F401  (a fixture)

from flashtile import cli
from flashtile.bench import plots, record, report
from flashtile.bench.cases import UsageError

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def few_plots(monkeypatch):
    """A plot a group: each takes a third of a second."""
    all_of_them = plots.figures
    monkeypatch.setattr(plots, "figures", lambda found: list({plot.group: plot for plot in all_of_them(found)}.values()))


@pytest.fixture
def page(documents, few_plots):  # noqa: F811
    # A run of a command that another one is of, too
    documents.append(documents[-1])
    documents[0]["results"][0]["reason"] = "</script><script>alert(1)</script>"
    return report.html({f"run-{i}.json": document for i, document in enumerate(documents)})


class Outline(html.parser.HTMLParser):
    """Elements with their attributes; what is open, to see that all is closed."""

    VOID = {"meta", "input", "br", "link", "img"}

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_page_is_well_formed_and_loads_nothing(page):
    outline = Outline(page)
    assert outline.open == []
    for tag, attributes in outline.elements:
        for name in ("src", "href", "xlink:href", "data"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert "@import" not in page and not re.search(r"url\((?!['\"]?#)", page)
    assert not outline.all("link") and not outline.all("img")


def test_page_can_be_used_with_a_keyboard_and_without_eyes(page):
    outline = Outline(page)
    assert outline.all("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in outline.all("a"):
        assert link["href"][1:] in ids, link
    assert all(svg["role"] == "img" and len(svg["aria-label"]) > 20 for svg in outline.all("svg"))
    regions = [attributes for attributes in outline.all("div") if attributes.get("class") == "scroll"]
    assert regions and all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    assert len(outline.all("table")) == len(regions) == 11
    assert all(attributes.get("scope") == "col" for attributes in outline.all("th"))
    assert page.count("<th ") == len(re.findall(r'<th [^>]*><button type="button">', page))


def test_the_button_of_colours_covers_no_link(page):
    """Links scroll beside it, not under it."""
    links, button = re.search(r'<nav [^>]*>\s*<div class="links">(.*?)</div>\s*<button([^>]*)>', page, re.DOTALL).groups()
    assert 'id="theme"' in button and "<button" not in links and links.count("<a ") == len(Outline(page).all("table")) + 3


def test_page_holds_everything(page, documents):  # noqa: F811
    for text in ("NVIDIA H200", "111111111111", "Forward, small to large", "1×32×4×16", "1.88x", "flashtile run -b 1 -s 32",
                 documents[0]["env"]["torch"], "needs &lt;a&gt; wheel", "power cap 50%", "SLOWER"):  # fmt: skip
        assert text in page, text
    raw = re.search(r'<script type="application/json" id="documents">(.*?)</script>', page, re.DOTALL).group(1)
    assert json.loads(raw) == json.loads(json.dumps(documents))


def test_command_reads_folders_and_writes_all_formats(documents, few_plots, tmp_path, capsys):  # noqa: F811
    for number, document in enumerate(documents[1:3]):
        record.write(str(tmp_path / "runs" / f"{number}.json"), record.to_text(document))
    (tmp_path / "runs" / "other.json").write_text("{}")
    arguments = ["--html", str(tmp_path / "r.html"), "--md", str(tmp_path / "r.md"), "--png", str(tmp_path / "png")]
    assert cli.main(["report", str(tmp_path / "runs"), *arguments]) == 0
    assert "read 2 records, 12 rows" in capsys.readouterr().out
    markdown = (tmp_path / "r.md").read_text()
    assert "## Memory beyond the inputs" in markdown and "| 1024" not in markdown.splitlines()[0]
    assert len(list((tmp_path / "png").glob("*.png"))) == len(list((tmp_path / "png").glob("*.svg"))) == 4


def test_no_record_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError, match="no record"):
        report.find([tmp_path])
    assert cli.main(["report", str(tmp_path / "x.json"), "--no-progress"]) == 2
    assert cli.main(["report", str(tmp_path / "missing.json"), "--no-progress"]) == 2
    assert "not a flashtile-bench/1 document" in capsys.readouterr().err


# --- in a browser --------------------------------------------------------------------------------------------------------

# Runs in the page before and after it, and leaves what it found in an element that --dump-dom shows.
_LISTEN = "<script>window.wrong = []; addEventListener('error', (e) => wrong.push(e.message));</script>"
_TRY = """<script>
addEventListener("load", () => {
  const column = (table, i) => [...table.tBodies[0].rows].map((row) => row.cells[i].dataset.v ?? row.cells[i].textContent);
  const found = {}, table = document.getElementById("t-results"), head = table.tHead.rows[0].cells;
  const index = [...head].findIndex((th) => th.textContent === "ms"), button = head[index].querySelector("button");
  button.focus();
  found.focused = document.activeElement === button;
  button.click(); found.up = column(table, index); found.sorted = head[index].getAttribute("aria-sort");
  button.click(); found.down = column(table, index); found.reversed = head[index].getAttribute("aria-sort");
  head[0].querySelector("button").click(); found.cases = column(table, 0);
  found.only = head[index].getAttribute("aria-sort");
  const filter = document.querySelector("[data-filter='t-results']");
  filter.value = "bwd naive"; filter.dispatchEvent(new Event("input"));
  found.shown = [...table.tBodies[0].rows].filter((row) => row.offsetHeight > 0).map((row) => row.textContent);
  found.said = document.getElementById("c-results").textContent;
  found.plots = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect().height);
  const ink = () => getComputedStyle(document.querySelector("figure svg text")).fill;
  const theme = document.getElementById("theme");
  theme.click(); found.light = [getComputedStyle(document.body).backgroundColor, ink()];
  theme.click(); found.dark = [getComputedStyle(document.body).backgroundColor, ink()];
  found.wide = document.documentElement.scrollWidth - innerWidth;
  found.requests = performance.getEntriesByType("resource").length;
  let saved = null;
  URL.createObjectURL = (blob) => { saved = blob.size; return "#"; };
  document.querySelector("[data-raw='1']").click();
  found.saved = saved;
  found.wrong = wrong;
  const out = document.createElement("pre");
  out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>"""


def chromium(*arguments):
    # As root there is no sandbox to be had, and /dev/shm may be small.
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--no-first-run", "--disable-extensions", "--enable-logging=stderr"]  # fmt: skip
    return subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=90)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 500], ids=["desktop", "phone"])
def test_page_works_in_chromium(page, tmp_path, width):
    path = tmp_path / "page.html"
    path.write_text(page.replace("<head>", f"<head>{_LISTEN}").replace("</body>", f"{_TRY}</body>"))
    done = chromium(f"--window-size={width},900", "--dump-dom", f"file://{path}")
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    found = json.loads(found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["wrong"] == [] and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    times = [float(value) for value in found["up"] if value != "–"]
    assert times == sorted(times) and len(set(times)) > 2 and found["up"][-1] == "–"
    assert [float(v) for v in found["down"] if v != "–"] == times[::-1] and found["down"][-1] == "–"
    assert (found["sorted"], found["reversed"], found["only"]) == ("ascending", "descending", None) and found["focused"]
    # Numbers inside of text count as numbers: b2 before b16
    batches = [int(re.match(r"b(\d+)", case).group(1)) for case in found["cases"]]
    assert batches == sorted(batches) and batches[-1] == 16
    assert len(found["shown"]) == 6 and all("bwd" in text for text in found["shown"]) and found["said"] == "6 rows"
    assert len(found["plots"]) == 8 and min(found["plots"]) > 100
    assert found["light"] == ["rgb(255, 255, 255)", "rgb(89, 99, 110)"]
    assert found["dark"] == ["rgb(20, 23, 27)", "rgb(154, 164, 175)"]
    assert found["wide"] <= 0, "the page itself must not scroll sideways"
    assert found["requests"] == 0 and found["saved"] > 1000


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_page_can_be_seen(page, tmp_path):
    """A screenshot is not blank, in a few seconds."""
    (tmp_path / "page.html").write_text(page)
    begin = time.perf_counter()
    chromium("--window-size=1000,1600", f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path / 'page.html'}")
    assert Path(tmp_path / "page.png").stat().st_size > 40_000 and time.perf_counter() - begin < 60
