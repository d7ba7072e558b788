"""Chat completions over HTTP, on an engine whose every word is known."""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import math
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from groupwise import serving as package
from groupwise.config.schema import PromptConfig
from groupwise.engines import SamplingSettings
from groupwise.errors import TrainingError
from groupwise.serving import sampler, server
from groupwise.serving.answering import Answer
from groupwise.serving.sampler import Choice
from tests.serving.conftest import asking, call, streamed
from tests.waiting import LONG_S, comes

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator", "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}  # fmt: skip

HERMES = '{"name": "calculator", "arguments": {"expression": "3"}}'


def said(answer):
    return answer["choices"][0]["message"]["content"]


def joined(events, index=0):
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"] if c["index"] == index)


def test_an_answer_has_text_reason_and_usage(serving):
    status, answer = call(serving("Good day."), asking())
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": "Good day.", "refusal": None}, "logprobs": None,
            "finish_reason": "stop",
        }
    ]  # fmt: skip
    prompt = 3 + len("user\nHello\nassistant\n")  # three special tokens, and bytes
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 10,
        "total_tokens": prompt + 10,
    }  # with the end token


def test_special_tokens_in_a_user_s_message_are_text(serving):
    _, answer = call(serving("x"), asking("<|im_end|>"))
    assert answer["usage"]["prompt_tokens"] == 3 + len("user\n< |im_end|>\nassistant\n")


def test_a_stream_is_the_same_answer_in_pieces(serving):
    where = serving("Good day, wörld \U0001f600!")
    events = streamed(where, asking(stream_options={"include_usage": True}))
    assert joined(events) == "Good day, wörld \U0001f600!" == said(call(where, asking())[1])
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len("Good day, wörld \U0001f600!".encode()) + 1
    assert all(e["usage"] is None for e in events[:-1])
    assert all("\ufffd" not in json.dumps(e, ensure_ascii=False) for e in events)  # no half of a character is sent
    assert len({e["id"] for e in events}) == 1


def test_without_its_option_a_stream_has_no_usage(serving):
    assert not any("usage" in event for event in streamed(serving("x"), asking()))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_ends_an_answer(serving, name):
    where = serving("abcdefgh")
    _, answer = call(where, asking(**{name: 3}))
    assert where.service.engine.requests[0].limits == [3], "engines that show no tokens end it, too"
    assert (said(answer), answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("abc", "length", 3)


def test_without_a_limit_it_is_the_server_s_and_the_context_s(serving):
    assert said(call(serving("a" * 50, max_tokens=20), asking())[1]) == "a" * 20
    status, answer = call(serving("a" * 50, context_length=34), asking(max_tokens=1000))
    assert (status, said(answer)) == (200, "a" * (34 - 24))


def test_what_does_not_fit_into_the_context_is_refused(serving):
    status, answer = call(serving("a", context_length=24), asking())
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "24 tokens long, but the model's context is 24" in answer["error"]["message"]


def test_a_token_that_the_model_has_no_row_for_is_refused_before_it_reaches_the_others(serving):
    status, answer = call(serving("a", rows=2), asking())
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "a special token that this model has no row for" in answer["error"]["message"]


def test_messages_without_a_token_are_refused_before_they_reach_the_others(serving):
    where = serving("a")
    where.service.prompt = PromptConfig(style="concat")
    status, answer = call(where, asking(" "))
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert call(where, asking("b"))[0] == 200


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("STOP", "one S two "),
        (["three", "two"], "one S "),
        (["xyz"], "one S two STOP three"),
        ("o", ""),
        (["STOP three!"], "one S two STOP three"),
    ],
)
def test_a_stop_ends_the_text_before_it_and_no_piece_of_it_is_streamed(serving, stop, text):
    where = serving("one S two STOP three")
    _, answer = call(where, asking(stop=stop))
    assert (said(answer), answer["choices"][0]["finish_reason"]) == (text, "stop")
    assert joined(streamed(where, asking(stop=stop))) == text
    assert answer["usage"]["completion_tokens"] <= len("one S two STOP three") + 1


def test_a_stop_ends_the_sampling_too(serving):
    _, answer = call(serving("abcdefghijkl"), asking(stop="cd"))
    assert answer["usage"]["completion_tokens"] == 4


def test_several_choices(serving):
    where = serving("yes")
    _, answer = call(where, asking(n=3))
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "yes"), (1, "yes"), (2, "yes")]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (24, 12)
    assert len({prompt.problem.id for prompt in where.service.engine.requests[0].prompts}) == 3  # randomness of their own
    events = streamed(where, asking(n=3))
    assert [joined(events, index) for index in range(3)] == ["yes"] * 3


def test_log_probabilities_are_those_of_the_text_s_tokens(serving):
    where = serving("héy")
    _, answer = call(where, asking(logprobs=True))
    listed = answer["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in listed if one["bytes"]] == ["h", "é", "y"]
    assert [one["logprob"] for one in listed] == [-0.5] * 4  # é is two tokens; the end token is not text
    assert all(one["top_logprobs"] == [] for one in listed)
    pieces = [c["logprobs"]["content"] for e in streamed(where, asking(logprobs=True)) for c in e["choices"] if c["logprobs"]]
    assert [one for piece in pieces for one in piece] == listed


def test_a_stream_that_is_asked_between_text_and_end_keeps_the_end_token_back(serving):
    where = serving("héy")
    choice = Choice("", (), SamplingSettings(max_tokens=9), (), False, lambda: None)
    tokenizer, ends = where.service.sampler.tokenizer, where.service.sampler.end_token_ids
    answer = Answer("tiny", [choice], ends, (), None, logprobs=True, decode=lambda token: tokenizer.decode([token]))
    choice.token_ids, choice.logprobs = [*tokenizer("hé")["input_ids"], min(ends)], [-0.5] * 4
    choice.text, choice.pieces = "hé", ["h", "", "é", ""]
    told = [one for piece in answer.pieces() for c in piece["choices"] if c["logprobs"] for one in c["logprobs"]["content"]]
    assert [one["logprob"] for one in told] == [-0.5] * 3
    choice.finish_reason = "stop"
    assert not [c for piece in answer.pieces() for c in piece["choices"] if c["logprobs"]]


def test_log_probabilities_end_with_the_text(serving):
    where = serving("one two")
    for ask in (asking(logprobs=True, stop="two"), asking(logprobs=True, max_tokens=4)):
        _, answer = call(where, ask)
        assert [one["token"] for one in answer["choices"][0]["logprobs"]["content"]] == list("one ")
        events = streamed(where, ask)
        assert [one["token"] for e in events for c in e["choices"] if c["logprobs"] for one in c["logprobs"]["content"]] == list(
            "one "
        )


def test_an_infinite_log_probability_is_json_all_the_same(serving):
    where = serving("a")
    engine, real = where.service.engine, where.service.engine.serve
    engine.serve = lambda request, on_progress: [
        (type(c)("", c.token_ids, (-math.inf,) * len(c.token_ids), "stop"),)
        for (c,) in real(replace(request, watch=lambda *_: True), on_progress)
    ]
    _, answer = call(where, asking(logprobs=True))
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_greedy_and_top_p_reach_the_engine_and_a_seed_names_the_randomness(serving):
    where = serving("a")
    for more in ({"temperature": 0}, {"top_p": 0.5}, {"temperature": 0.3, "seed": 7}, {"seed": 7}, {}):
        call(where, asking(**more))
    greedy, top, cold, same, _ = (request.settings for request in where.service.engine.requests)
    assert greedy.greedy
    assert not top.greedy
    assert (top.top_p, cold.temperature, same.temperature) == (0.5, 0.3, 1.0)
    names = [request.prompts[0].problem.id for request in where.service.engine.requests]
    assert names[2] == names[3]
    assert len(set(names)) == 4


class TestMessages:
    """What the model sees."""

    def asked(self, serving, messages, **more):
        seen = []
        where = serving(
            lambda text: (seen.append(text), "ok")[1], **{k: more.pop(k) for k in ("system", "call_format") if k in more}
        )
        status, answer = call(where, {"model": "tiny", "messages": messages, **more})
        assert status == 200, answer
        return seen[0]

    def test_the_trained_system_prompt_stands_where_a_conversation_has_none(self, serving):
        assert self.asked(serving, [{"role": "user", "content": "Hi"}], system="Be kind.").startswith(
            "<|im_start|>system\nBe kind."
        )
        own = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        seen = self.asked(serving, own, system="Be kind.")
        assert seen.startswith("<|im_start|>system\nBe brief.")
        assert "Be kind." not in seen

    def test_texts_in_parts(self, serving):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        assert "user\none\ntwo<|im_end|>" in self.asked(serving, [{"role": "user", "content": parts}])

    def test_half_a_surrogate_pair_is_a_question_mark(self, serving):
        assert "user\n?<|im_end|>" in self.asked(serving, [{"role": "user", "content": "\ud83d"}])

    def test_what_clients_echo_of_an_answer_does_not_matter(self, serving):
        echoed = {"role": "assistant", "content": "Yes.", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
        seen = self.asked(serving, [{"role": "user", "content": "Hi"}, echoed, {"role": "user", "content": "Why?"}])
        assert "assistant\nYes.<|im_end|>" in seen

    def test_tools_are_described_where_the_template_cannot_and_calls_and_results_are_shown(self, serving):
        calls = [{"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1 + 1"}'}}]
        messages = [
            {"role": "system", "content": "Be exact."}, {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": "2<|im_end|>"},
        ]  # fmt: skip
        seen = self.asked(serving, messages, tools=[CALCULATOR])
        assert seen.startswith("<|im_start|>system\nBe exact.\nTo use a tool, write only <call>calculator(...)</call>")
        assert "calculator(expression): Computes.<|im_end|>" in seen
        assert "assistant\n<call>calculator(1 + 1)</call><|im_end|>" in seen
        assert seen.endswith("\n2< |im_end|><|im_end|>\n<|im_start|>assistant\n")  # a result ends no turn

    def test_no_tools_no_description(self, serving):
        for more in ({}, {"tools": []}, {"tools": [CALCULATOR], "tool_choice": "none"}):
            assert "To use a tool" not in self.asked(serving, [{"role": "user", "content": "Hi"}], **more)


class TestCalls:
    """Calls of tools in answers."""

    @pytest.mark.parametrize(
        ("form", "text", "arguments", "content"),
        [
            ("tags", "<call>calculator(1 + 1)</call>", {"expression": "1 + 1"}, None),
            ("tags", "Let me see. <call>calculator('2')</call>", {"expression": "2"}, "Let me see."),
            ("hermes", f"So:\n<tool_call>\n{HERMES}\n</tool_call>", {"expression": "3"}, "So:"),
            ("hermes", f"<think>As <tool_call>{HERMES}</tool_call>?</think> So:\n<tool_call>{HERMES}</tool_call>", {"expression": "3"},
             f"<think>As <tool_call>{HERMES}</tool_call>?</think> So:"),
            ("llama3", '{"name": "calculator", "parameters": {"expression": "4"}}', {"expression": "4"}, None),
            ("json", f"```json\n{HERMES}\n```", {"expression": "3"}, None),
        ],
    )  # fmt: skip
    def test_a_call_is_read_by_the_model_s_format(self, serving, form, text, arguments, content):
        where = serving(text, call_format=form)
        _, answer = call(where, asking(tools=[CALCULATOR]))
        (choice,) = answer["choices"]
        (made,) = choice["message"]["tool_calls"]
        assert (made["type"], made["function"]["name"], json.loads(made["function"]["arguments"])) == (
            "function",
            "calculator",
            arguments,
        )
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", content)
        events = streamed(where, asking(tools=[CALCULATOR]))
        assert joined(events) == (content or "")
        (delta,) = [c["delta"]["tool_calls"] for e in events for c in e["choices"] if "tool_calls" in c["delta"]]
        assert [(one["index"], one["function"]["name"], json.loads(one["function"]["arguments"])) for one in delta] == [
            (0, "calculator", arguments)
        ]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize(
        "text",
        [
            "<call>calculator(1 + 1",
            "<call>nonsense</call>",
            "<call>calculator)(</call> and",
            "a < b <calculus",
            "<call>other(1)</call>",
        ],
    )
    def test_what_cannot_be_read_stays_text(self, serving, text):
        where = serving(text)
        _, answer = call(where, asking(tools=[CALCULATOR]))
        assert said(answer) == text
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert joined(streamed(where, asking(tools=[CALCULATOR]))) == text

    @pytest.mark.parametrize("text", [f"So: {HERMES}", "```json\n{}\n```", "`1`", "```python\nprint(1)\n```\nprints 1."])
    def test_json_that_is_shown_stays_text(self, serving, text):
        where = serving(text, call_format="json")
        assert said(call(where, asking(tools=[CALCULATOR]))[1]) == joined(streamed(where, asking(tools=[CALCULATOR]))) == text

    def test_without_tools_nothing_is_a_call(self, serving):
        assert said(call(serving("<call>calculator(1)</call>"), asking())[1]) == "<call>calculator(1)</call>"

    def test_two_calls_have_ids_of_their_own(self, serving):
        _, answer = call(serving("<call>calculator(1)</call><call>calculator(2)</call>"), asking(tools=[CALCULATOR]))
        first, second = answer["choices"][0]["message"]["tool_calls"]
        assert first["id"] != second["id"]

    def test_a_strict_tool_is_given_what_fits_its_schema_alone(self, serving):
        strict = {"type": "function", "function": {**CALCULATOR["function"], "strict": True}}
        where = serving(
            lambda text: f'<tool_call>{{"name": "calculator", "arguments": {text.split("@")[1]}}}</tool_call>',
            call_format="hermes",
        )
        for arguments, fits in (('{"expression": "1"}', True), ('{"expression": 1}', False), ("{}", False)):
            _, answer = call(where, asking(f"@{arguments}@", tools=[strict]))
            assert ("tool_calls" in answer["choices"][0]["message"]) == fits, arguments

    def test_a_call_that_must_be_is_begun(self, serving):
        where = serving(lambda text: "calculator(6)</call>" if text.endswith("<call>") else "Six.")
        for more, finish in (({"tool_choice": "required"}, "tool_calls"), ({}, "stop")):
            _, answer = call(where, asking(tools=[CALCULATOR], **more))
            assert answer["choices"][0]["finish_reason"] == finish
        events = streamed(where, asking(tools=[CALCULATOR], tool_choice="required", logprobs=True))
        assert joined(events) == ""
        listed = [one["token"] for e in events for c in e["choices"] if c["logprobs"] for one in c["logprobs"]["content"]]
        assert "".join(listed) == "calculator(6)</call>"  # what was given was not sampled


def test_the_tokenizer_of_those_who_ask_is_for_one_thread_at_a_time(serving):
    class Watched:
        def __getattr__(self, name):
            assert where.service._lock.locked(), name
            return getattr(shared, name)

        def __call__(self, *text, **more):
            assert where.service._lock.locked()
            return shared(*text, **more)

    where = serving("calculator(é)</call>")
    shared, where.service._tokenizer = where.service._tokenizer, Watched()
    for more in ({}, {"tools": [CALCULATOR], "tool_choice": "required"}):
        assert call(where, asking(logprobs=True, **more))[0] == 200


class TestTogether:
    """Requests of several clients."""

    def hold_until(self, where, count):
        """No step is made until so many choices are asked for."""
        where.service.engine.breathe = functools.cache(lambda: comes(lambda: len(where.service.sampler._open) == count))

    def ask_in_threads(self, where, bodies):
        answers = [None] * len(bodies)

        def one(index):
            answers[index] = call(where, bodies[index])

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        return threads, answers

    def test_who_comes_meanwhile_joins_at_a_break_and_nothing_is_lost(self, serving, monkeypatch):
        monkeypatch.setattr(sampler, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # all steps take as long
        where = serving(lambda text: text.split("@")[1] * 20)
        self.hold_until(where, 3)
        first, one = self.ask_in_threads(where, [asking("@abc@")])
        assert comes(lambda: where.service.engine.requests)
        second, two = self.ask_in_threads(where, [asking("@xyz@"), asking("@uvw@")])
        for thread in first + second:
            thread.join()
        assert [said(answer) for _, answer in one + two] == ["abc" * 20, "xyz" * 20, "uvw" * 20]
        joined_in = max(len(request.prompts) for request in where.service.engine.requests)
        assert joined_in >= 2
        assert any(any(request.drawn) for request in where.service.engine.requests)

    def test_other_settings_take_turns(self, serving):
        where = serving(lambda text: text.split("@")[1] * 20)
        self.hold_until(where, 2)
        threads, answers = self.ask_in_threads(where, [asking("@abc@"), asking("@xyz@", temperature=0.5)])
        for thread in threads:
            thread.join()
        assert [said(answer) for _, answer in answers] == ["abc" * 20, "xyz" * 20]
        assert all(len(request.prompts) == 1 for request in where.service.engine.requests)

    def test_a_batch_has_a_largest_size(self, serving, monkeypatch):
        monkeypatch.setattr(sampler, "BATCH_TOKENS", 2 * (24 + 200))
        where = serving("abc")
        assert len(call(where, asking(n=5))[1]["choices"]) == 5
        assert [len(request.prompts) for request in where.service.engine.requests] == [2, 2, 1]

    def test_requests_that_do_not_fit_together_take_turns(self, serving, monkeypatch):
        monkeypatch.setattr(sampler, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # all steps take as long
        monkeypatch.setattr(sampler, "BATCH_TOKENS", 300)
        where = serving(lambda text: text.split("@")[1] * 20)
        self.hold_until(where, 2)
        threads, answers = self.ask_in_threads(where, [asking("@abc@"), asking("@xyz@")])
        for thread in threads:
            thread.join()
        assert [said(answer) for _, answer in answers] == ["abc" * 20, "xyz" * 20]
        assert all(len(request.prompts) == 1 for request in where.service.engine.requests)
        assert any(any(request.drawn) for request in where.service.engine.requests), "the first one was broken off"

    def test_who_has_hung_up_takes_no_place_in_the_queue(self, serving, monkeypatch):
        monkeypatch.setattr(sampler, "MOST_CHOICES", 2)
        where, go_on = serving("abc"), threading.Event()
        where.service.engine.breathe = lambda: go_on.wait(LONG_S)
        first, gone, late = (Choice(name, (1, 2), SamplingSettings(max_tokens=9), (), False, lambda: None) for name in "abc")
        where.service.sampler.put([first, gone])
        with pytest.raises(sampler.FullError):
            where.service.sampler.put([late])
        gone.wanted = False
        where.service.sampler.put([late])
        go_on.set()
        assert comes(lambda: first.finish_reason == late.finish_reason == "stop")

    def test_a_full_queue_is_refused(self, serving, monkeypatch):
        monkeypatch.setattr(sampler, "MOST_CHOICES", 2)
        status, answer = call(serving("abc"), asking(n=3))
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, "rate_limit_error", "queue_full")

    @pytest.mark.parametrize("stream", [False, True])
    def test_who_hangs_up_stops_the_sampling(self, serving, stream, monkeypatch):
        monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.02)
        where = serving("a" * 3000, context_length=10_000, max_tokens=5000)
        where.service.engine.breathe = lambda: time.sleep(0.05)  # longer than `comes` waits, altogether
        body = json.dumps(asking(stream=stream)).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", where.port), timeout=LONG_S) as client:
            client.sendall(head.encode() + body)
            assert comes(lambda: where.service.engine.requests)
        assert comes(lambda: not where.service.sampler._open)
        assert said(call(where, asking(max_tokens=2))[1]) == "aa"

    def test_a_batch_that_fails_is_an_error_and_the_next_is_not(self, serving):
        where = serving(lambda text: "fine" if "good" in text else 1 / 0)
        status, answer = call(where, asking("bad"))
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "ZeroDivisionError" in answer["error"]["message"]
        assert said(call(where, asking("good"))[1]) == "fine"

    def test_an_engine_that_fails_whatever_is_asked_ends_the_server(self, serving):
        where = serving(lambda text: "fine" if "good" in text else 1 / 0)
        for text in ("bad", "bad", "bad", "worse", "good", "bad", "worse"):  # one prompt alone is not the engine's fault
            assert call(where, asking(text))[0] == (200 if text == "good" else 500)
        assert call(where, method="GET", path="/health")[0] == 200
        assert call(where, asking("worst"))[0] == 500
        assert comes(lambda: not where.service.is_alive)
        with pytest.raises(TrainingError, match="the sampling thread has ended"):
            where.wait()
        assert call(where, method="GET", path="/health") == (503, {"status": "ended"})

    def test_memory_that_runs_out_does_not(self, serving):
        def fail(text):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

        where = serving(fail)
        assert [call(where, asking(str(length)))[0] for length in range(5)] == [500] * 5
        assert call(where, method="GET", path="/health")[0] == 200

    def test_a_stream_that_fails_says_so_in_an_event(self, serving):
        where = serving("abcdef")
        engine = where.service.engine
        real = engine.serve

        def fail(request, on_progress):
            watch = request.watch
            broken = replace(request, watch=lambda *shown: watch(*shown) if len(shown[2]) < 3 else 1 / 0)
            return real(broken, on_progress)

        engine.serve = fail
        connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=LONG_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(asking(stream=True)), {"Content-Type": "application/json"})
        events = connection.getresponse().read().decode()
        connection.close()
        assert '"type": "server_error"' in events
        assert "[DONE]" not in events

    def test_closing_ends_what_is_asked(self, serving):
        where = serving("a" * 3000, context_length=10_000, max_tokens=5000)
        where.service.engine.breathe = lambda: time.sleep(0.01)
        threads, answers = self.ask_in_threads(where, [asking()])
        assert comes(lambda: where.service.engine.requests)
        where.service.sampler.close()
        threads[0].join()
        assert (answers[0][0], answers[0][1]["error"]["message"]) == (500, "the server ends")
        assert call(where, method="GET", path="/health") == (503, {"status": "ended"})


def test_the_engine_s_own_tokens_are_taken_where_it_shows_none(serving):
    where = serving("abcdef")
    engine = where.service.engine
    real = engine.serve
    engine.shows_tokens = False
    engine.serve = lambda request, on_progress: real(replace(request, watch=lambda *_: True), on_progress)
    assert said(call(where, asking(stop="de", n=2))[1]) == "abc"
    assert joined(streamed(where, asking(max_tokens=4))) == "abcd"


def test_models_and_health(serving):
    where = serving("x")
    status, listed = call(where, method="GET", path="/v1/models")
    assert (status, [one["id"] for one in listed["data"]]) == (200, ["tiny"])
    assert call(where, method="GET", path="/v1/models/tiny")[1]["id"] == "tiny"
    assert call(where, method="GET", path="/v1/models/other")[0] == 404
    assert call(where, method="GET", path="/health") == (200, {"status": "ok"})
    assert package.__all__
