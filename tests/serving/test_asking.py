"""What cannot be honoured is refused with the parameter and the rule; what says nothing about the answer is not."""

from __future__ import annotations

import pytest

from groupwise.serving.asking import Refused, fits, read_ask, unread_keyword

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CUT = {"name": "f", "arguments": "{"}


def tool(**function):
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1, but it must be a number from 0 to 100"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": float("nan")}, "temperature", "must be a number"),
        ({"top_p": 0}, "top_p", "must be a number"),
        ({"n": 0}, "n", "a whole number from 1 to 128"),
        ({"n": 1.5}, "n", "a whole number"),
        ({"max_tokens": 0}, "max_tokens", "a whole number from 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "two names of one limit"),
        ({"stop": ["a"] * 17}, "stop", "up to 16"),
        ({"stop": ""}, "stop", "of 1 to"),
        ({"stop": [1]}, "stop", "such texts"),
        ({"seed": "1"}, "seed", "whole number"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", 'where "stream" is true'),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "include_usage"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs", "top_logprobs is 5, but only 0 can be honoured here"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "only 0 can be honoured"),
        ({"presence_penalty": False}, "presence_penalty", "only 0"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format", '{"type": "text"}'),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "only true"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice", '"auto" or "none" or "required"'),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "cannot be honoured here: leave it out"),
        ({"best_of": 3}, "best_of", "cannot be honoured"),
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] must be"),
        ({"tools": [TOOL, TOOL]}, "tools", "two tools of one name"),
        ({"tools": tool(parameters=[1])}, "tools", "JSON schema of an object"),
        ({"tools": tool(strict=True, parameters={"type": "object", "properties": {"x": {"$ref": "#/x"}}})}, "tools", "$ref in its schema"),
        ({"tools": tool(strict=True, parameters={"type": "object", "properties": {"x": {"enum": 5}}})}, "tools", "enum 5 in its schema"),
        ({"tools": tool(strict=True, parameters={"type": 5})}, None, "cannot be read (TypeError"),
        ({"temperature": 10**400}, None, "cannot be read (OverflowError"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages", "messages[0] must be an object whose role is"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "must be text: images"),
        ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages", "has mood, which cannot be shown"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": CUT}]}]}, "messages", "arguments in JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages", "arguments in JSON"),
        ({"model": None}, "model", "model must be given"),
    ],
)  # fmt: skip
def test_refusals_name_the_parameter_and_the_rule(more, param, words):
    with pytest.raises(Refused) as caught:
        read_ask({**HELLO, **more})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in str(caught.value)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_a_temperature_that_fp32_cannot_divide_by_takes_the_likeliest_token():
    for temperature, greedy in ((1e-40, True), (1e-6, False)):
        settings = read_ask({**HELLO, "temperature": temperature}).settings
        assert (settings.greedy, settings.temperature) == (greedy, 1.0 if greedy else temperature)


@pytest.mark.parametrize("body", [None, [], "x", 7])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(Refused, match="must be a JSON object"):
        read_ask(body)


def test_what_says_nothing_about_the_answer_is_taken_and_null_is_absent():
    neutral = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y",
        "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0, "response_format": {"type": "text"},
        "parallel_tool_calls": True, "tool_choice": "auto", "modalities": ["text"], "n": None, "stop": None, "reasoning_effort": None,
    }  # fmt: skip
    assert read_ask({**HELLO, **neutral}) == read_ask(HELLO)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, [1, 2.0, -3], [1.5, "1", True, None]),
        ({"type": ["string", "null"]}, ["", None], [0, []]),
        ({"enum": ["a", 1]}, ["a", 1], ["b", 2]),
        ({"const": 3}, [3], [4]),
        ({"type": "array", "items": {"type": "number"}}, [[], [1, 2.5]], [["x"], {}, [True]]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["x", None], [1]),
        (
            {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False},
            [{"x": "1"}],
            [{}, {"x": 1}, {"x": "1", "y": 2}, []],
        ),
        ({"properties": {"x": {}}}, [{"y": 1}, 7], []),
    ],
)
def test_values_fit_a_schema_or_do_not(schema, good, bad):
    assert unread_keyword(schema) is None
    assert [fits(value, schema) for value in good] == [True] * len(good)
    assert [fits(value, schema) for value in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "x"},
        {"items": {"minimum": 1}},
        {"anyOf": [{"format": "date"}]},
        {"type": "date"},
        {"properties": {"x": {"$ref": "#"}}},
    ],
)
def test_a_keyword_that_is_not_read_is_found(schema):
    assert unread_keyword(schema) is not None
