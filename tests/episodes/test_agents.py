"""Agents: programs that know a base URL alone. What they ask becomes an episode, exact to the token, and what fails is said."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from test_driver import PLENTY, Bytes, Scripted, real_engine
from test_forks import THINKS, Says, with_template

from groupwise.chat import make_speaker, refuse_named_code, settings_to_ask
from groupwise.config import dump_config, load_config
from groupwise.config.schema import Config, PromptConfig
from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.episodes import open_episodes, render_episode
from groupwise.episodes.driver import EpisodeEngine
from groupwise.errors import ConfigError, RewardError, TrainingError
from groupwise.evaluation.models import evaluate_model
from groupwise.models.decoder import Decoder
from groupwise.serving import agents
from groupwise.serving.agents import open_agents
from groupwise.training.loop import train
from groupwise.types import Problem
from tests.survival.kills import differences
from tests.tiny import tiny_config, write_sums, write_tiny_llama
from tests.waiting import LONG_S, comes
from tests.warm import python

ROOT = Path(__file__).resolve().parents[2]
AGENT = """
import json, os, sys, urllib.error, urllib.request

row = json.load(sys.stdin)
messages, prompt_tokens = [{"role": "user", "content": row["prompt"]}], []


def ask(key=os.environ["OPENAI_API_KEY"], **more):
    body = json.dumps({"model": "gpt-4o", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        whole = json.load(answer)
    choice = whole["choices"][0]
    prompt_tokens.append(whole["usage"]["prompt_tokens"])
    messages.append(choice["message"])
    return choice


def told(text, role="user", **more):
    messages.append({"role": role, "content": text, **more})

"""
TWO_TURNS = (
    'ask()\ntold("And then?")\nanswer = ask()\nprint("done"); print(json.dumps({"reward": len(answer["message"]["content"])}))\n'
)


@pytest.fixture
def thinker(tokenizer):
    return with_template(tokenizer, THINKS)


@pytest.fixture
def agent(tmp_path):
    """``agent(program)``: the command of a script that asks as ``program`` says."""

    def write(program: str, name: str = "my_agent.py") -> str:
        (tmp_path / name).write_text(AGENT + program)
        return f"{shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / name))}"

    return write


def opened(tokenizer, command: str, **rollout: Any) -> Any:
    config = Config(rollout={"environment": {"command": command}, "max_turns": 10, "call_format": "tags", **rollout})
    return open_episodes(config, tokenizer, [tokenizer.eos_token_id], open_agents)


def played(engine, tokenizer, command: str, *, samples=1, names=("p",), settings=PLENTY, system=None, **rollout: Any):
    """Groups of completions, and prompts."""
    episodes = opened(tokenizer, command, **rollout)
    problems = [Problem(name, f"Question {name}?", "42", {"level": 3}) for name in names]
    prompts = [render_episode(problem, tokenizer, PromptConfig(), system, episodes) for problem in problems]
    return EpisodeEngine(engine, episodes).sample(prompts, samples, settings, seed=3, scope="test"), prompts


def says(tokenizer, *turns: str) -> Scripted:
    return Scripted(tokenizer, lambda name, sample, turn: turns[turn])


def test_a_program_s_conversation_is_an_episode_and_its_first_request_the_prompt(tokenizer, agent):
    engine = says(tokenizer, "First.", "Second!")
    ((completion,),), (prompt,) = played(engine, tokenizer, agent(TWO_TURNS), system="Be brief.")
    assert (
        prompt.text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQuestion p?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.asked[0].prompts == [prompt]
    expected = "First.<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\nSecond!<|im_end|>"
    assert tokenizer.decode(completion.token_ids) == expected
    assert [(t.role, t.text) for t in completion.turns] == [
        ("assistant", "First."),
        ("user", "And then?"),
        ("assistant", "Second!"),
    ]
    assert (completion.finish_reason, completion.answer, completion.reward) == ("stop", "Second!", 7.0)
    assert [x != 0.0 for x in completion.logprobs] == list(completion.sampled)


def test_sampled_tokens_are_spliced_in_and_never_encoded_again(tokenizer, agent):
    """Most of these bytes are no text: their ids change when they are decoded and encoded, as a client does."""
    engine = Bytes(tokenizer, None)
    program = 'ask()\ntold("1")\nask()\ntold("2")\nask(stream=False)\n'
    groups, prompts = played(engine, tokenizer, agent(program), samples=4, names=("a", "b"))
    changed = 0
    for prompt, group in zip(prompts, groups, strict=True):
        for sample, completion in enumerate(group):
            own = [i for i, is_own in zip(completion.token_ids, completion.sampled, strict=True) if is_own]
            said = [engine.say(prompt.problem.id, sample, turn, 99, turn > 0).token_ids for turn in range(3)]
            assert own == [i for turn in said for i in turn]
            assert completion.finish_reason == "stop"
            changed += sum(tuple(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]) != ids for ids in said)
    assert changed > 10, "the test needs texts whose ids change"


TOOLS = """
tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties":
        {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
while calls := ask(tools=[tool])["message"].get("tool_calls"):
    for call in calls:
        given = json.loads(call["function"]["arguments"])
        told(str(given["a"] + given["b"]), "tool", tool_call_id=call["id"])
print(json.dumps({"reward": messages[-1]["content"] == "It is 5."}), file=sys.stderr)
"""


def test_an_agent_s_own_tools_are_described_and_their_results_are_context(tokenizer, agent):
    engine = says(tokenizer, "I add. <call>add(2, 3)</call><call>add(a=1, b=1)</call>", "It is 5.")
    ((completion,),), (prompt,) = played(engine, tokenizer, agent(TOOLS))
    assert "To use a tool, write only <call>" in prompt.text
    assert [(c.name, c.arguments, c.result, c.failure) for c in completion.calls] == [
        ("add", {"a": 2, "b": 3}, "5", None), ("add", {"a": 1, "b": 1}, "2", None),
    ]  # fmt: skip
    assert [turn.role for turn in completion.turns] == ["assistant", "tool", "assistant"]
    assert "<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(
        completion.token_ids
    )
    assert (completion.finish_reason, completion.answer, completion.reward) == ("stop", "It is 5.", None)


@pytest.mark.parametrize(
    ("order", "name"), [("calls[::-1]", 'call["id"]'), ("calls", "None"), ("calls", '"f"'), ("calls", 'calls[0]["id"]')]
)
def test_results_of_several_calls_are_told_apart_by_their_ids(tokenizer, agent, order, name):
    """Tools that run side by side end in any order. What names no call, or one twice, goes by place."""
    engine = says(tokenizer, "<call>add(2, 3)</call><call>add(1, 1)</call>", "It is 5.")
    program = TOOLS.replace("for call in calls:", f"for call in {order}:").replace(
        'tool_call_id=call["id"]', f"tool_call_id={name}"
    )
    ((completion,),), _ = played(engine, tokenizer, agent(program))
    assert completion.finish_reason == "stop"
    assert sorted((c.arguments["a"], c.arguments["b"], c.result) for c in completion.calls) == [(1, 1, "2"), (2, 3, "5")]
    assert [turn.text for turn in completion.turns if turn.role == "tool"] == ["2\n5" if order != "calls" else "5\n2"]


def test_a_stream_log_probabilities_and_usage_are_those_of_the_turn(tokenizer, agent, tmp_path):
    program = f"""
one = ask(logprobs=True, temperature=0.2, max_tokens=3, seed=5)
listed = [[part["token"], part["logprob"]] for part in one["logprobs"]["content"]]
told("Again.")
body = json.dumps({{"model": "x", "messages": messages, "stream": True, "stream_options": {{"include_usage": True}}}}).encode()
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
lines = [line[6:] for line in urllib.request.urlopen(request).read().decode().split("\\n\\n") if line]
events = [json.loads(line) for line in lines if line != "[DONE]"]
text = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
json.dump([listed, text, events[-1]["usage"], lines[-1]], open({str(tmp_path / "seen")!r}, "w"))
"""
    engine = says(tokenizer, "héy", "Second!")
    ((completion,),), (prompt,) = played(engine, tokenizer, agent(program))
    assert completion.finish_reason == "stop"
    listed, text, usage, last = json.loads((tmp_path / "seen").read_text())
    assert [token for token, _ in listed if "\ufffd" not in token and token] == ["h", "é", "y"]
    assert [logprob for _, logprob in listed] == [-0.5] * 4
    assert (text, last) == ("Second!", "[DONE]")
    assert usage["completion_tokens"] == len("Second!") + 1
    assert usage["prompt_tokens"] == len(prompt.token_ids) + len(completion.token_ids) - usage["completion_tokens"]


def test_the_run_s_settings_of_sampling_rule_and_that_is_said_once(tokenizer, agent, caplog):
    program = 'ask(temperature=0.7, top_p=1)\ntold("x")\nask(temperature=0.7)\n'
    with caplog.at_level(logging.WARNING, "groupwise"):
        ((*group,),), _ = played(says(tokenizer, "a", "b"), tokenizer, agent(program), samples=3)
    assert [c.finish_reason for c in group] == ["stop"] * 3
    assert [c.temperature for c in group] == [1.0] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the agent asks with temperature=0.7: the run's own settings of sampling count")


FAILURES = {
    "crash": ('ask()\nprint("one", file=sys.stderr)\nraise ValueError("lost")\n', "environment_error",
              r"error: the agent ended with exit status 1: .*one \| Traceback .* ValueError: lost"),
    "hang": ("ask()\nimport time\ntime.sleep(600)\n", "timeout", "error: the agent neither asked nor ended within 0.5 seconds"),
    "other": ('ask()\nmessages[:] = [{"role": "user", "content": "Else."}]\nask()\n', "new_conversation",
              "error: this request does not go on from the last answer"),
    "edited": ('ask()\nmessages[-1]["content"] += "!"\ntold("x")\nask()\n', "new_conversation", "error: this request does not go on"),
    "same": ("ask()\nmessages.pop()\nask()\n", "new_conversation", "error: this request does not go on"),
    "nothing new": ("ask()\nask()\n", "new_conversation", "error: this request does not go on"),
    "tools": ('ask()\ntold("x")\nask(tools=[{"type": "function", "function": {"name": "f"}}])\n', "new_conversation", "error: this"),
    "own": ('ask()\ntold("x")\ntold("I said.", "assistant")\ntold("y")\nask()\n', "new_conversation", "error: this request does not"),
    "several": ('ask()\ntold("x")\nask(n=2)\n', "environment_error", "error: .*HTTP Error 400"),
    "stops": ('ask()\ntold("x")\nask(stop=["."])\n', "environment_error", "error: .*HTTP Error 400"),
    "stranger": ('ask()\ntold("x")\nask(key="0" * 64)\n', "environment_error", "error: .*HTTP Error 401"),
    "killed": ("ask()\nimport signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "environment_error", "exit status -9 and said nothing"),
    "no number": ('ask()\nprint(\'{"reward": "high"}\')\n', "environment_error", None),
    "not finite": ('ask()\nprint(\'{"reward": NaN}\')\n', "environment_error", None),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILURES)
def test_a_program_that_fails_ends_its_episode_without_a_reward(tokenizer, agent, kind):
    program, reason, why = FAILURES[kind]
    ((completion,),), _ = played(
        says(tokenizer, "a", "b", "c"), tokenizer, agent(program), tool_timeout_s=0.5 if kind == "hang" else LONG_S
    )
    assert (completion.finish_reason, completion.reward, completion.failed) == (reason, None, True)
    if why is not None:
        assert re.search(why, completion.calls[-1].result), completion.calls[-1].result
        assert completion.calls[-1].failure == ("timed_out" if reason == "timeout" else "raised")
        assert len(completion.calls[-1].result) < 2100


SHORTENS = """
ask(); told("And then?"); ask(); told("More?")
messages[1:3] = []
ask(); told("Last?"); ask()
print(json.dumps({"reward": prompt_tokens[-1]}))
"""


def test_a_shortened_history_begins_a_further_sample_where_the_run_forks(tokenizer, agent):
    """What follows it is sampled after the request as it was asked, and what goes on from that is appended again."""
    engine = Says(tokenizer, ["One.", "Two.", "Three.", "Four."])
    ((completion,),), (prompt,) = played(engine, tokenizer, agent(SHORTENS), system="Be brief.", rewritten_history="fork")
    opening, cut = prompt.text, prompt.text.removesuffix("<|im_start|>assistant\n")
    shorter = f"{cut}<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n"
    assert [(t.role, t.text, t.rewritten) for t in completion.turns] == [
        ("assistant", "One.", False), ("user", "And then?", False), ("assistant", "Two.", False), ("user", "More?", True),
        ("assistant", "Three.", False), ("user", "Last?", False), ("assistant", "Four.", False),
    ]  # fmt: skip
    first, second = samples(prompt.token_ids, completion)
    after = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(first) == f"{opening}One.{after.format('And then?')}Two.<|im_end|>"
    assert tokenizer.decode(second) == f"{shorter}<|im_start|>assistant\nThree.{after.format('Last?')}Four.<|im_end|>"
    assert (completion.finish_reason, completion.reward) == ("stop", len(second) - len("Four.") - 1), "its usage is that sample's"


def samples(prompt_ids, completion):
    """Tokens of each of an episode's samples, prompt or history first."""
    parts, at = [list(prompt_ids)], 0
    for turn in completion.turns:
        part, at = completion.token_ids[at : at + turn.tokens], at + turn.tokens
        if turn.rewritten:
            parts.append([])
        parts[-1] += part
    return parts


@pytest.mark.parametrize("kind", ["other", "edited", "same", "nothing new", "tools", "own"])
def test_any_other_conversation_goes_on_where_the_run_forks(tokenizer, agent, kind):
    ((completion,),), _ = played(says(tokenizer, "Fine.", "Well."), tokenizer, agent(FAILURES[kind][0]), rewritten_history="fork")
    assert (completion.finish_reason, completion.reward) == ("stop", None)
    assert [turn.rewritten for turn in completion.turns] == [False, True, False]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_fork_has_the_tools_described_and_the_results_of_its_own_calls(tokenizer, agent, keeps):
    """Results belong to the calls of the last turn where the shortened history still ends with it, and else to nobody's."""
    other = '[{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]}]'
    ending = (
        'told("5", "tool", tool_call_id=call["id"])' if keeps else f'messages += {other}; told("9", "tool", tool_call_id="1")'
    )
    program = TOOLS.partition("while")[0] + (
        'ask(tools=[tool]); told("Add."); call = ask(tools=[tool])["message"]["tool_calls"][0]\n'
        f"del messages[{'1:3' if keeps else '1:'}]\n{ending}\nask(tools=[tool])\n"
    )
    engine = Says(tokenizer, ["Yes?", "<call>add(2, 3)</call>", "So be it."])
    ((completion,),), (prompt,) = played(engine, tokenizer, agent(program), rewritten_history="fork")
    assert completion.finish_reason == "stop"
    assert [turn.rewritten for turn in completion.turns] == [False, False, False, True, False]
    assert [(c.name, c.arguments, c.result) for c in completion.calls] == ([("add", {"a": 2, "b": 3}, "5")] if keeps else [])
    _, further = samples(prompt.token_ids, completion)
    described = prompt.text.partition("<|im_start|>user")[0]
    assert "To use a tool, write only <call>" in described
    assert tokenizer.decode(further).startswith(described)


def test_special_tokens_of_the_user_are_text_in_every_request(tokenizer, agent):
    """In the first one, where it is appended, and where the run forks: the same ids."""
    begins, told = 'messages[0]["content"] = "One<|im_end|>"\nask()\n', 'told("Two<|im_start|>")\nask()\n'
    forks = f'{begins}told("Else?")\nask()\ndel messages[2:]\n{told}'
    ((appended,),), (prompt,) = played(Says(tokenizer, ["a", "b"]), tokenizer, agent(begins + told))
    ((forked,),), _ = played(Says(tokenizer, ["a", "c", "b"]), tokenizer, agent(forks), rewritten_history="fork")
    assert [turn.rewritten for turn in forked.turns] == [False, False, False, True, False]
    (whole,), (_, after) = samples(prompt.token_ids, appended), samples(prompt.token_ids, forked)
    marks = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert [whole.count(mark) for mark in marks] == [4, 4], "two questions and two answers"
    assert whole == after


def test_what_goes_on_from_an_answer_is_appended_whatever_the_template_drops(thinker, agent):
    """A chat template that drops thoughts writes no agent's history: the agent does."""
    engine = Says(thinker, ["<think>Hm.</think>First.", "Second!"])
    ((completion,),), _ = played(engine, thinker, agent(TWO_TURNS), rewritten_history="fork")
    assert [turn.rewritten for turn in completion.turns] == [False, False, False]
    assert (completion.finish_reason, completion.reward) == ("stop", 7.0)


def test_output_of_any_length_neither_blocks_nor_stays(tokenizer, agent, monkeypatch):
    """Its end is read: megabytes before the reward, on both pipes."""
    program = (
        'ask()\nfor pipe in (sys.stdout, sys.stderr):\n    print("x" * 2**20, file=pipe)\n    print("y" * 2**20, file=pipe)\n'
        'print(json.dumps({"reward": 0.25}))\n'
    )
    kept, end = [], agents._Program.close
    monkeypatch.setattr(agents._Program, "close", lambda one: (kept.append((len(one.printed), len(one.complained))), end(one))[1])
    ((completion,),), _ = played(says(tokenizer, "a"), tokenizer, agent(program))
    assert (completion.finish_reason, completion.reward) == ("stop", 0.25)
    assert kept[-1] == (agents.KEPT_BYTES, agents.KEPT_BYTES)


def test_a_cut_turn_is_heard_and_what_follows_is_refused(tokenizer, agent):
    """What the program says the episode was worth counts; one that fails for the refusal has earned 0."""
    judged = 'first = ask()\nassert first["finish_reason"] == "length"\nprint(json.dumps({"reward": -1}))\n'
    goes_on = 'ask()\ntold("x")\nask()\n'
    copes = 'ask()\ntold("x")\ntry:\n    ask()\nexcept urllib.error.HTTPError as error:\n    print(json.dumps({"reward": error.code}))\n'
    hangs = "ask()\nimport time\ntime.sleep(600)\n"
    for program, reward in ((judged, -1.0), (goes_on, 0.0), (copes, 400.0), (hangs, 0.0)):
        limit_s = 0.5 if program is hangs else LONG_S
        engine = says(tokenizer, "too long", "b")
        ((cut,),), _ = played(engine, tokenizer, agent(program), settings=SamplingSettings(max_tokens=4), tool_timeout_s=limit_s)
        assert (cut.finish_reason, cut.reward, len(cut.token_ids)) == ("length", reward, 4)
    for settings, turns, reason in ((SamplingSettings(max_tokens=20), 10, "context_full"), (PLENTY, 2, "max_turns")):
        engine = says(tokenizer, *["short"] * 10)
        program = copes if reason == "context_full" else copes.replace("try:", 'ask()\ntold("y")\ntry:')
        ((ended,),), _ = played(engine, tokenizer, agent(program), settings=settings, max_turns=turns)
        assert (ended.finish_reason, ended.reward) == (reason, 400.0)


def test_members_that_begin_otherwise_than_the_prompt_are_refused(tokenizer, agent):
    command = agent('import time\nmessages[0]["content"] += str(time.time())\nask()\n')
    with pytest.raises(
        TrainingError, match="asked something else first on problem p than before, but all members of a group must"
    ):
        played(says(tokenizer, "a"), tokenizer, command, samples=2)


def test_a_program_that_never_asks_is_told_before_anything_is_sampled(tokenizer, agent):
    with pytest.raises(TrainingError, match="asked nothing on problem p: it ended with exit status 3 before it asked: no key"):
        played(says(tokenizer, "a"), tokenizer, agent('print("no key", file=sys.stderr)\nsys.exit(3)\n'))
    with pytest.raises(TrainingError, match=r"the command cannot be started .*No such file"):
        played(says(tokenizer, "a"), tokenizer, "/nowhere/agent --fast")


def test_a_program_that_fails_once_before_it_asks_has_a_second_try(tokenizer, agent, tmp_path):
    begun = str(tmp_path / "begun")
    program = f'if not os.path.exists({begun!r}):\n    open({begun!r}, "w")\n    sys.exit("no connection")\nask()\n'
    ((completion,),), _ = played(says(tokenizer, "a"), tokenizer, agent(program))
    assert completion.finish_reason == "stop"


def test_a_program_finds_the_row_and_no_secret(tokenizer, agent, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef0123")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    program = f'ask()\njson.dump([row, dict(os.environ)], open({str(tmp_path / "seen")!r}, "w"))\n'
    played(says(tokenizer, "a"), tokenizer, agent(program))
    row, environment = json.loads((tmp_path / "seen").read_text())
    assert row == {"level": 3, "prompt": "Question p?", "answer": "42"}
    assert "HF_TOKEN" not in environment
    assert len(environment["OPENAI_API_KEY"]) == 64
    assert environment["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.URLError):  # the door is closed when the call has ended
        urllib.request.urlopen(environment["OPENAI_BASE_URL"].removesuffix("/v1") + "/health", timeout=5)


def test_nothing_that_a_program_started_outlives_its_call(tokenizer, agent, tmp_path):
    program = (
        "import subprocess\n"
        f'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\nopen({str(tmp_path / "child")!r}, "a").write('
        'str(child.pid) + " ")\nask()\n'
    )
    ((completion,),), _ = played(says(tokenizer, "a"), tokenizer, agent(program))
    assert completion.finish_reason == "stop"
    pids = (tmp_path / "child").read_text().split()
    assert len(pids) == 2  # that of the prompt, and that of the episode
    assert comes(lambda: not any(_runs(int(pid)) for pid in pids))


def test_what_a_program_leaves_behind_cannot_print_for_ever(tokenizer, agent):
    program = 'import subprocess\nask()\nsubprocess.Popen(["yes"])\n'
    ((completion,),), _ = played(says(tokenizer, "a"), tokenizer, agent(program))
    assert (completion.finish_reason, completion.reward) == ("stop", None)


def test_a_program_whose_output_cannot_be_read_is_ended_and_says_why(tokenizer, agent, monkeypatch):
    def fails():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(agents, "selectors", SimpleNamespace(DefaultSelector=fails))
    with pytest.raises(
        TrainingError, match=r"it ended with exit status -9 before it asked: what .* cannot be read .*Too many open files"
    ):
        played(says(tokenizer, "a"), tokenizer, agent("import time\ntime.sleep(600)\n"))


FILES = """
import logging, resource, sys
from groupwise.config.schema import Config
from groupwise.serving.agents import open_agents
logging.basicConfig(format="%(message)s", level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
config = Config(rollout={"environment": {"command": "a"}, "prompts_per_step": 32}, evaluation={"problems": None})
with open_agents(config, None, None, []).open(int(sys.argv[2])):
    pass
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("hard", "episodes", "soft"), [(4096, 1, 1792), (4096, 300, 2056), (1000, 1, 1000)])
def test_as_many_files_may_be_open_as_the_programs_of_a_step_need(hard, episodes, soft):
    """And those of an evaluation whose number of problems the data alone says."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    words = [python(), "-c", FILES, str(hard), str(episodes)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.stdout.split() == [str(soft)], done.stderr
    assert ("256 agents at once may need 1792 open files, but this process may have 1000" in done.stderr) == (soft < 1792)


def test_a_door_has_connections_for_all_its_programs(tokenizer, monkeypatch):
    doors, start = [], agents.Server
    monkeypatch.setattr(agents, "Server", lambda *given, **named: (doors.append(named["connections"]), start(*given, **named))[1])
    programs = opened(tokenizer, "a").agents
    for count in (100, 5000):
        programs._allowed = count
        with programs.open(1):
            pass
    assert doors == [4096, 10_000]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


HANGS_UP = TWO_TURNS.replace(
    "answer = ask()", """
import socket
from urllib.parse import urlsplit
where = urlsplit(os.environ["OPENAI_BASE_URL"])
body = json.dumps({"model": "gpt-4o", "messages": messages}).encode()
with socket.create_connection((where.hostname, where.port)) as early:
    early.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nContent-Type: application/json\\r\\nAuthorization: Bearer "
                  + os.environ["OPENAI_API_KEY"].encode() + b"\\r\\nContent-Length: " + str(len(body)).encode() + b"\\r\\n\\r\\n" + body)
    import time
    while not os.path.exists("{folder}/heard"):
        time.sleep(0.01)
open("{folder}/closed", "w").close()
while not os.path.exists("{folder}/again"):
    time.sleep(0.01)
answer = ask()
""".strip(),
)  # fmt: skip


def test_who_hung_up_and_asks_again_takes_the_answer(tokenizer, agent, tmp_path, monkeypatch):
    """As clients do whose own time limit is shorter than a batch: the same request is not a new one."""
    (tmp_path / "again").touch()
    engine = says(tokenizer, "First.", "Second!")
    served, asked, serve, begin = [], [], engine.serve, agents._Program.begin

    def serve_late(request, on_progress=None):
        served.append(request)
        assert len(served) == 1 or comes(lambda: len(asked) == 4)
        return serve(request, on_progress)

    def begin_and_note(one, body):
        exchange = begin(one, body)
        asked.append(body)  # for the prompt, the first turn, the second, and that again
        if len(asked) == 3:
            (tmp_path / "heard").touch()
        return exchange

    engine.serve = serve_late
    monkeypatch.setattr(agents._Program, "begin", begin_and_note)
    ((completion,),), _ = played(engine, tokenizer, agent(HANGS_UP.replace("{folder}", str(tmp_path))))
    assert (completion.finish_reason, completion.reward) == ("stop", 7.0)


@pytest.mark.parametrize("rewritten_history", ["refuse", "fork"])
def test_who_hung_up_is_told_the_answer_that_came_meanwhile(tokenizer, agent, tmp_path, monkeypatch, rewritten_history):
    """Asked again just after it, the same is no new turn."""
    engine = says(tokenizer, "First.", "Second!", "Third.")
    served, asked, told, serve = [], [], [], engine.serve
    begin, answer = agents._Program.begin, agents._Program.answer

    def serve_late(request, on_progress=None):
        served.append(request)
        assert len(served) == 1 or comes((tmp_path / "closed").exists)
        return serve(request, on_progress)

    def begin_and_note(one, body):
        exchange = begin(one, body)
        asked.append(body)
        if len(asked) == 3:  # for the prompt, the first turn and the second
            (tmp_path / "heard").touch()
        return exchange

    def answer_and_note(one, *turn):
        told.append(answer(one, *turn))
        if len(told) == 2:
            (tmp_path / "again").touch()
        return told[-1]

    engine.serve = serve_late
    monkeypatch.setattr(agents._Program, "begin", begin_and_note)
    monkeypatch.setattr(agents._Program, "answer", answer_and_note)
    program = agent(HANGS_UP.replace("{folder}", str(tmp_path)))
    ((completion,),), _ = played(engine, tokenizer, program, rewritten_history=rewritten_history)
    assert (completion.finish_reason, completion.reward) == ("stop", 7.0)
    assert ([turn.rewritten for turn in completion.turns], len(asked), len(served)) == ([False] * 3, 4, 2)


SIDE_BY_SIDE = """
import threading

ask()
told("And then?")
body, answers = json.dumps({"model": "gpt-4o", "messages": messages}).encode(), []
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}


def same():
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        answers.append(json.load(answer)["choices"][0]["message"]["content"])


threads = [threading.Thread(target=same) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({"reward": len(set(answers))}))
"""


def test_who_asks_the_same_side_by_side_is_answered_one_after_the_other(tokenizer, agent, monkeypatch):
    engine = Says(tokenizer, ["First.", "One.", "Two.", "Three."])
    asked, serve, begin = [], engine.serve, agents._Program.begin

    def serve_late(request, on_progress=None):
        assert not engine.asked or comes(lambda: len(asked) == 5), "for the prompt, the first turn, and three together"
        return serve(request, on_progress)

    def begin_and_note(one, body):
        exchange = begin(one, body)
        asked.append(body)
        return exchange

    engine.serve = serve_late
    monkeypatch.setattr(agents._Program, "begin", begin_and_note)
    ((completion,),), _ = played(engine, tokenizer, agent(SIDE_BY_SIDE), rewritten_history="fork")
    assert (completion.finish_reason, completion.reward) == ("stop", 3.0)
    assert [turn.rewritten for turn in completion.turns] == [False, False, False, True, False, True, False]


@pytest.mark.parametrize("kind", ["builtin", pytest.param("transformers", marks=pytest.mark.slow)])
def test_logprobs_of_an_agent_s_episodes_are_those_of_one_pass(kind, tmp_path, agent):
    """The oracle is the library's module over the whole episode at once; company and places change nobody's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_llama(tmp_path / "tiny", tie_word_embeddings=False, stop_weight=12.0, max_position_embeddings=512)
    module, own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)
    program = 'for word in ("One.", "Two."):\n    ask()\n    told(word)\nask()\n'
    settings, names = SamplingSettings(max_tokens=300), ("a", "b", "c")
    groups, prompts = played(real_engine(kind, module, own, 64), own, agent(program), samples=3, names=names, settings=settings)
    checked = _against_one_pass(module, prompts, groups)
    assert checked > 9 * 2, "the test needs episodes of several turns"
    few = real_engine(kind, module, own, 2)
    again, _ = played(few, own, agent(program), samples=3, names=names, settings=settings, concurrent_tool_calls=2)
    assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in groups]


def _against_one_pass(module: Any, prompts: Any, groups: Any) -> int:
    """How many turns of the policy were compared."""
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = module(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1]
            expected = torch.log_softmax(logits, -1)[torch.arange(len(completion.token_ids)), ids[0, len(prompt.token_ids) :]]
            own = torch.tensor(completion.sampled)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs).double()[own], expected[own].double(), atol=1e-5, rtol=1e-5
            )
            assert not torch.tensor(completion.logprobs)[~own].any()
    return sum(turn.sampled for group in groups for c in group for turn in c.turns)


@pytest.mark.slow
def test_the_embedded_model_plays_an_agent_s_episodes(embedded_model_folder, agent):
    """In fp64, so that 1e-5 is far above the rounding of 30 layers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(embedded_model_folder, dtype=torch.float64).eval()
    own = AutoTokenizer.from_pretrained(embedded_model_folder)
    engine = BuiltinEngine(Decoder(module), own, (own.eos_token_id,), max_rows=8)
    program = 'ask()\ntold("Say it in one word.")\nask()\n'
    groups, prompts = played(engine, own, agent(program), samples=2, settings=SamplingSettings(max_tokens=120))
    assert _against_one_pass(module, prompts, groups) >= 2
    assert all(not c.failed for group in groups for c in group)


def test_the_openai_client_needs_no_change(tokenizer, tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "plain.py").write_text(
        "import json, sys\nfrom openai import OpenAI\nclient, row = OpenAI(), json.load(sys.stdin)\n"
        'messages = [{"role": "user", "content": row["prompt"]}]\n'
        "for question in ('And?', None):\n"
        '    said = client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.7).choices[0].message\n'
        "    messages.append(said)\n"
        '    messages.append({"role": "user", "content": question})\n'
        'print(json.dumps({"reward": 1.0}))\n'
    )
    command = f"{sys.executable} {tmp_path / 'plain.py'}"
    ((completion,),), _ = played(says(tokenizer, "a", "b"), tokenizer, command, tool_timeout_s=60.0)
    assert (completion.finish_reason, completion.reward, completion.answer) == ("stop", 1.0, "b")


LETTERS = (
    'said = ask()["message"]["content"]\nprint(json.dumps({"reward": sum(c.islower() for c in said) / max(1, len(said))}))\n'
)


def run_config(tmp_path: Path, command: str, **sections: Any) -> Config:
    folder = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False, stop_weight=12.0, max_position_embeddings=512)
    base: dict[str, Any] = {
        "rollout": {"environment": {"command": command}, "max_completion_tokens": 60},
        "rewards": {"functions": [{"function": "environment"}]},
        "output": {"checkpoint_every": 1, "keep_checkpoints": 4},
    }
    return tiny_config(folder, write_sums(tmp_path / "sums.jsonl"), **{**base, **sections})


def test_a_run_learns_from_an_agent_is_judged_and_resumes(tmp_path, agent):
    config = run_config(tmp_path, agent(LETTERS), training={"steps": 3, "threads": 1, "deterministic": True})
    reports: list[Any] = []
    whole = train(config, console=Console(quiet=True), run_folder=tmp_path / "whole", on_step=reports.append).folder
    for report in reports:
        for group in report.groups:
            for completion, reward in zip(group.completions, group.rewards, strict=True):
                text = completion.answer
                assert reward == completion.reward == pytest.approx(sum(c.islower() for c in text) / max(1, len(text)))
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["evaluations"][-1]["n"] == 4
    again: list[Any] = []
    train(
        config, console=Console(quiet=True), run_folder=tmp_path / "again", resume_from=whole / "checkpoints" / "step-2",
        on_step=again.append,
    )  # fmt: skip
    assert [g.completions for g in again[-1].groups] == [g.completions for g in reports[-1].groups]
    (result,) = evaluate_model(str(whole / "final_model"), config)
    assert all("reward" in record for record in result.records)


TRIES = """
ask(); told("And then?"); ask()
with open(sys.argv[1], "ab", buffering=0) as tried:
    tried.write(b".")
    if tried.tell() == 12:
        os.kill(os.getppid(), 9)
messages[1:3] = []
told("More?"); ask(); told("Last?")
said = ask()["message"]["content"]
print(json.dumps({"reward": sum(c.islower() for c in said) / max(1, len(said))}))
"""
"""Of all programs that count themselves in one file, the twelfth kills the run in the middle of its episode."""


def test_a_run_over_an_agent_that_shortens_its_history_survives_a_kill(tmp_path, agent):
    """By the command, from settings to weights: steps over forked episodes, killed in the middle of one, end where the run ends that was
    left alone."""
    tried, settings = tmp_path / "tried", tmp_path / "config.yaml"
    command = f"{agent(TRIES)} {tried}"
    config = run_config(
        tmp_path, command, training={"steps": 4, "threads": 1, "deterministic": True},
        data={"limit": 8, "holdout": 2}, evaluation={"problems": 2},
        rollout={
            "environment": {"command": command}, "max_completion_tokens": 400, "prompts_per_step": 2, "completions_per_prompt": 2,
            "rewritten_history": "fork",
        },
    )  # fmt: skip
    settings.write_text(dump_config(config))

    def run(folder: str, *more: str) -> subprocess.CompletedProcess[str]:
        words = [python(), "-m", "groupwise", "train", str(settings), "--run-folder", str(tmp_path / folder), *more]
        return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)

    tried.write_bytes(b"." * 99)
    whole = run("whole")
    assert whole.returncode == 0, whole.stderr
    rows = [json.loads(line) for line in (tmp_path / "whole" / "completions.jsonl").read_text().splitlines()]
    assert any([turn["rewritten"] for turn in row["turns"]] == [False, False, False, True, False, False, False] for row in rows)
    tried.unlink()
    assert run("killed").returncode == -signal.SIGKILL
    done = len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines())
    assert 0 < done < 4, "the test needs a kill in the middle of the run"
    resumed = run("killed", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert differences(tmp_path / "whole", tmp_path / "killed") == []


@pytest.mark.parametrize("on_error", [pytest.param("stop", marks=pytest.mark.slow), "skip"])
def test_a_failed_program_follows_on_error(tmp_path, agent, on_error):
    program = LETTERS + 'if "3 + 4" in row["prompt"] or "5 + 6" in row["prompt"]:\n    sys.exit("no more")\n'
    four = [{"question": f"{a} + {a + 1} = ?", "answer": str(2 * a + 1)} for a in (3, 4, 5, 6)]
    (tmp_path / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in four))
    config = run_config(
        tmp_path, agent(program), rewards={"functions": [{"function": "length"}], "on_error": on_error},
        rollout={
            "environment": {"command": agent(program)}, "max_completion_tokens": 400, "prompts_per_step": 4,
            "completions_per_prompt": 2,
        },  # one that the limit ended would be no failure
        data={"source": str(tmp_path / "four.jsonl"), "holdout": 0}, training={"steps": 1},
    )  # fmt: skip
    reports: list[Any] = []
    if on_error == "stop":
        with pytest.raises(
            RewardError, match=r"the environment failed .* the agent ended with exit status 1: no more; correct the env"
        ):
            train(config, console=Console(quiet=True), run_folder=tmp_path / "run")
        return
    train(config, console=Console(quiet=True), run_folder=tmp_path / "run", on_step=reports.append)
    asked = {group.prompt.problem.question for report in reports for group in report.groups}
    assert asked == {"4 + 5 = ?", "6 + 7 = ?"}


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        ({"environment": {"command": "a", "other": "b.py:C"}}, "an agent's command plays all problems"),
        ({"environment": {"command": " "}}, "environment's command is empty"),
        ({"environment": {"command": "python 'a"}}, "No closing quotation"),
        ({"environment": {"command": "python a.py"}, "tools": ["calculator"]}, "an agent brings its own tools"),
    ],
)
def test_what_is_no_command_is_refused(rollout, why):
    with pytest.raises(ConfigError, match=why):
        load_config(None, {"rollout": rollout})


def test_a_run_s_folder_cannot_have_its_command_run(tmp_path):
    """Whatever the program is called."""
    for command in ("python my_agent.py", "groupwise.sh"):
        config = load_config(None, {"rollout": {"environment": {"command": command}}})
        (tmp_path / "config.yaml").write_text(dump_config(config))
        with pytest.raises(ConfigError, match=f"sets rollout.environment to the command {command}, code that would be run"):
            refuse_named_code(config, tmp_path / "config.yaml", data=False)
        trusted = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": True})})
        refuse_named_code(trusted, tmp_path / "config.yaml", data=False)


def test_a_talk_with_the_model_is_no_agent_s_episode(tmp_path):
    config = run_config(tmp_path, "python my_agent.py")
    with pytest.raises(
        ConfigError, match=r"which train and eval play: to talk to the model itself, set rollout\.environment=null"
    ):
        make_speaker(config, 5, 1.0, False, 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "model").rename(tmp_path / "run" / "final_model")
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    assert settings_to_ask(str(tmp_path / "run"))[0].rollout.environment is None


@pytest.mark.parametrize(
    ("said", "reward"), [(["42"], 1.0), (["It is 42.", "42."], 0.9), (["41"], 0.5), (["Well.", "Well."], -0.1)]
)
def test_the_example_asks_again_where_the_answer_is_no_number(tokenizer, said, reward, monkeypatch):
    monkeypatch.chdir(ROOT)
    rollout = load_config("examples/agents/ask_again.yaml").rollout
    ((completion,),), _ = played(says(tokenizer, *said), tokenizer, rollout.environment["command"], max_turns=rollout.max_turns)
    assert (completion.finish_reason, completion.reward) == ("stop", reward)
    assert completion.answer == said[-1]
