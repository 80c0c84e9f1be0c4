"""The report as a real browser shows it.

Every plot is there and has data, no text lies on other text or is cut, colours stand out from their
ground, and nothing comes from elsewhere.
"""

import json
import pathlib
import re
import shutil
import subprocess

import pytest
from processes import binary
from report_fixture import ARMS, synthetic_lines, write_synthetic_log

HERE = pathlib.Path(__file__).parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NARROW, WIDE = 420, 1200
KINDS = ("load", "gpus", "choices", "predicted", "links")


def make_page(directory, lines):
    """The report of these lines, as `forebay trace report` writes it."""
    log, page = directory / "records.jsonl", directory / "report.html"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [binary(), "trace", "report", str(log), "--html", str(page)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return page


def look(page, width, dark=False):
    """What the page looks like from inside a browser whose window is `width` wide."""
    if CHROMIUM is None:
        pytest.skip("SKIPPED: no Chromium: `make setup` installs it")
    checker = (HERE / "page_check.js").read_text(encoding="utf-8")
    watched = page.with_name(f"watched-{width}-{dark}.html")
    text = page.read_text(encoding="utf-8")
    watched.write_text(text.replace("</body>", f"<script>{checker}</script></body>"), encoding="utf-8")
    profile = page.with_name(f"profile-{width}-{dark}")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        f"--window-size={width},2400",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        watched.as_uri(),
    ]
    dom = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    shutil.rmtree(profile, ignore_errors=True)
    found = re.search(r'<script type="application/json" id="page-check">(.*?)</script>', dom, re.DOTALL)
    assert found, f"the checker did not run: {dom[-500:]}"
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with everything on it."""
    return make_page(tmp_path_factory.mktemp("report"), synthetic_lines())


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_text_is_cut_or_covered_or_faint(page, width, dark):
    """On a telephone and on a desk, by day and by night."""
    seen = look(page, width, dark)
    assert seen["problems"] == []
    assert (seen["background"] < 0.2) == dark


def test_every_plot_is_there_and_has_data(page):
    """Each plot has the lines or bars that the log holds, and words for those who cannot see it."""
    seen = look(page, WIDE)
    plots = {plot["id"]: plot for plot in seen["plots"]}
    per_arm = [f"plot-{kind}-{arm}" for kind in KINDS for arm in range(len(ARMS))]
    assert sorted(plots) == sorted(["plot-ttft", "plot-hits", *per_arm])
    assert plots["plot-ttft"]["lines"] == len(ARMS)
    assert plots["plot-ttft"]["points"] > 100
    assert plots["plot-hits"]["bars"] == 3 * len(ARMS)
    for arm in range(len(ARMS)):
        assert plots[f"plot-load-{arm}"]["lines"] == 4
        assert plots[f"plot-load-{arm}"]["points"] > 50
        assert plots[f"plot-gpus-{arm}"]["lines"] == 2
        assert plots[f"plot-links-{arm}"]["bars"] == 8
        assert plots[f"plot-choices-{arm}"]["bars"] > 50
        assert plots[f"plot-predicted-{arm}"]["dots"] > 200
    for plot in plots.values():
        assert plot["title"] and plot["description"], plot["id"]
        assert plot["tips"] > 0 and plot["width"] > 300, plot["id"]
    sections = ["headline", "ttft", "hits", "load", "gpus", "decisions"]
    sections += ["links", "classes", "how", "parameters"]
    assert seen["sections"] == sections


def test_the_value_under_the_pointer_is_shown(page):
    """The only script of the page works."""
    tip = look(page, WIDE)["tip"]
    assert tip.startswith("within ")
    assert all(f"{arm}: " in tip for arm in ARMS)


def test_nothing_comes_from_elsewhere(page):
    """The page can be mailed and opened anywhere."""
    assert look(page, WIDE)["fetched"] == []
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\ssrc=", text)


def test_long_names_and_large_figures_still_fit(tmp_path):
    """Names and figures come from a log, and a log may hold anything."""

    def stretched(line):
        line = {**line, "arm": f"a policy with a name that nobody would choose, {line['arm']}"}
        if line["kind"] == "load":
            line["instance"] = f"engine.with.a.long.name.in.some.cluster.{line['instance']}"
            line["running"] *= 1_000
        if line["kind"] == "link":
            line["link"] = f"a link between two places far apart, {line['link']}"
            line["bytes"] *= 1_000_000
        if line["kind"] == "request":
            line["ttft_s"] *= 1_000
            line["e2e_s"] *= 1_000
        if line["kind"] == "run":
            line["parameters"].append(["trace", "/a/path/without/any/place/to/break" * 8])
        return line

    page = make_page(tmp_path, map(stretched, synthetic_lines(arms=ARMS[:2], requests=40)))
    for width in (NARROW, WIDE):
        assert look(page, width)["problems"] == []


def test_a_log_of_requests_alone_still_gives_a_page(tmp_path):
    """What was not sampled has no section."""
    lines = [line for line in synthetic_lines(arms=["lpwl"], requests=3) if line["kind"] == "request"]
    seen = look(make_page(tmp_path, lines), WIDE)
    assert seen["problems"] == []
    assert seen["sections"] == ["headline", "ttft", "hits", "classes", "how"]


def test_a_torn_log_is_reported_as_far_as_it_goes(tmp_path):
    """A crash costs the line that was being written and nothing else."""
    log = tmp_path / "records.jsonl"
    write_synthetic_log(log, arms=["lpwl"], requests=20)
    log.write_bytes(log.read_bytes()[:-30])
    command = [binary(), "trace", "report", str(log), "--summary", str(tmp_path / "summary.json")]
    text = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
    assert "Lines of the log that could not be read: 1." in text
    assert max(map(len, text.splitlines())) <= 100
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["arms"][0]["requests"] == 20
