"""Pictures, and the HTML page as a reader sees it: in headless Chromium, where one is installed."""

from __future__ import annotations

import base64
import builtins
import json
import re
import shutil
import subprocess

import pytest

from jaxrunner.errors import NotBuiltError
from jaxrunner.ladder import pictures
from jaxrunner.ladder.costs import Costs
from jaxrunner.ladder.html import page, write_page
from jaxrunner.ladder.serving import Limits
from jaxrunner.ladder.study import Study, study
from jaxrunner.ladder.traces import Trace

pytest.importorskip("matplotlib")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
PROBE = """<script>
addEventListener("load", () => {
  const box = (e) => e.getBoundingClientRect();
  const seen = {
    text: document.body.innerText,
    title: document.title,
    images: [...document.images].map((i) => [i.alt, i.naturalWidth, box(i).width, box(i).right]),
    tables: [...document.querySelectorAll("table")].map(
      (t) => [...t.rows].map((r) => [...r.cells].map((c) => c.innerText))),
    width: document.documentElement.clientWidth,
    scroll: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map((e) => e.name).filter((n) => !n.startsWith("data:")),
  };
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(seen))));
  document.body.replaceChildren(out);
});
</script>"""


@pytest.fixture(scope="module")
def made() -> Study:
    trace = Trace.poisson(12, 150, seed=0, prompt_mean=200, output_mean=60)
    return study(
        Trace("rate <12> & more", trace.arrival_s, trace.prompt_tokens, trace.output_tokens), limits=Limits(32, 1024)
    )


def seen_by_a_browser(path, width: int) -> dict:
    """What the page holds once it is loaded in a window of this width."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no headless browser is installed (looked for {', '.join(BROWSERS)})")
    probed = path.with_name("probed.html")
    probed.write_text(path.read_text(encoding="utf-8").replace("</head>", PROBE + "</head>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    command = [
        browser,
        *options,
        f"--window-size={width},900",
        "--virtual-time-budget=5000",
        "--dump-dom",
        probed.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="probe">([^<]+)</pre>', done.stdout)
    assert found, f"the page's script did not run: {done.stderr[-500:]}"
    return json.loads(base64.b64decode(found[1]).decode())


def test_a_reader_sees_tables_pictures_and_the_answer(made, tmp_path):
    path = tmp_path / "report.html"
    write_page(made, path, horizon_s=7200)
    seen = seen_by_a_browser(path, 1200)
    assert seen["title"] == "Ladders: rate <12> & more"
    assert "rate <12> & more" in seen["text"], "names are text, not markup"
    best = made.best(7200)
    assert f"goes on for 2 h, {best.buckets} fitted buckets pay best" in seen["text"]
    assert len(seen["images"]) == 5 + bool(pictures.timeline_spans(made.costs))
    for alt, natural, width, right in seen["images"]:
        assert natural > 500, f"the picture {alt!r} is broken"
        assert width > 300
        assert right <= seen["width"]
    comparison, pairs, sizes, *measured = seen["tables"]
    assert [row[0] for row in comparison[1:]] == [o.name for o in made.comparison.outcomes]
    assert [row[0] for row in pairs[1:]] == [p.rule.name for p in made.pairs]
    assert comparison[1][3] == f"{made.comparison.outcomes[0].waste:.1%}"
    assert {row[0] for row in sizes} >= {"jaxrunner", "fitted, 16"}
    assert len(measured) == 2
    assert seen["requests"] == [], "the page loads something"
    assert seen["scroll"] <= seen["width"]


def test_it_is_readable_in_a_narrow_window(made, tmp_path):
    path = tmp_path / "report.html"
    write_page(made, path)
    seen = seen_by_a_browser(path, 520)
    assert seen["scroll"] <= seen["width"], "wide tables scroll by themselves, the page does not"
    assert all(right <= seen["width"] for *_, right in seen["images"])


def test_a_page_by_padded_tokens_names_no_time(made):
    steps_only = study(Trace.poisson(12, 60, seed=0), limits=Limits(32, 1024), costs=Costs.tokens())
    text = page(steps_only)
    assert "pay best" not in text
    assert "Measured:" not in text
    assert text.count("<img") == 4


def test_pictures_are_saved_as_files(made, tmp_path):
    spans = [
        {"lane": "host", "span": "schedule", "start_us": 0.0, "us": 100.0},
        {"lane": "device", "span": "step", "start_us": 80.0, "us": 900.0},
    ]
    for name, figure in {
        "waste.png": pictures.waste(made.schemes, 32),
        "timeline.svg": pictures.timeline(spans),
        "frontier.pdf": pictures.frontier(made),
        "comparison.png": made.comparison.plot(),
    }.items():
        pictures.save(figure, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 2000
    labels = [text.get_text() for text in pictures.timeline(spans).axes[0].get_legend().get_texts()]
    assert labels == ["schedule 100 us", "step 900 us"]


def test_a_waste_picture_holds_the_padding_of_each_size(made):
    figure = pictures.waste(made.schemes[:1], 32)
    (area,) = [c for c in figure.axes[0].collections if c.get_paths()]
    heights = {round(y, 3) for path in area.get_paths() for _, y in path.vertices}
    assert round(0.7 * (1 - 17 / 32), 3) in heights, "17 requests in a bucket of 32"
    assert round(0.7 * 0.25, 3) in heights, "3 requests in a bucket of 4"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NotBuiltError, match=r"pip install 'jaxrunner\[plots\]'"):
        pictures.new_figure(1, 1)
