"""The page in Chromium: the chart draws, a click selects, the console stays clean."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import demo_store
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from dashboard.launch import command, url
from nas.messages import Finished, Measurement, TrialState
from nas.store import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000
"""Milliseconds: a first page load may share two cores with the rest of the suite."""

expect.set_options(timeout=PATIENCE)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A study of its own, because a test writes to it."""
    url = f"sqlite:///{tmp_path_factory.mktemp('browser') / 'demo.db'}"
    demo_store.fill(url)
    return url


@pytest.fixture(scope="module")
def server(storage: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("streamlit") / "log.txt"
    root = str(Path(__file__).parents[2])
    with log.open("w") as output:
        process = subprocess.Popen(
            command(storage, port, "demo"), stdout=output, stderr=subprocess.STDOUT, cwd=root, env=os.environ
        )
    try:
        deadline = time.monotonic() + PATIENCE / 1000
        while not _listens(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield url(port)
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test on any error of the console, of a script or of a request."""
    problems: list[str] = []

    def console(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(f"{message.text} at {message.location}")

    page = browser.new_page(viewport={"width": 1500, "height": 1080})
    page.set_default_timeout(PATIENCE)
    page.on("console", console)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if _leaves(request.url) else None)
    yield page
    page.close()
    assert not problems


def _leaves(address: str) -> bool:
    """Whether a request goes to another machine."""
    return not address.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:"))


def _marker(page: Page, trial: int) -> tuple[float, float]:
    """Where on the screen the marker of a trial is."""
    found = page.evaluate(
        """trial => {
            const plot = document.querySelector('.st-key-pareto .js-plotly-plot');
            const trace = plot.data.find(trace => Array.from(trace.customdata || []).includes(trial));
            const index = Array.from(trace.customdata).indexOf(trial);
            const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();
            return [box.left + xaxis._offset + xaxis.d2p(trace.x[index]),
                    box.top + yaxis._offset + yaxis.d2p(trace.y[index])];
        }""",
        trial,
    )
    return found[0], found[1]


def test_chart_draws_and_a_click_selects(server: str, page: Page) -> None:
    page.goto(server)
    expect(page.locator(".st-key-pareto .scatterlayer .points path").first).to_be_visible()
    assert page.locator(".st-key-pareto .scatterlayer .points path").count() >= 25
    expect(page.locator(".nas-name")).not_to_contain_text("GLA pure")
    expect(page.locator(".st-key-loss .scatterlayer .lines path").first).to_be_attached()
    page.mouse.click(*_marker(page, 3))  # the baseline "GLA pure"
    expect(page.locator(".nas-name")).to_contain_text("GLA pure")
    expect(page).to_have_url(f"{server}?trial=3")
    expect(page.get_by_text("Recall of trial 3", exact=True)).to_be_visible()
    page.mouse.click(*_marker(page, 0))
    expect(page.locator(".nas-name")).to_contain_text("Full attention")
    expect(page).to_have_url(f"{server}?trial=0")


def test_address_and_table_select(server: str, page: Page) -> None:
    page.goto(f"{server}?study=demo&trial=4")
    expect(page.locator(".nas-name")).to_contain_text("RetNet pure")
    grid = page.locator("[data-testid=stDataFrame] canvas").first
    grid.scroll_into_view_if_needed()
    expect(grid).to_be_visible()
    box = grid.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 16, box["y"] + 35 * 2 + 17)  # the box at the left of the second row, trial 1
    expect(page.locator(".nas-name")).to_contain_text("Gated DeltaNet pure")
    expect(page).to_have_url(f"{server}?study=demo&trial=1")


def test_page_follows_the_study_and_keeps_the_selection(server: str, storage: str, page: Page) -> None:
    page.goto(f"{server}?trial=4")
    tile = page.locator(".nas-tile").first
    expect(tile).to_contain_text("2 running")
    with Store.open(storage) as store:
        info, scores = store.study("demo"), (Measurement(step=300, name="recall", value=0.9),)
        running = store.trials(info.id, [TrialState.RUNNING])[0]
        done = Finished(
            trial=running.number,
            attempt=running.attempt,
            step=300,
            checkpoint="c",
            seconds=5.0,
            measurements=scores,
        )
        store.finish_segment(info.id, done, state=TrialState.COMPLETE, rung=2)
    expect(tile).to_contain_text("1 running")
    expect(page.locator(".nas-name")).to_contain_text("RetNet pure")
    expect(page).to_have_url(f"{server}?trial=4")
