"""Rendered ids are the tokenizer's own, held against Qwen2.5's real chat template."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from groupwise.config import build_config
from groupwise.config.schema import DataConfig, PromptConfig
from groupwise.data.answers import grade
from groupwise.data.arithmetic import generate
from groupwise.data.inspect import inspect_source
from groupwise.data.prompts import (
    SYSTEM_PROMPTS,
    drop_long_prompts,
    note_on_date,
    note_on_options,
    note_on_place,
    note_on_places,
    plain_ids,
    render,
    resolve_system,
    unknown_arguments,
    worked_completion,
    worked_expressions,
)
from groupwise.data.sources import load_problems, save_prepared
from groupwise.episodes.tools import calculator
from groupwise.errors import ConfigError, DataError, ModelError
from groupwise.rewards.functions import is_well_formed
from groupwise.training.setup import prepare
from groupwise.types import Problem, Prompt
from tests.tiny import TEMPLATE, lower_case_share, tiny_config, write_sums, write_tiny_llama, write_tiny_tokenizer

CHAT = PromptConfig()
NO_SYSTEM_ROLE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}[model]"
)


def problem(question: Any, **columns: Any) -> Problem:
    return Problem("p:0", question, "42", columns)


@pytest.fixture
def with_template(qwen_tokenizer: Any) -> Any:
    """The real tokenizer with another chat template, for the length of one test."""
    before = qwen_tokenizer.chat_template

    def use(template: str | None) -> Any:
        qwen_tokenizer.chat_template = template
        return qwen_tokenizer

    yield use
    qwen_tokenizer.chat_template = before


def random_text(rng: random.Random) -> str:
    pieces = [
        "How many",
        " 17",
        "\n",
        "  ",
        "é",
        "数",
        "$\\frac{1}{2}$",
        "<b>",
        "'",
        " apples?",
        "🙂",
        "<|im_end",
        "{{x}}",
        "System: ",
    ]
    return "Q" + "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12)))


def test_ids_equal_the_tokenizers_own_on_random_conversations(qwen_tokenizer: Any) -> None:
    rng = random.Random(20)
    for _ in range(150):
        turns = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.3 else []
        for _ in range(rng.randrange(3)):
            turns += [{"role": "user", "content": random_text(rng)}, {"role": "assistant", "content": random_text(rng)}]
        turns.append({"role": "user", "content": random_text(rng)})
        system = random_text(rng) if rng.random() < 0.5 else None
        prompt = render(problem(tuple(turns)), qwen_tokenizer, CHAT, system)
        expected = turns if system is None or turns[0]["role"] == "system" else [{"role": "system", "content": system}, *turns]
        own = qwen_tokenizer.apply_chat_template(expected, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
        assert list(prompt.token_ids) == list(own)
        assert prompt.text == qwen_tokenizer.apply_chat_template(expected, add_generation_prompt=True, tokenize=False)
        assert list(prompt.messages or ()) == expected
        assert prompt.text.endswith("<|im_start|>assistant\n")


def test_a_question_in_text_becomes_system_and_user_turn(qwen_tokenizer: Any) -> None:
    prompt = render(problem("6 x 7?"), qwen_tokenizer, CHAT, "Be brief.")
    assert prompt.text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6 x 7?<|im_end|>\n<|im_start|>assistant\n"
    assert all(type(i) is int for i in prompt.token_ids)


def test_a_template_without_system_role_gets_it_in_the_users_turn(with_template: Callable[[str], Any]) -> None:
    prompt = render(problem("6 x 7?"), with_template(NO_SYSTEM_ROLE), CHAT, "Be brief.")
    assert prompt.text == "<user>Be brief.\n\n6 x 7?</><model>"
    assert prompt.messages == ({"role": "user", "content": "Be brief.\n\n6 x 7?"},)


def test_a_template_that_loses_the_system_turn_silently_is_found_out(with_template: Callable[[str], Any]) -> None:
    prompt = render(problem("6 x 7?"), with_template(DROPS_SYSTEM), CHAT, "Be brief.")
    assert prompt.text == "[user]Be brief.\n\n6 x 7?[model]"


def test_a_template_that_refuses_the_conversation_is_named_with_the_problem(with_template: Callable[[str], Any]) -> None:
    with pytest.raises(ModelError, match=r"refuses the conversation of problem p:0 \(never\)"):
        render(problem("6 x 7?"), with_template("{{ raise_exception('never') }}"), CHAT, "Be brief.")


THINKS = (
    TEMPLATE + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_the_chat_template_is_given_further_arguments(with_template: Callable[[str | None], Any]) -> None:
    tokenizer = with_template(THINKS)
    thinking = render(problem("1 + 1?"), tokenizer, CHAT, None)
    without = render(problem("1 + 1?"), tokenizer, PromptConfig(template_arguments={"enable_thinking": False}), None)
    assert without.text == thinking.text + "<think></think>"
    assert tokenizer.decode(without.token_ids) == without.text
    misspelt = {"enable_thinkng": False, "enable_thinking": False}
    assert "has enable_thinkng, which the model's chat template does not ask for" in (
        unknown_arguments(tokenizer, misspelt) or ""
    )
    assert unknown_arguments(tokenizer, {"enable_thinking": False}) is None
    assert "has thinking, which" in (unknown_arguments(tokenizer, {"thinking": False}) or ""), "a part of a name is another name"


def test_what_the_program_itself_gives_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="names tokenize, which the program itself gives the template"):
        build_config({"prompt": {"template_arguments": {"tokenize": False}}})


def test_no_chat_template_is_an_error_with_a_remedy(with_template: Callable[[str | None], Any]) -> None:
    with pytest.raises(ModelError, match=r"set prompt.style to plain or concat"):
        render(problem("6 x 7?"), with_template(None), CHAT, None)


@pytest.mark.parametrize(
    ("style", "system", "text"),
    [
        ("plain", None, "User: 6 x 7?\nAssistant: "),
        ("plain", "Be brief.", "Be brief.\n\nUser: 6 x 7?\nAssistant: "),
        ("concat", None, "6 x 7?"),
        ("concat", "\nBe brief.\n", "Be brief.\n6 x 7?"),
    ],
)
def test_plain_styles(qwen_tokenizer: Any, style: Any, system: str | None, text: str) -> None:
    prompt = render(problem("6 x 7?"), qwen_tokenizer, PromptConfig(style=style), system)
    assert prompt.text == text
    assert list(prompt.token_ids) == qwen_tokenizer(text)["input_ids"]
    assert prompt.messages is None


def test_a_plain_prompt_begins_once_and_does_not_end(tmp_path: Path) -> None:
    """With a tokenizer that puts its start and its end token around every text."""
    tokenizer = write_tiny_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", start), ("<|im_end|>", end)]
    )
    bare = tokenizer("6 x 7?", add_special_tokens=False)["input_ids"]
    assert tokenizer("6 x 7?")["input_ids"] == [start, *bare, end]
    for question in ("6 x 7?", "<s>6 x 7?"):
        prompt = render(problem(question), tokenizer, PromptConfig(style="concat"), None)
        assert (prompt.text, prompt.token_ids) == (question, (start, *bare))
    assert plain_ids(tokenizer, "<s>6 x 7?<|im_end|>") == (start, *bare, end), "which the text has itself"


@pytest.mark.parametrize(
    ("setting", "source", "system", "style"),
    [
        ("auto", "gsm8k", SYSTEM_PROMPTS["xml"], "xml"),
        ("auto", "arithmetic", SYSTEM_PROMPTS["xml"], "xml"),
        ("auto", "polaris", SYSTEM_PROMPTS["boxed"], "boxed"),
        ("auto", "POLARIS-Project/Polaris-Dataset-53K", SYSTEM_PROMPTS["boxed"], "boxed"),
        ("auto", "someone/else", SYSTEM_PROMPTS["xml"], "xml"),
        ("boxed", "gsm8k", SYSTEM_PROMPTS["boxed"], "boxed"),
        ("none", "polaris", None, "boxed"),
        ("End with #### and the number.", "gsm8k", "End with #### and the number.", "plain"),
        ("Use \\boxed{}.", "gsm8k", "Use \\boxed{}.", "boxed"),
        ("Be brief.", "gsm8k", "Be brief.", "xml"),
    ],
)
def test_system_prompts(setting: str, source: str, system: str | None, style: str) -> None:
    assert resolve_system(PromptConfig(system=setting), DataConfig(source=source)) == (system, style)


def test_polaris_is_known_by_a_files_columns(shared_data: Path) -> None:
    for name, style in (
        ("competition-math/train_math.json", "boxed"),
        ("math-benchmarks/aime24.parquet", "boxed"),
        ("gsm8k", "xml"),
    ):
        assert resolve_system(CHAT, DataConfig(source=str(shared_data / name)))[1] == style


def test_the_folders_of_a_path_do_not_make_polaris_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "polaris"
    folder.mkdir()
    for name, style in (("sums.jsonl", "xml"), ("Polaris-53K.jsonl", "boxed")):
        write_sums(folder / name)
        assert resolve_system(CHAT, DataConfig(source=str(folder / name)))[1] == style
    save_prepared(load_problems(DataConfig(limit=5, holdout=2)), str(folder / "polaris-easy"))
    assert resolve_system(CHAT, DataConfig(source=str(folder / "polaris-easy")))[1] == "xml", "which it was prepared for"


def test_a_template_that_writes_the_day_s_date_is_told_before_the_run(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dated = (  # as Llama 3.2's
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}Today Date: {{ date_string }}\n"
    )
    settings = tiny_config(folder, write_sums(tmp_path / "sums.jsonl"))
    for template, notes in ((TEMPLATE, 0), (dated + TEMPLATE, 1)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        found = prepare(settings, {"letters": lower_case_share}).notes
        assert sum("begin it with {%- set date_string" in note for note in found) == notes
    tokenizer.chat_template = "{%- set date_string = '26 Jul 2024' -%}" + dated + TEMPLATE
    assert "Today Date: 26 Jul 2024\n" in render(problem("?"), tokenizer, CHAT, None).text, "the remedy works"
    tokenizer.chat_template = dated.replace("date_string", "now") + TEMPLATE
    assert "write a date in place of strftime_now" in str(note_on_date(tokenizer, CHAT))
    assert note_on_date(tokenizer, PromptConfig(style="plain")) is None


def test_a_place_that_the_prompts_do_not_ask_for_is_told_before_the_run(tmp_path: Path) -> None:
    folder, data = write_tiny_llama(tmp_path / "model"), tmp_path / "sums.jsonl"
    system = {"role": "system", "content": "Put the final answer in \\boxed{}."}
    rows = [{"prompt": [system, {"role": "user", "content": f"{a} + 2?"}], "answer": str(a + 2)} for a in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def notes(chosen: str) -> list[str]:
        found = prepare(tiny_config(folder, data, prompt={"system": chosen}), {"letters": lower_case_share}).notes
        return [note for note in found if "is looked for" in note]

    (told,) = notes("auto")
    assert told == (
        "prompts ask for the answer by \\boxed, but it is looked for by <answer>, so a right one counts as wrong: set "
        "prompt.system=boxed."
    )
    assert notes("none") == [told]
    assert notes("boxed") == []


def test_a_system_prompt_with_several_places_is_told_before_the_run(tmp_path: Path) -> None:
    folder, data = write_tiny_llama(tmp_path / "model"), write_sums(tmp_path / "sums.jsonl")
    several = "Use \\boxed{} or <answer>."
    told = "prompt.system mentions \\boxed and <answer>: answers are looked for by \\boxed."
    assert told in prepare(tiny_config(folder, data, prompt={"system": several}), {"letters": lower_case_share}).notes
    assert inspect_source(DataConfig(source=str(data)), PromptConfig(system=several), None)["notes"] == [told]
    assert [note_on_places(PromptConfig(system=text)) for text in ("xml", "boxed", "End with #### 5.")] == [None] * 3


@pytest.mark.parametrize(
    ("texts", "style", "remedy"),
    [
        (["Use <answer> tags.", "Write <answer>."], "boxed", "set prompt.system=xml."),
        (["End with #### 5.", "End with #### 6."], "xml", "set a prompt.system that mentions ####."),
        (["Use <answer> tags.", "5 + 5?"], "boxed", None),
        (["Use \\boxed{}, not <answer>."], "xml", None),
        (["5 + 5?"], "boxed", None),
        ([], "xml", None),
    ],
)
def test_only_what_all_prompts_ask_for_is_another_place(texts: list[str], style: Any, remedy: str | None) -> None:
    told = note_on_place([Prompt(problem("?"), text, ()) for text in texts], style)
    assert (told is None) if remedy is None else told.endswith(remedy)  # type: ignore[union-attr]


def test_options_that_no_prompt_shows_are_told() -> None:
    options = ["four", "five"]
    for name in ("choices", "options"):
        asked = problem("2 + 2?", **{name: options})
        assert f"the column {name!r}, which prompts do not show" in str(note_on_options(Prompt(asked, "2 + 2?", ())))
        assert note_on_options(Prompt(asked, "2 + 2? A: four B: five", ())) is None
    spaced = problem("2 + 2?", options=["A)four ", "B)five", {"label": "C"}])
    assert note_on_options(Prompt(spaced, "2 + 2? A) four B) five", ())) is None
    assert note_on_options(Prompt(problem("2 + 2?", options="A to D"), "2 + 2?", ())) is None


def test_system_prompts_are_short(qwen_tokenizer: Any) -> None:
    # Every sampled and trained prompt pays for each of these tokens.
    assert all(len(qwen_tokenizer(text)["input_ids"]) <= 30 for text in SYSTEM_PROMPTS.values())


def test_worked_completions() -> None:
    gsm8k = problem("?", solution="48/2 = <<48/2=24>>24 clips.\nSo 42.\n#### 42")
    assert worked_completion(gsm8k, "xml") == "<reasoning>\n48/2 = 24 clips.\nSo 42.\n</reasoning>\n<answer>\n42\n</answer>"
    assert worked_completion(gsm8k, "boxed") == "48/2 = 24 clips.\nSo 42.\n\\boxed{42}"
    assert worked_completion(gsm8k, "plain") == "48/2 = 24 clips.\nSo 42.\n#### 42"
    assert worked_completion(problem("?", solution="It is $\\boxed{42}$."), "boxed") == "It is $\\boxed{42}$."
    assert worked_completion(problem("?"), "xml") == "<answer>\n42\n</answer>"
    thousands = Problem("", "?", "1042", {"solution": "So 1,042.\n#### 1,042"})
    assert worked_completion(thousands, "plain") == "So 1,042.\n#### 1042"


@pytest.mark.parametrize(
    "solution", ["#### Solution\n6 x 7 = 42", "#### Step 1\n6 x 7\n#### Step 2\nSo 42.", "1 << 3; y = 16 >> 2\n1 << 3 == 16 >> 1"]
)
def test_headings_and_bit_shifts_of_a_solution_stay(solution: str) -> None:
    worked = problem("?", solution=solution)
    assert worked_completion(worked, "xml") == f"<reasoning>\n{solution}\n</reasoning>\n<answer>\n42\n</answer>"
    assert worked_completion(worked, "plain") == solution.replace("#### ", "") + "\n#### 42", "where #### marks the answer alone"
    assert worked_expressions(worked) == []


@pytest.mark.parametrize(
    ("solution", "style", "target"),
    [
        ("<reasoning>6 x 7</reasoning><answer>42</answer>", "xml", "<reasoning>\n6 x 7\n</reasoning>\n<answer>\n42\n</answer>"),
        ("6 x 7. <answer>42</answer>", "xml", "<reasoning>\n6 x 7.\n</reasoning>\n<answer>\n42\n</answer>"),
        (r"So $\boxed{42 \text{ cm}}$", "boxed", "So $42 \\text{ cm}$\n\\boxed{42}"),
        (r"\boxed{\frac{4}{2}} or \boxed{42}", "boxed", "\\frac{4}{2} or 42\n\\boxed{42}"),
    ],
)
def test_a_solution_in_a_form_already_is_taught_in_the_form_asked_for(solution: str, style: Any, target: str) -> None:
    assert worked_completion(problem("?", solution=solution), style) == target
    assert is_well_formed(target, style)


def test_worked_completions_earn_full_marks(shared_data: Path) -> None:
    gsm8k = load_problems(DataConfig(source=str(shared_data / "gsm8k"), limit=300)).train
    made = generate(DataConfig().arithmetic, 100, 0, "train")
    for item in (*gsm8k, *made):
        for style in ("xml", "boxed", "plain"):
            verdict = grade(worked_completion(item, style), item.answer, style)  # type: ignore[arg-type]
            assert verdict.exact
            assert verdict.strict


def test_gsm8k_s_marks_are_what_the_calculator_computes(shared_data: Path) -> None:
    """Its result is the one that the row has, in the mark and in the text."""
    marked = 0
    for row in load_problems(DataConfig(source=str(shared_data / "gsm8k"), limit=500)).train:
        results = re.findall(r"=([^<>=]*)>>", row.columns["solution"])
        assert [float(calculator(one)) for one in worked_expressions(row)] == [pytest.approx(float(r), rel=0.02) for r in results]
        marked += len(results)
    assert marked > 1000
    assert worked_expressions(problem("?", expression="6 * 7", solution="<<1+1=2>>")) == ["6 * 7"]
    assert worked_expressions(problem("?")) == []


def test_long_prompts() -> None:
    prompts = [Prompt(Problem(f"p:{n}", "?", "1"), "", (0,) * n) for n in (3, 9, 5, 12)]
    assert drop_long_prompts(prompts, 12) == (prompts, 0)
    assert drop_long_prompts(prompts, 5, "drop") == ([prompts[0], prompts[2]], 2)
    with pytest.raises(DataError, match=r"problem p:9 has 9 tokens, more than the 5 allowed \(2 such prompts, the longest 12\)"):
        drop_long_prompts(prompts, 5, "error")
    with pytest.raises(DataError, match="every prompt is longer than the 2 tokens"):
        drop_long_prompts(prompts, 2, "drop")
