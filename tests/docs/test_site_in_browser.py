"""The built site, opened from disk in a real browser: ``make docs`` first."""

from pathlib import Path

import pytest

from tests.report.browser import Browser

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
COMPLETE = "document.readyState === 'complete'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not (SITE / "search" / "search_index.js").is_file():
        pytest.skip("needs the built site (make docs)")
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(browser):
    def show(name, width=1280):
        browser.problems.clear()
        browser.look(width, 900)
        browser.ask("Page.navigate", url=(SITE / name).as_uri())
        browser.until(f"location.href.endsWith({name!r}) && {COMPLETE}")
        return browser

    return show


def test_the_search_finds_pages_without_a_server_or_another_host(page):
    shown = page("index.html")
    shown.run(
        "document.querySelector('[data-md-toggle=search]').checked || document.querySelector('[data-md-toggle=search]').click()"
    )
    shown.run("document.querySelector('[data-md-component=search-query]').value = 'McNemar'")
    key = "document.querySelector('[data-md-component=search-query]').dispatchEvent(new Event('keyup', {bubbles: true}))"
    hits = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    shown.until(f"{key} && {hits}.length > 0")  # keys that come before the theme listens are lost
    assert any("evaluation.html" in link for link in shown.run(hits))
    assert [problem for problem in shown.problems if "data:image" not in problem] == []


def test_subscripts_stand_below_the_line(page):
    """Only where some font with a table for mathematics is there; without one browsers guess."""
    shown = page("explanation/how-grpo-works.html")
    fonts = ("Cambria Math", "STIX Two Math", "Latin Modern Math", "DejaVu Math TeX Gyre")
    if not any(shown.run(f"document.fonts.check('16px \"{font}\"') && {_draws_otherwise(font)}") for font in fonts):
        pytest.skip("needs a font for mathematics (such as Debian's package fonts-dejavu-extra)")
    lowered = shown.run(
        "(s => s.lastElementChild.getBoundingClientRect().bottom - s.firstElementChild.getBoundingClientRect().bottom)"
        "([...document.querySelectorAll('msub')].find(s => s.textContent === 'Ai' || s.textContent === 'ri'))"
    )
    assert lowered > 2


def _draws_otherwise(font):
    """Whether text in ``font`` is as wide as in a font that does not exist: then there is no such font."""
    canvas = "const c = document.createElement('canvas').getContext('2d')"
    width = f"(f => {{ {canvas}; c.font = `40px ${{f}}`; return c.measureText('Aij').width; }})"
    return f"{width}('\"{font}\", monospace') !== {width}('monospace')"


@pytest.mark.parametrize("width", [390, 1280])
def test_names_of_settings_are_whole_and_the_page_does_not_scroll_sideways(page, width):
    shown = page("reference/configuration.html", width)
    broken = shown.run(
        "[...document.querySelectorAll('td:first-child code')].filter(name => name.getClientRects().length > 1)"
        ".map(name => name.textContent)"
    )
    assert broken == []
    assert shown.run("document.documentElement.scrollWidth <= innerWidth")
