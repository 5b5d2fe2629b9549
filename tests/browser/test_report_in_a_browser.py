"""The HTML report in headless Chromium: nothing from the network, no error, no empty part, legible light and dark."""

import pytest

from betahook.cli import main
from betahook.report.pictures import PIXELS
from support.browser import errors, keep, write_run

pytestmark = pytest.mark.slow

PARTS = """return [...document.querySelectorAll('section')].map(part => [
  part.querySelector('h2').textContent,
  [...part.querySelectorAll('td')].filter(cell => cell.textContent).length
    + part.querySelectorAll('polyline, circle').length
    + [...part.querySelectorAll('img')].filter(image => image.naturalWidth).length])"""
FETCHED = "return performance.getEntriesByType('resource').map(each => each.name).filter(name => !/^data:/.test(name))"
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = """
function light(colour) {
  const [r, g, b] = colour.match(/[0-9.]+/g).map(part => part / 255).map(
    part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const paper = light(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll('h1, h2, p, th, td, text, .legend')].map(each => {
  const ink = light(getComputedStyle(each)[each.tagName == 'text' ? 'fill' : 'color']);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
})"""
"""Contrast of all texts with the page, by the formula of WCAG 2."""


def test_what_one_sees(tmp_path, browser):
    write_run(tmp_path / "run", 4)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "--html", str(page)]) == 0
    browser.get(page.as_uri())
    assert browser.title == "Attention in run"
    assert "all 4 layers" in browser.find_element("css selector", "p.strong").text
    parts = dict(browser.execute_script(PARTS))
    assert {"At a glance", "Loss", "Attention, layer by layer", "Beta at step 12"} <= parts.keys()
    assert [title for title, filled in parts.items() if not filled] == []
    assert browser.execute_script("return document.images[0].naturalWidth") == PIXELS[0]
    papers = set()
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        assert min(browser.execute_script(CONTRAST)) > 4.5  # level AA
        papers.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        for width in (1600, 500):
            browser.set_window_size(width, 1200)
            assert browser.execute_script(OVERFLOW) <= 0
            keep(browser, f"report-{scheme}-{width}")
    assert len(papers) == 2
    assert browser.execute_script(FETCHED) == []
    assert errors(browser) == []
