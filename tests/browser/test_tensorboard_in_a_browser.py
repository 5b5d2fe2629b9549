"""TensorBoard as one sees it, in headless Chromium: every card shows something, and the console has no error."""

import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from betahook.report.pictures import PIXELS
from support.browser import errors, keep, wait_for, write_run

pytestmark = pytest.mark.slow


@pytest.fixture(params=[12, 32], ids="{} layers".format)
def tensorboard(request, tmp_path):
    """The address of a TensorBoard on a run, and its number of layers."""
    write_run(tmp_path / "runs", request.param)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", tmp_path / "runs", "--host", "127.0.0.1"]
    command += ["--port", address.rpartition(":")[2]]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def serves_the_last_picture():
        try:
            page = f"{address}/data/plugin/images/images?run=.&tag=attention%2Fat%20a%20glance&sample=0"
            with urllib.request.urlopen(page) as answer:
                return b'"step": 12' in answer.read()
        except urllib.error.URLError:
            return False

    try:
        wait_for(serves_the_last_picture, "picture")
        yield address, request.param
    finally:
        server.terminate()
        server.wait()


DEEP = """
function all(root, selector) {
  const inner = [...root.querySelectorAll('*')].map(each => each.shadowRoot).filter(Boolean);
  return [...root.querySelectorAll(selector), ...inner.flatMap(each => all(each, selector))];
}
"""
"""Elements inside of web components too."""

TEXT = DEEP + "return all(document, 'td, strong, li').map(each => each.textContent).join(' ')"
LINES = (
    DEEP
    + """return all(document, 'tf-custom-scalar-multi-line-chart-card').map(card =>
  all(card.shadowRoot || card, 'path.line').filter(path => (path.getAttribute('d') || '').length > 20).length)"""
)
PICTURES = (
    DEEP
    + "return all(document, 'tf-image-loader').flatMap(x => all(x.shadowRoot || x, 'img')).map(x => x.naturalWidth)"
)


def show(browser, address, page):
    browser.get("about:blank")
    browser.get(f"{address}/#{page}")


def test_what_one_sees(tensorboard, browser):
    address, layers = tensorboard
    show(browser, address, "timeseries")
    sizes = (
        "return [...document.querySelectorAll('image-card img')].map(each => [each.naturalWidth, each.naturalHeight])"
    )
    wait_for(lambda: browser.execute_script(sizes) == [list(PIXELS)], "picture")
    # A card outside of the window is not filled yet.
    drawn = """return [...document.querySelectorAll('scalar-card')].map(each => [
      each.getBoundingClientRect().top < innerHeight, each.textContent, each.querySelectorAll('line-chart').length])"""
    cards = wait_for(lambda: [card for card in browser.execute_script(drawn) if card[0]], "chart")
    assert all(charts == 1 for _, _, charts in cards)
    wait_for(
        lambda: all("Value" in text for seen, text, _ in browser.execute_script(drawn) if seen), "values in the charts"
    )
    first = browser.execute_script("return document.querySelector('card-view').textContent")
    assert "attention/at a glance" in first
    keep(browser, f"time-series-{layers}")

    show(browser, address, "text")
    wait_for(lambda: f"of {layers} layers" in browser.execute_script(TEXT), "findings")
    assert "The largest logit is" in browser.execute_script(TEXT)
    keep(browser, f"text-{layers}")

    show(browser, address, "custom_scalars")
    wait_for(lambda: len(charts := browser.execute_script(LINES)) == 7 and all(charts), "lines in every chart")
    keep(browser, f"custom-scalars-{layers}")

    show(browser, address, "images")
    wait_for(lambda: PIXELS[0] in browser.execute_script(PICTURES), "picture among the images")
    keep(browser, f"images-{layers}")

    assert errors(browser) == []
