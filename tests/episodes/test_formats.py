"""Calls in a turn's text: read as they were written, and told what is wrong where they cannot be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.episodes.formats import FORMATS, Asked, format_of_template
from groupwise.episodes.tools import Toolbox, describe

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=6,
)
F = '<tool_call>{"name": "f"}</tool_call>'
ONE_OBJECT = "a call is one JSON object, and nothing beside it"
NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(
    lambda name: name not in ("if", "in", "is", "or", "and", "as", "not", "for")
)


def echo(said: str) -> str:
    """Says it again.

    Args:
        said: What.
    """
    return said


@pytest.mark.parametrize(
    ("form", "text", "rest"),
    [
        ("tags", " Let me see. <call>f(1)</call>\n", "Let me see."),
        ("hermes", 'So:\n<tool_call>\n{"name": "f"}\n</tool_call>', "So:"),
        ("llama3", '{"name": "f", "parameters": {}}', ""),
        ("llama3", ' {"answer": 42}\n', '{"answer": 42}'),
        ("json", '```json\n{"name": "f", "arguments": {}}\n```', ""),
        ("json", ' {"answer": 42}\n', '{"answer": 42}'),
        ("tags", "<think><call>f(1)</call>?</think> So: <call>f(2)</call>", "<think><call>f(1)</call>?</think> So:"),
        ("hermes", "<think><tool_call>?</think>" + F, "<think><tool_call>?</think>"),
    ],
)
def test_what_a_turn_says_beside_its_calls(form, text, rest):
    assert FORMATS[form].beside(text) == rest


@given(st.sampled_from(["hermes", "llama3", "json"]), NAMES, st.dictionaries(NAMES, VALUES, max_size=3))
def test_json_calls_come_back_as_they_were_written(form, name, arguments):
    text = FORMATS[form].write(name, arguments)
    if "</tool_call>" not in json.dumps(arguments):
        assert FORMATS[form].read(text) == [Asked(name, arguments)]


@given(st.text(max_size=30).filter(lambda text: text and text == text.strip() and "call>" not in text))
def test_what_a_call_in_tags_says_reaches_the_tool(text):
    (asked,) = FORMATS["tags"].read(FORMATS["tags"].write("echo", {"said": text}))
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    from groupwise.episodes.tools import _bound

    assert _bound(describe(echo, "echo"), asked) == {"said": text}


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("tags", "the answer is 42", []),
        ("tags", "<call>f(1, 'a')</call>", [Asked("f", {}, (1, "a"), "1, 'a'")]),
        ("tags", "I think <call>f(x=1)</call> and\n<call>g()</call>", [Asked("f", {"x": 1}, (), "x=1"), Asked("g", {}, (), "")]),
        ("tags", "<call>f(12 * 3)</call>", [Asked("f", text="12 * 3")]),
        ("tags", "<call>f(1", [Asked("f(1", problem="a call ends with </call>")]),
        ("tags", "<call>f(1)", [Asked("f", problem="a call ends with </call>")]),
        ("tags", "<call>12 * 3</call>", [Asked("12 * 3", problem="a call has the form <call>name(arguments)</call>")]),
        ("tags", "<call>f(**{})</call>", [Asked("f", text="**{}")]),
        ("tags", "<call>f(1)</call> ) <call>g(2)</call>", [Asked("f", {}, (1,), "1"), Asked("g", {}, (2,), "2")]),
        ("tags", "<call>look-up.2(1)</call>", [Asked("look-up.2", {}, (1,), "1")]),
        ("hermes", "no call", []),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [Asked("f", {"x": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>[]</tool_call>',
         [Asked("f"), Asked("", problem='a call is a JSON object with "name" and "arguments"')]),
        ("hermes", "<tool_call>{</tool_call>", [Asked("", problem="what stands in <tool_call></tool_call> is no JSON object")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', [Asked("f", problem="its arguments are no JSON object")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [Asked("f")]),
        ("tags", "<think><call>f(1)</call>, or <call>f(2?\n</think>\n\n<call>f(3)</call>", [Asked("f", {}, (3,), "3")]),
        ("tags", "<think>I may write <call>f(1)</call>", []),
        ("hermes", f"<think>\nAs {F}, or <tool_call>?\n</think>\n\n{F}", [Asked("f")]),
        ("hermes", f"<think>\nAs {F}?\n</think>\n\nNo.", []),
        ("hermes", f"As {F}, or <tool_call>?\n</think>\n\n{F}{F}", [Asked("f"), Asked("f")]),
        ("hermes", f"As {F}?\n</think>\n\nNo.", []),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"x": "</think>"}}}}</tool_call>{F}',
         [Asked("f", {"x": "</think>"}), Asked("f")]),
        ("llama3", "It is {42}.", []),
        ("llama3", '{"answer": 42}', []),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [Asked("f", {"x": 1})]),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [Asked("f"), Asked("g")]),
        ("llama3", '{"name": "f", "parameters": {', [Asked("", problem="the call is no JSON object")]),
        ("json", "It is {42}.", []),
        ("json", '{"name": "f", "arguments": {"x": 1}}', [Asked("f", {"x": 1})]),
        ("json", ' {\n  "name": "f",\n  "arguments": {}\n}\n', [Asked("f")]),
        ("json", '```json\n{"name": "f", "arguments": {"x": "```"}}\n```', [Asked("f", {"x": "```"})]),
        ("json", '```\n{"name": "f", "arguments": {}}\n```\n', [Asked("f")]),
        ("json", '{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}',
         [Asked("", problem=f"{ONE_OBJECT} (Extra data: line 1 column 31 (char 30))")]),
        ("json", '{"name": "f", "arguments": {"x": 1}',
         [Asked("", problem=f"{ONE_OBJECT} (Expecting ',' delimiter: line 1 column 36 (char 35))")]),
        ("json", '{"name": "look-up", "arguments": {"x": 1}',
         [Asked("", problem=f"{ONE_OBJECT} (Expecting ',' delimiter: line 1 column 42 (char 41))")]),
        ("json", 'For example {"name": "f", "arguments": {}}', []),
        ("json", 'Write this:\n```json\n{"name": "f", "arguments": {}}\n```', []),
        ("json", '```json\n{"name": "f", "arguments": {}}\n```\nis what you write', []),
        ("json", '```json\n{"name": "f", "arguments": {}}', []),
        ("json", '{"name": "Ann", "arguments": ["rain"]}', []),
        ("json", '{"name": "f", "arguments": {}, "age": 7}', []),
        ("json", '{"answer": 42}', []),
        ("json", '{"answer": 42', []),
        ("json", "{42} is the set.", []),
        ("json", '[{"name": "f", "arguments": {}}]', []),
        ("llama3", '{"name": "f", "parameters": {}} and', [Asked("f"), Asked("", problem="the call is no JSON object")]),
    ],
)  # fmt: skip
def test_calls_are_read_and_what_is_wrong_is_said(form, text, calls):
    assert FORMATS[form].read(text) == calls


@given(st.text(max_size=60))
def test_no_text_makes_reading_fail(text):
    for form in FORMATS.values():
        for around in (text, f"<call>{text}</call>", f"<call>f({text})</call>", f"<tool_call>{text}</tool_call>", "{" + text):
            for asked in form.read(around):
                assert Toolbox({}, 1.0).call(asked).failure == "invalid"


def test_endless_nesting_is_no_call():
    for form in FORMATS.values():
        assert all(a.problem or a.text for a in form.read(f"<call>f({'(' * 5000})</call><tool_call>{'[' * 99999}</tool_call>"))


def test_the_format_follows_the_chat_template(qwen_tokenizer):
    assert format_of_template(qwen_tokenizer.chat_template) == "hermes"
    assert format_of_template("{{ messages }}") == format_of_template(None) == "tags"
    assert format_of_template('{"name": function name, "parameters": ...} <|start_header_id|>ipython') == "llama3"
