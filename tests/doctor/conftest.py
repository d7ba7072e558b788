"""Reading a made-up run grades what the other runs hold too: once."""

import pytest

from groupwise.data.answers import grade
from groupwise.tracking import reading
from tests.doctor.miniature_runs import graded


@pytest.fixture(autouse=True)
def graded_once(monkeypatch):
    def once(text, expected, style):
        return graded(text, expected, style) if isinstance(expected, str) else grade(text, expected, style)

    monkeypatch.setattr(reading, "grade", once)
