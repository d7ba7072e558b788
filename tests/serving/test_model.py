"""A served model is the one that ``generate`` speaks with; the ``openai`` client understands it; the command serves and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request

import pytest

from groupwise.chat import settings_to_ask
from groupwise.errors import ConfigError
from groupwise.serving import KEY, open_server
from tests.serving.conftest import asking, call, streamed
from tests.tiny import write_tiny_llama
from tests.warm import python


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def served(tiny_folder):
    config, longest = settings_to_ask(str(tiny_folder), ["model.dtype=float32", "model.device=cpu"], max_tokens=30)
    server = open_server(config, longest, "tiny", "127.0.0.1", 0, None)
    yield server
    server.close()


def text_of(answer):
    return answer[1]["choices"][0]["message"]["content"]


def test_greedy_answers_are_the_engine_s_own(served):
    from groupwise.data.prompts import render
    from groupwise.engines.base import SampleRequest, SamplingSettings
    from groupwise.types import Problem

    service = served.service
    prompt = render(Problem("p", [{"role": "user", "content": "Hello"}], ""), service._tokenizer, service.prompt, None)
    ((expected,),) = service.engine.serve(SampleRequest([prompt], 1, SamplingSettings(30, greedy=True), 0, "s"))
    for more in ({}, {"top_p": 0.1}):  # which changes neither the choice nor the log-probabilities
        status, answer = call(served, asking(temperature=0, logprobs=True, **more))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, expected.text)
        listed = [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]]
        assert listed == pytest.approx(list(expected.logprobs)[: len(listed)], abs=1e-4)
        assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


def test_the_same_seed_is_the_same_answer_alone_and_in_company(served):
    alone = text_of(call(served, asking(seed=5)))
    assert text_of(call(served, asking(seed=5))) == alone
    assert text_of(call(served, asking(seed=6))) != alone
    assert text_of(call(served, asking())) != text_of(call(served, asking()))
    company = call(served, asking(seed=5, n=4))[1]["choices"]
    assert company[0]["message"]["content"] == alone
    assert len({choice["message"]["content"] for choice in company}) == 4
    assert "".join(c["delta"].get("content", "") for e in streamed(served, asking(seed=5)) for c in e["choices"]) == alone


def test_breaks_do_not_change_an_answer(served, monkeypatch):
    """Every second batch is broken off as soon as it may be, as if somebody came. How often that is asked depends on the machine's load."""
    alone = text_of(call(served, asking(seed=5)))
    calls = []
    monkeypatch.setattr(served.service.sampler, "_should_break", lambda batch: calls.append(1) or len(calls) % 2 == 1)
    for _ in range(5):
        assert text_of(call(served, asking(seed=5))) == alone
    assert calls, "it was broken off and went on"


def test_the_openai_client_understands_it(served):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "seed": 5}
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.chat.completions.create(**ask, logprobs=True)
    assert whole.choices[0].message.content == text_of(call(served, asking(seed=5)))
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert all(one.logprob < 0 for one in whole.choices[0].logprobs.content)
    pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here"):
        client.chat.completions.create(**{**ask, "model": "gpt"})
    with pytest.raises(openai.BadRequestError, match="only 0 can be honoured"):
        client.chat.completions.create(**ask, frequency_penalty=1)


def test_a_run_s_own_tools_are_neither_needed_nor_imported(tiny_folder, tmp_path):
    import shutil

    from groupwise.config import dump_config, load_config

    shutil.copytree(tiny_folder, tmp_path / "run" / "final_model")
    tool = tmp_path / "my_tools.py"
    tool.write_text("raise SystemExit('imported')\n")
    named = [f"rollout.tools=[{tool}:search]", "model.dtype=float32", "model.device=cpu", "prompt.system=Use tools."]
    (tmp_path / "run" / "config.yaml").write_text(dump_config(load_config("quickstart-tools", named)))
    with pytest.raises(ConfigError, match="code that would be run"):
        settings_to_ask(str(tmp_path / "run"))
    config, longest = settings_to_ask(str(tmp_path / "run"), max_tokens=3, plays=False)
    server = open_server(config, longest, "run", "127.0.0.1", 0, None)
    try:
        status, answer = call(server, {**asking(), "model": "run"})
        assert (status, answer["usage"]["completion_tokens"] <= 3) == (200, True)
        assert server.service.system == "Use tools."
    finally:
        server.close()


def test_a_port_that_is_taken_is_told_before_the_weights_are_loaded(served, tiny_folder, monkeypatch):
    monkeypatch.setattr("groupwise.serving.server.open_service", lambda *_: pytest.fail("the weights were loaded"))
    config, longest = settings_to_ask(str(tiny_folder))
    with pytest.raises(ConfigError, match=f"the port {served.port} of 127.0.0.1 is taken"):
        open_server(config, longest, "tiny", "127.0.0.1", served.port, None)


def test_the_command_serves_until_ctrl_c(tiny_folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment.pop(KEY, None)
    command = [python(), "-m", "groupwise", "serve", str(tiny_folder), "--port", "0", "--name", "mine", "--max-tokens", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = next(line for line in process.stderr if " answers at " in line)
            assert line.startswith("groupwise: mine answers at http://127.0.0.1:")
            assert "with no key" in line
            url = line.split(" answers at ")[1].split(",")[0]
            body = json.dumps({**asking(), "model": "mine"}).encode()
            request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.loads(answer.read())["usage"]["completion_tokens"] <= 5
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()


def test_overrides_act_where_no_run_made_the_model(tiny_folder):
    assert settings_to_ask(str(tiny_folder))[0].prompt.system == "none"
    config, longest = settings_to_ask(str(tiny_folder), {"prompt.system": "boxed", "rollout.max_completion_tokens": 64})
    assert (config.prompt.system, longest) == ("boxed", 64)
    assert settings_to_ask(str(tiny_folder), {"prompt.system": "boxed"}, system="none", max_tokens=3)[0].prompt.system == "none"
