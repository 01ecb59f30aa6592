"""The report and the built site in Debian's Chromium (`make test-site`): consoles without a message, every figure
there, and pages that scroll in one direction.

With SCREENSHOTS=FOLDER in the environment the pages are left there as PNG files, of a desktop and a phone, light and
dark.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import EVIL, run_folder, write_lines

from megalith.report.page import write_report

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
WIDTHS = {"desktop": 1280, "phone": 500}  # a window of Chromium's has no less than 500
SCHEMES = {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}
SITE = Path(__file__).parents[1] / "build" / "site"
WIDE = """<script>addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement;
  root.dataset.wide = root.scrollWidth - innerWidth;
  root.dataset.blank = document.querySelectorAll("pre.mermaid").length;  // a diagram that was drawn is a div
}, 4000));</script>"""
SEARCH = """<script>addEventListener("load", () => setTimeout(() => {
  const input = document.querySelector(".md-search__input");
  input.focus();
  input.value = "muon";
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  setTimeout(() => {
    document.documentElement.dataset.found = document.querySelectorAll(".md-search-result__item").length;
  }, 4000);
}, 3000));</script>"""
PROBE = """<script>addEventListener("load", () => {
  const root = document.documentElement, plot = document.querySelector('svg[aria-label="policy loss"]').parentElement;
  const box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 9}));
  const first = plot.querySelector("path.line").getAttribute("d");
  root.dataset.tip = document.getElementById("tip").innerText;
  document.querySelector("button[data-toggle]").click();
  root.dataset.hidden = document.querySelectorAll("path.off").length;
  document.querySelector("button[data-toggle]").click();
  document.querySelector("[data-log]").click();
  root.dataset.changed = plot.querySelector("path.line").getAttribute("d") !== first;
  document.querySelector("[data-log]").click();
  for (const [kind, share] of [["pointerdown", 0.25], ["pointerup", 0.75]]) {
    plot.dispatchEvent(new PointerEvent(kind, {clientX: box.left + share * box.width, clientY: box.top + 9}));
  }
  root.dataset.zoomed = plot.querySelector(".x").textContent;
  document.querySelector("[data-reset]").click();
  root.dataset.same = plot.querySelector("path.line").getAttribute("d") === first;
  root.dataset.wide = root.scrollWidth - innerWidth;
  root.dataset.blank = [...document.querySelectorAll(".chart svg")].filter((one) => !one.getBBox().width).length;
});</script>"""
ALIGN = """<script>addEventListener("load", () => {
  const root = document.documentElement, plot = document.querySelector('svg[aria-label="loss"]').parentElement;
  const lineOf = (run) => plot.querySelector(`path.line[data-run="${run}"]:not(.faint)`).getAttribute("d");
  const lines = () => [0, 1].map(lineOf);
  const first = lines().join(), slider = document.querySelector("[data-smoothing]");
  const smooth = (value) => { slider.value = value; slider.dispatchEvent(new Event("input")); };
  smooth(30);
  root.dataset.smoothed = lines().join() !== first;
  smooth(0);
  root.dataset.same = lines().join() === first;
  document.querySelector("[data-align]").click();
  root.dataset.ends = lines().map((d) => d.split(/[ML]/).at(-1).split(" ")[0]).join(" ");
  const box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 9}));
  root.dataset.tip = document.getElementById("tip").innerText;
});</script>"""


def chromium(tmp_path: Path, page: Path, *more: str) -> tuple[str, str]:
    """The document as it stands after its scripts, and what was said on standard error."""
    profile = tmp_path / "profile"
    command = [
        CHROMIUM,
        *FLAGS,
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        *more,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def keep_screenshot(tmp_path: Path, page: Path, name: str, width: str, scheme: str, height: int = 0) -> None:
    """Where they are asked for. Each scheme has a profile of its own: the site's pages remember the first."""
    if folder := os.environ.get("SCREENSHOTS"):
        size = f"--window-size={WIDTHS[width]},{height or {'desktop': 4200, 'phone': 7000}[width]}"
        picture = Path(folder) / f"{name}-{width}-{scheme}.png"
        chromium(
            tmp_path / scheme,
            page,
            size,
            *SCHEMES[scheme],
            "--virtual-time-budget=5000",
            f"--screenshot={picture}",
        )


def told(document: str) -> dict[str, str]:
    """What a probe has written into the page's first tag."""
    return dict(re.findall(r'data-([a-z]+)="([^"]*)"', re.search(r"<html[^>]*>", document)[0]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_is_drawn_without_an_error_at_every_width(tmp_path, width, scheme):
    assert CHROMIUM, "Chromium is not installed: apt-get install chromium"
    runs = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", start=7.0, evil=EVIL)]
    page = write_report(list(map(str, runs)), tmp_path / "report.html")
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    window = (f"--window-size={WIDTHS[width]},1400", *SCHEMES[scheme])
    document, log = chromium(tmp_path, probed, *window, "--dump-dom")
    assert "CONSOLE" not in log, log
    data = told(document)
    assert int(data["ready"]) > 20 and data["blank"] == "0" and int(data["hidden"]) > 10
    assert int(data["wide"]) <= 0
    assert data["changed"] == data["same"] == "true" and int(data["zoomed"]) >= 15  # of steps 1 to 60
    assert "a: 2.398 at step 60" in data["tip"] and "a, validation: 2.5 at step 60" in data["tip"]
    assert "<title>a, b</title>" in document
    keep_screenshot(tmp_path, page, "report", width, scheme)


def test_runs_are_smoothed_and_aligned_by_tokens(tmp_path):
    """The second run has sequences twice as long, so that the first ends in the middle of the tokens."""
    for name, length in {"a": 128, "b": 256}.items():
        folder = run_folder(tmp_path / name)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        write_lines(folder / "metrics.jsonl", [{**record, "rewards_mean": None} for record in records])
        (folder / "completions.jsonl").unlink()
        (folder / "config.yaml").write_text(f"data: {{seq_length: {length}}}\n")
    page = write_report([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "report.html")
    page.write_text(page.read_text().replace("</body>", f"{ALIGN}</body>"))
    document, log = chromium(tmp_path, page, "--window-size=1280,1400", "--dump-dom")
    assert "CONSOLE" not in log, log
    data = told(document)
    assert data["smoothed"] == data["same"] == "true"
    first, second = map(float, data["ends"].split())
    assert second == pytest.approx(2 * first, rel=0.02)
    assert "a: 2.398 at step 60, 61" in data["tip"] and "b: 2.398 at step 60, 12" in data["tip"]


@pytest.mark.parametrize("page", sorted(SITE.rglob("*.html")), ids=lambda page: page.stem)
def test_a_page_of_the_site_is_whole_on_a_phone(tmp_path, page):
    if page.name == "404.html":
        return
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(page.read_text().replace("</body>", f"{WIDE}</body>"))
    try:
        more = ("--window-size=500,1400", "--virtual-time-budget=9000", "--dump-dom")
        document, log = chromium(tmp_path, probed, *more)
    finally:
        probed.unlink()
    assert "CONSOLE" not in log, log
    data = told(document)
    assert int(data["wide"]) <= 0 and data["blank"] == "0"
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        keep_screenshot(tmp_path, page, page.stem, width, scheme, height=2400)


def test_the_search_of_the_site_works_in_a_folder(tmp_path):
    page = SITE / "probed-search.html"
    page.write_text((SITE / "index.html").read_text().replace("</body>", f"{SEARCH}</body>"))
    try:
        document, log = chromium(tmp_path, page, "--virtual-time-budget=12000", "--dump-dom")
    finally:
        page.unlink()
    assert "CONSOLE" not in log, log
    assert int(told(document)["found"]) > 3
    fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', document)
    assert not fetched, fetched
