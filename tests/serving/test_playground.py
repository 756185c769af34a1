"""The playground in a real headless browser: type, stream, hover, charts, keys, dark and light.

Needs the Python package playwright and a Chromium: the first browser on the path is taken.
The screenshots stay where pytest puts them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polydraft.demo import demo_model_path
from polydraft.serving.app import PLAYGROUND, POLICY
from tests.serving.conftest import Served

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def test_the_page_needs_nothing_from_elsewhere(server: Served) -> None:
    answer = httpx.get(server.url, timeout=20)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    page = PLAYGROUND.read_text(encoding="utf-8")
    assert answer.text == page
    assert not re.search(r"(src|href)\s*=|@import|url\(", page), "the page loads something"
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert len(page.encode()) < 64_000


@pytest.fixture
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser among {', '.join(BROWSERS)}")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.deep
def test_a_person_at_the_playground(browser: Any, tmp_path: Path) -> None:
    served = Served(tmp_path, model=str(demo_model_path()))
    try:
        page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(served.url)
        page.wait_for_function("() => document.getElementById('model').textContent.includes('tokens at most')")
        page.fill("#prompt", "def is_prime(n):\n    if n < 2:\n        return False\n")
        page.fill("#tokens", "64")
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        page.wait_for_function("() => document.querySelectorAll('#out .t').length > 3")
        page.wait_for_function("() => document.querySelectorAll('#out-plain .t').length > 3")
        page.wait_for_function("() => !document.getElementById('run').disabled", timeout=60_000)
        tokens = page.locator("#out .t")
        assert tokens.count() == 64
        kinds = {tokens.nth(i).get_attribute("class") for i in range(64)}
        assert {"t draft", "t target"} <= kinds
        assert "64 tokens" in page.inner_text("#figures")
        assert "drafts accepted" in page.inner_text("#figures")
        page.locator("#out .t.draft").first.hover()
        info = page.inner_text("#info")
        assert "draft position" in info
        assert re.search(r"probability\s+\d", info)
        page.focus("#out")
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("#info") != info
        assert page.locator("#out .t[data-picked]").count() == 1
        assert page.locator("#out .t[data-mate]").count() > 1, "the tokens of its round are shown with it"
        for chart, shape in (("#acceptance", "rect"), ("#rounds", "polyline"), ("#speed", "polyline")):
            assert page.locator(f"{chart} svg {shape}").count() > 0, chart
        for lanes, least in (("#timeline", 15), ("#timeline-plain", 60)):
            for side in ("host", "device"):
                assert page.locator(f"{lanes} rect.{side}").count() > least, (lanes, side)
        assert "synchronous" in page.inner_text("#device-times") or "upper bound" in page.inner_text("#device-times")
        plain = page.locator("#out-plain .t")
        assert plain.count() == 64
        assert {plain.nth(i).get_attribute("class") for i in range(64)} == {"t target"}
        assert page.inner_text("#out-plain") == page.inner_text("#out"), "the same text without drafts"
        assert "64 tokens, 63 rounds" in page.inner_text("#figures-plain")
        assert "The same text, token by token" in page.inner_text("#verdict")
        assert page.inner_text("#tile-rounds") in page.inner_text("#figures")
        assert float(page.inner_text("#tile-speed")[:-1]) > 0, "times the speed"
        for chart in ("#rounds", "#speed"):
            assert {page.locator(f"{chart} polyline.{name}").count() for name in ("main", "plain")} == {1}, chart
        page.screenshot(path=tmp_path / "playground-light.png", full_page=True)
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
        page.screenshot(path=tmp_path / "playground-dark.png", full_page=True)
        page.uncheck("#compare")
        page.fill("#tokens", "600")
        page.keyboard.press("Control+Enter")
        page.wait_for_function("() => document.querySelectorAll('#out .t').length > 3")
        page.keyboard.press("Escape")
        page.wait_for_function("() => !document.getElementById('run').disabled")
        assert page.locator("#out .t").count() < 600
        assert page.locator("#out-plain .t").count() == 0
        page.fill("#tokens", "0")
        page.keyboard.press("Control+Enter")
        page.wait_for_function("() => document.getElementById('figures').classList.contains('bad')")
        assert problems == [p for p in problems if "400" in p], "the console is clean but for the refused request"
    finally:
        served.stop()
