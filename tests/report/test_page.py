"""The page: one file that is safe, small and complete, checked in a real browser where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geocont.report import page as page_module
from geocont.report.images import write_images
from geocont.report.page import render
from geocont.report.records import read_runs
from geocont.report.series import Fineness
from tests.report.browser import Page, chromium, find_chromium

pytest.importorskip("vl_convert", reason="the extra geocont[report] is not installed")
CHROMIUM = find_chromium()
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set GEOCONT_CHROMIUM or put one on the PATH")
OPTIONS = "[...document.querySelectorAll('select')].map((each) => each.options.length)"
EVIL = '</script><script>document.title="broken"</script><img src=x onerror="document.title=1"> & "\''


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert CHROMIUM is not None
    with chromium(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def report(trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(read_runs([trained["gpt2"], trained["mlp"]])), encoding="utf-8")
    return path


def test_it_is_one_small_file_that_refers_to_nothing(report: Path) -> None:
    text = report.read_text()
    assert len(text.encode()) < 5_000_000
    without_code = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", without_code)
    assert "default-src 'none'" in text
    anchors = set(re.findall(r'href="#([\w-]+)"', text))
    assert anchors <= set(re.findall(r'id="([\w-]+)"', text))
    assert len(anchors) >= 8


def test_it_gets_coarser_until_it_is_small_enough(trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_runs([trained["gpt2"]])
    monkeypatch.setattr(page_module, "FINENESS", (Fineness(), Fineness(2, 2)))
    whole = render(runs)
    monkeypatch.setattr(page_module, "LIMIT", len(whole.encode()) - 1)
    coarse = render(runs)
    assert len(coarse) < len(whole)
    content = json.loads(re.findall(r'id="content">(.*?)</script>', coarse, re.DOTALL)[0])
    assert max(len(figure["frames"]) for figure in content["figures"]) == 2


@needs_browser
def test_every_figure_is_drawn_whatever_is_chosen_without_a_word_or_a_request(browser: Page, report: Path) -> None:
    """The library draws nothing, and says so on the console only, where a specification is wrong."""
    browser.messages.clear()
    browser.requests.clear()
    browser.open(report)
    shown = browser.evaluate("document.querySelectorAll('figure:not([hidden])').length")
    drawn = browser.evaluate("document.querySelectorAll('figure:not([hidden]) canvas').length")
    assert shown == drawn > 20
    for number, count in enumerate(browser.evaluate(OPTIONS)):
        for option in range(1, count):
            browser.choose(number, option)
    canvases = """[...document.querySelectorAll('figure:not([hidden])')].filter((figure) => {
        const canvas = figure.querySelector('canvas'), {width, height} = canvas;
        return canvas.getContext('2d').getImageData(0, 0, width, height).data.every((byte) => byte === 0) }).length"""
    assert browser.evaluate(canvases) == 0, "a figure is empty"
    assert browser.evaluate("reportFailures") == []
    assert browser.messages == []
    assert set(browser.requests) == {report.resolve().as_uri()}


@needs_browser
def test_the_slider_moves_through_training_by_keyboard(browser: Page, report: Path) -> None:
    browser.open(report)
    state = """(() => { const figure = [...document.querySelectorAll('figure:not([hidden])')].find((each) =>
        each.querySelector('.at')); return [figure.querySelector('.at').textContent,
        figure.querySelector('canvas').toDataURL(), document.activeElement.id,
        document.getElementById('step').getAttribute('aria-valuetext')] })()"""
    at, picture, _, spoken = browser.evaluate(state)
    browser.evaluate("document.getElementById('step').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        browser.send("Input.dispatchKeyEvent", {"type": kind, "key": "Home", "windowsVirtualKeyCode": 36}, browser)
    browser.evaluate("new Promise((done) => setTimeout(done, 200))")
    moved = browser.evaluate(state)
    assert (at, spoken) == (" at step 6", "step 6")
    assert (moved[0], moved[2], moved[3]) == (" at step 0", "step", "step 0")
    assert moved[1] != picture


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (360, False)])
def test_it_fits_narrow_windows_and_dark_ones(browser: Page, report: Path, width: int, dark: bool) -> None:
    browser.open(report, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('figure')].filter((each) => each.scrollWidth > each.clientWidth + 1).length"
    assert browser.evaluate(wide) == 0
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is not dark
    unnamed = """[...document.querySelectorAll('[role=img], input, select, button')].filter((each) =>
        !(each.ariaLabel || each.labels?.length || each.textContent)).length"""
    assert browser.evaluate(unnamed) == 0


@needs_browser
def test_nothing_in_a_run_becomes_part_of_the_page(browser: Page, copy_of: Callable[..., Path], tmp_path: Path) -> None:
    """Names, errors and configurations come from other people; a report is opened and passed on without a thought."""
    run = copy_of("mlp", "<b>evil&")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "failed", "error": EVIL, EVIL: EVIL}))
    (run / "config.yaml").write_text(json.dumps({"model": {EVIL: EVIL}}))
    event = {"step": 1, "cause": EVIL, "value": EVIL, "bound": 1.0, "layer": None, "head": None, "place": EVIL}
    (run / "guard.jsonl").write_text(json.dumps(event) + "\n{cut")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace("hidden", "</script><script>document.title=2</script>"))
    path = tmp_path / "report.html"
    path.write_text(render(read_runs([run, copy_of("mlp", "plain")])), encoding="utf-8")
    browser.messages.clear()
    browser.open(path)
    assert browser.evaluate("document.title") == "<b>evil&, plain - geocont report"
    assert browser.evaluate("document.querySelectorAll('img, main b').length") == 0
    assert browser.messages == []


@needs_browser
def test_no_text_is_cut_or_written_over_another(browser: Page, copy_of: Callable[..., Path], tmp_path: Path) -> None:
    """The ends of long names, by which runs differ, were cut from legends, and long labels from their axes."""
    long = "a-name-that-nobody-should-have-given-to-a-run-which-ends-with-seed-{}"
    paths = [copy_of("gpt2", long.format(1)), copy_of("gpt2", long.format(2)), copy_of("mlp", "short")]
    path = tmp_path / "report.html"
    path.write_text(render(read_runs(paths)), encoding="utf-8")
    for width in (1280, 360):
        browser.open(path, width=width)
        spoilt = set(browser.spoilt_texts())
        if width == 1280:
            for number, count in enumerate(browser.evaluate(OPTIONS)):
                for option in (*range(count), 0):
                    browser.choose(number, option)
                    spoilt |= set(browser.spoilt_texts())
        assert spoilt == set()


@needs_browser
def test_what_is_chosen_is_shown_or_said_to_be_missing(
    browser: Page, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    """A select with one option is left out, and then whatever was chosen beside it hid all figures."""
    run = copy_of("gpt2", "weights only")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    others = ("gradient/", "cumulative/", "update/")
    rows = [{key: value for key, value in row.items() if not key.startswith(others)} for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "report.html"
    path.write_text(render(read_runs([copy_of("mlp", "first"), run])), encoding="utf-8")
    browser.open(path)
    for section in ("continuity-through-depth", "spectra-of-the-weights"):
        assert browser.evaluate(f"document.querySelectorAll('#{section} figure:not([hidden])').length"), section
    path.write_text(render(read_runs([run])), encoding="utf-8")
    browser.open(path)
    shown = (
        "[document.querySelectorAll('#{0} figure:not([hidden])').length, document.querySelector('#{0} .none').hidden]"
    )
    for option in (1, 2):
        browser.choose(0, option)
        count, quiet = browser.evaluate(shown.format("continuity-through-depth"))
        assert count > 0, option
        assert quiet


def test_png_has_an_image_for_each_figure_shown_at_first(trained: dict[str, Path], tmp_path: Path) -> None:
    from PIL import Image

    written = write_images(read_runs([trained["mlp"]]), tmp_path / "png")
    names = [path.name for path in written]
    assert names[0] == "01-train-loss.png"
    assert any("weight-v1-hidden" in name for name in names)
    for path in written:
        image = Image.open(path).convert("L")
        assert image.size[0] > 400
        assert image.getextrema()[0] < 128, f"{path.name} is empty"
