"""What reads other people's files, fed with anything: few cases here, 10,000 of each kind by the command."""

import logging

import pytest

from groupwise.config.schema import Config
from tests.survival import fuzz
from tests.survival.drawn_settings import _leaves, _value
from tests.survival.page import PAGE, section


@pytest.fixture(autouse=True)
def quiet_logs():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_anything_is_read_or_refused_in_a_sentence(target):
    assert fuzz.fuzz(target, cases=15).total() >= 15


@pytest.mark.soak
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_ten_thousand_cases(target):
    assert fuzz.fuzz(target, cases=10_000, number=1).total() >= 10_000


def test_an_element_that_runs_something_is_found():
    for page in ("<p onclick=x>", "<a href='javascript:x'>", "<img src=x onerror=y>"):
        with pytest.raises(AssertionError):
            fuzz.elements(page)
    assert fuzz.elements("<p>&lt;script&gt;</p><script>1</script>") == {"p": 1, "script": 1}


def test_the_page_has_every_target_without_a_crash():
    rows = [
        row.strip("|").split("|") for row in section("fuzzing", PAGE.read_text(encoding="utf-8")).splitlines() if row[:1] == "|"
    ]
    found = {row[0].strip(): row[-1].strip() for row in rows[2:]}
    assert found == dict.fromkeys(fuzz.TARGETS, "0")


def test_every_setting_of_the_schema_can_be_drawn():
    for path, info in _leaves(Config):
        if path != "rewards.functions":
            _value(path, info).validate()
