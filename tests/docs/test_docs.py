"""What the pages say is so: commands parse, settings and metrics exist, snippets load and import, links and files resolve."""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
import yaml

from groupwise.cli import app
from groupwise.cli.plan import plan_of
from groupwise.config import build_config, dump_config, explain, load_config, recipes
from groupwise.config.algorithm import AlgorithmConfig
from groupwise.config.fields import schema_path
from groupwise.config.formula import in_words
from groupwise.config.presets import PRESETS
from groupwise.data.sources import load_problems
from groupwise.rewards import builtin_rewards
from groupwise.rewards.load import OFFERED
from groupwise.tracking import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXPECTED = {"README.md", "CONTRIBUTING.md", "architecture.md", "algorithms.md", "configuration.md", "data.md", "rewards.md"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w/])(?:src|tests|docs|scripts|benchmarks)/[\w./-]+\.(?:py|md|yaml)\b")
TABLE_NAME = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
REVISION = re.compile(r"\b(?=\d*[a-f])[0-9a-f]{7,8}\b")
REVISIONS_OF_OTHERS = {"f2cd577", "685de41"}
"""Of TRL and OpenEnv."""
SETTING = re.compile(r"`((?:[a-z_]+\.)+[a-z_]+)(?:: [^`]*|=[^`]*)?`")


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def snippets(language):
    found = [(p.name, text) for p in PAGES for kind, text in FENCE.findall(p.read_text(encoding="utf-8")) if kind == language]
    return [pytest.param(text, id=f"{name}-{i}") for i, (name, text) in enumerate(found)]


def command_lines():
    """Every ``groupwise ...`` line of a shell block and every one in backticks that is longer than the bare word."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        shell = [line for kind, block in FENCE.findall(text) if kind == "sh" for line in block.splitlines()]
        inline = re.findall(r"`(groupwise [^`]+)`", FENCE.sub("", text))
        found += [(path.name, line) for line in [*shell, *inline] if line.startswith("groupwise ")]
    return [pytest.param(line, id=f"{name}: {line[:60]}") for name, line in dict.fromkeys(found)]


def section_of(text, heading):
    return re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def anchor(heading):
    """As code hosts make it: lower case, punctuation gone, spaces become hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_pages_are_there():
    assert {p.name for p in PAGES} >= EXPECTED


@pytest.mark.parametrize("line", command_lines())
def test_commands_parse_and_their_settings_are_real(line):
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    if not words:  # a mention, not a line to type
        return
    made = command.make_context("groupwise", list(words))
    overrides = made.params.get("overrides") or [word for word in made.params.get("words", ()) if "=" in word]
    assert all("=" in word for word in overrides), overrides
    source = made.params.get("source")
    if command.name == "inspect":
        overrides = [f"data.source={source}", *overrides]  # as the command has it
    if made.params.get("device_map"):
        overrides = [f"model.device_map={made.params['device_map']}", *overrides]
    shipped = {recipe.name for recipe in recipes()}
    if command.name == "train":
        assert source in shipped or source.endswith(".yaml"), source
    if command.name == "config" and made.params["field"] not in (None, "NAME"):
        assert any(schema_path(made.params["field"]) in doc.path for doc in explain())
    load_config(source if source in shipped else None, overrides)


def unquoted(line):
    """What a shell reads as a pattern: zsh, the shell of macOS, ends a command where no file fits it."""
    return re.findall(r"\S*[\[{*]\S*", re.sub(r"'[^']*'|\"[^\"]*\"", "", line.partition(" #")[0]))


@pytest.mark.parametrize("line", command_lines())
def test_brackets_and_braces_of_commands_are_quoted(line):
    assert unquoted(line) == []


def test_brackets_and_braces_of_examples_in_help_texts_are_quoted():
    helps = script_of("write_cli_docs").commands(typer.main.get_command(app), "groupwise")
    examples = [line for _, text in helps for line in re.findall(r"^    (groupwise .*)$", text, flags=re.MULTILINE)]
    assert len(examples) > 20
    assert [line for line in examples if unquoted(line)] == []


def test_a_pattern_outside_quotes_is_found():
    assert unquoted("groupwise eval x evaluation.modes=[sampled]  # [a]") == ["evaluation.modes=[sampled]"]
    assert unquoted("""groupwise train a.yaml 'model.lora={rank: 8}' "data.limit=[1]" """) == []


def arguments_of(line):
    """The options and arguments of a line of ``groupwise plan``, as ``plan_of`` takes them."""
    command = typer.main.get_command(app).commands["plan"]
    words = [word for word in shlex.split(line, comments=True)[2:] if word not in ("--formulas", "--json")]
    given = command.make_context("plan", words).params
    return {name: value for name, value in given.items() if name not in ("formulas", "as_json")}


OF_A_CARD = [p for p in command_lines() if re.match(r"groupwise plan .*--(hardware|gpu-memory)", p.values[0])]
TOO_LARGE = "groupwise plan polaris-3b --hardware a100-40gb "
"""A page's example of a plan that suggests what would fit."""


def test_one_page_shows_a_plan_that_does_not_fit():
    assert sum(line.values[0].startswith(TOO_LARGE) for line in OF_A_CARD) == 1


@pytest.mark.parametrize("line", OF_A_CARD)
def test_what_a_page_plans_for_a_card_fits_it(line):
    made = plan_of(**arguments_of(line))
    assert made.fits != line.startswith(TOO_LARGE), (made.peak.name, made.peak.bytes / 2**30, made.limit_bytes / 2**30)


def test_the_adapter_on_cards_of_24_gb_is_trained_as_it_is_planned():
    text = section_of(page("docs/how-to/distributed.md"), "An adapter on a divided base")
    (planned,) = re.findall(r"^groupwise plan .*--hardware rtx-4090.*$", text, flags=re.MULTILINE)
    (trained,) = re.findall(r"^groupwise train .*$", text, flags=re.MULTILINE)
    given = arguments_of(planned)
    assert f"train {given['source']} --num-processes {given['world_size']} " in trained
    assert set(given["overrides"]) <= set(shlex.split(trained))


def test_make_clean_leaves_what_first_light_wrote():
    (lines,) = re.findall(r"^clean:.*\n((?:\t.*\n)+)", page("Makefile"), flags=re.MULTILINE)
    removed = [word for word in lines.split() if word.startswith("build")]
    assert removed
    assert not any(fnmatch(place, f"{word}*") for word in removed for place in ("build/first-light", "build/first-light-bundle"))


@pytest.mark.parametrize("text", snippets("yaml"))
def test_settings_in_snippets_load(text):
    config = build_config(yaml.safe_load(text))
    assert build_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize("text", snippets("python"))
def test_python_snippets_compile_and_import_what_exists(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "groupwise":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(alias.name) for alias in node.names)


def snippet_functions(name):
    space, files = {}, [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    for kind, text in FENCE.findall(page(name)):
        if text in files:  # run as files by tests/cli/test_reward_examples.py
            continue
        tree = ast.parse(text) if kind == "python" else ast.Module([], [])
        kept = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ImportFrom | ast.Assert | ast.Assign)]
        kept = [n for n in kept if not (isinstance(n, ast.ImportFrom) and f"# {n.module}.py" in page(name))]
        tree.body = [n for n in kept if not any(isinstance(x, ast.Name) and x.id == "train" for x in ast.walk(n))]
        exec(compile(tree, name, "exec"), space)
    return space


def test_reward_functions_of_the_pages_work_and_assertions_hold():
    chat = [[{"role": "assistant", "content": "please " * 100}], [{"role": "assistant", "content": ""}]]
    assert snippet_functions("docs/how-to/rewards.md")["polite"](prompts=["?", "?"], completions=chat) == [0.5, 0.0]
    assert snippet_functions("README.md")["brief"](completions=chat) == [-0.7, 0.0]


def test_files_that_readme_s_settings_name_are_shown_and_run_nothing():
    text = page("README.md")
    for file, function in re.findall(r"function: (\w+\.py):(\w+)", text):
        (shown,) = [block for kind, block in FENCE.findall(text) if kind == "python" and block.startswith(f"# {file}\n")]
        assert [(type(node), node.name) for node in ast.parse(shown).body] == [(ast.FunctionDef, function)]


def test_the_keywords_and_fields_that_python_snippets_use_exist():
    from groupwise import RunResult, StepReport, train

    used = set(re.findall(r"(?:train\([^()]*?|, )(rewards|on_step|run_folder|resume)=", page("README.md")))
    assert used == {"rewards", "on_step", "run_folder", "resume"}
    assert used <= set(inspect.signature(train).parameters)
    assert set(re.findall(r"(?<!/)report\.(\w+)", page("README.md"))) <= {f.name for f in fields(StepReport)}
    assert set(re.findall(r"result\.(\w+)", page("README.md"))) <= {f.name for f in fields(RunResult)}
    assert set(re.findall(r'metrics\.get\("([^"]+)"', page("README.md"))) <= set(METRICS)


def fallen_rows(text):
    """Rows of tables under no head: a blank line, or a missing one, has cut them off."""
    lines = FENCE.sub("", text).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("|") and (i == 0 or not lines[i - 1].startswith("|"))]
    lines.append("")
    return [lines[i] for i in starts if not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+\s*", lines[i + 1])]


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "benchmarks").glob("*.md"))], ids=lambda p: p.name)
def test_no_row_falls_off_its_table(path):
    assert fallen_rows(path.read_text(encoding="utf-8")) == []


def test_a_row_that_fell_off_its_table_is_found():
    table = "| a | b |\n|---|:-:|\n| 1 | 2 |\n| 3 | 4 |\n"
    assert fallen_rows(f"x\n\n{table}\ny\n") == fallen_rows("```\n| 1 |\n```\n") == []
    assert fallen_rows(table.replace("| 3", "\n| 3")) == ["| 3 | 4 |"]
    assert fallen_rows(table.replace("|---", "\n|---")) == ["| a | b |", "|---|:-:|"]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_and_named_files_resolve(path):
    text = path.read_text(encoding="utf-8")
    for link in LINK.findall(FENCE.sub("", text)):
        target, _, fragment = link.partition("#")
        if re.match(r"https?:", link):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        if fragment:
            assert fragment in [anchor(h) for h in re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)], link
    for name in NAMED.findall(text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_settings_in_backticks_exist(path):
    known = {doc.path for doc in explain()}
    sections = {doc.path.split(".")[0] for doc in explain()}
    suffixes = ("py", "yaml", "json", "jsonl", "md", "toml", "name", "safetensors")
    for setting in SETTING.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if setting.split(".")[0] in sections and not setting.endswith(tuple("." + s for s in suffixes)):
            assert setting in known or any(one.startswith(setting + ".") for one in known), setting


def test_what_the_tutorial_resumes_is_a_run_that_was_stopped():
    """A finished run is left as it is: the one before it must be of the same folder, and is stopped there."""
    commands = [line for line in page("docs/tutorials/first-run.md").splitlines() if line.startswith("groupwise train")]
    (place,) = [i for i, line in enumerate(commands) if line.endswith(" --resume")]
    assert commands[place] == f"{commands[place - 1]} --resume"
    folder = re.search(r"--run-folder (\S+)", commands[place])[1]
    assert sum(folder in line for line in commands) == 2


def test_make_targets_and_recipes_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), flags=re.MULTILINE))
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets, path.name
    assert set(TABLE_NAME.findall(page("docs/reference/recipes.md"))) == {recipe.name for recipe in recipes()}


def test_the_table_of_recipes_has_their_batches():
    for name, batch in re.findall(r"^\| `([^`]+)` \|.*\| (\d+ x \d+) \|", page("docs/reference/recipes.md"), flags=re.MULTILINE):
        rollout = load_config(name).rollout
        assert batch == f"{rollout.prompts_per_step} x {rollout.completions_per_prompt}", name


def test_the_quickstart_is_what_the_readme_says():
    config, text = load_config("quickstart"), page("README.md")
    assert f"{config.warm_start.steps} supervised steps" in text
    rollout = config.rollout
    said = f"{config.training.steps} steps of {rollout.prompts_per_step} problems x {rollout.completions_per_prompt} completions"
    assert said in text
    assert f"{config.evaluation.problems} held-out problems" in text
    assert config.data.arithmetic.operations == ["+", "x"]
    assert config.data.arithmetic.steps == 1
    assert f"numbers up to {config.data.arithmetic.largest_number}" in text
    problems = load_problems(config.data)
    asked = [{problem.columns["expression"] for problem in part} for part in (problems.train, problems.held_out)]
    assert "(7 + 5 is held out, 5 + 7 is not)" in text
    assert not asked[0] & asked[1]
    assert "7 + 5" in asked[1]
    assert "5 + 7" in asked[0]
    assert config.evaluation.temperature == 1.0
    assert f"one answer of at most {config.rollout.max_completion_tokens} tokens to each" in text
    assert (config.evaluation.samples, config.evaluation.shots, config.prompt.style) == (1, 0, "chat")
    assert config.evaluation.modes[0] == "sampled"
    shown = re.search(r"<!-- quickstart-output -->\n```text\n(.+?)\n```\n(.+)<!-- /quickstart-output -->", text, re.DOTALL)
    assert shown
    assert f"{config.evaluation.problems} held-out problems" in shown[1], "the output is that of the recipe as it is"


def test_the_first_screen_shows_what_was_measured():
    text, results = page("README.md"), page("benchmarks/RESULTS.md")
    shown = re.search(r"<!-- quickstart-output -->\n```text\n(.+?)\n```", text, re.DOTALL)[1]
    picture = re.findall(r">([\d.]+%)<", page("docs/screenshots/before-after.svg"))
    stages = [
        re.search(rf"^{stage} +(\S+)", shown, flags=re.MULTILINE)[1] for stage in ("base", "after warm start", "after GRPO")
    ]
    assert picture == stages
    step, peak = (
        r"\| whole step \| (\S+) s \| (\S+) s \| \*\*(\S+)\*\*",
        r"\| peak memory of the process \| (\S+) GiB \| (\S+) GiB",
    )
    ours, theirs, ratio, gib, their_gib = re.findall(rf"{step}.*?{peak}", results, re.DOTALL)[-1]
    assert f"[{ratio} times as fast]" in text
    assert f"{float(ours):.1f} s instead of {theirs} s" in text
    assert float(gib) < float(their_gib) / 2
    assert f"{float(gib):.1f} GiB instead of {float(their_gib):.1f} GiB" in text
    by_generate, by_vllm = re.findall(
        r"^\| 32 \| [\d,]+ \| [\d,]+ \| \*\*(\S+)\*\* \| [\d,]+ \| \*\*(\S+)\*\*", results, flags=re.MULTILINE
    )[-1]
    assert re.search(rf"\| \[{by_generate}\]\(\S+\) \| \[{float(by_vllm):.1f}\]\(", text)


def test_the_first_screen_s_numbers_have_their_command_machine_and_date():
    screen = page("README.md").split("## Install and run")[0]
    figures = re.findall(r"\[([\d.][^\]]*)\]\(benchmarks/RESULTS.md#[^)]+\)(?:: ([^|]+) \|)?", screen)
    assert len(figures) == 9
    traced = re.findall(
        r"^\| (.+?) \| (.+?) \| (.+?) \| .+ \|$",
        section_of(page("benchmarks/RESULTS.md"), "Which machine has which number"),
        flags=re.MULTILINE,
    )
    for words, more in figures:
        (source,) = [row for row in traced if f"{words}: {more}" in row[0] or (not more and words in row[0].split(", "))]
        assert "python -m benchmarks." in source[1]
        assert re.search("(EPYC|Xeon), [0-9a-f]{7,8}, [0-9]{4}-[0-9]{2}-[0-9]{2}", source[2])


def test_every_metric_is_explained_as_the_table_has_it():
    section = section_of(page("docs/reference/algorithms.md"), "Metrics")
    rows = dict(re.findall(r"^- `([^`]+)` (.*)$", section, flags=re.MULTILINE))
    assert rows == {name: f"({unit}): {meaning}" for name, (unit, meaning) in METRICS.items()}, (
        "change src/groupwise/tracking/metric_table.py, then the page"
    )


def test_metrics_that_pages_name_exist():
    rooms = "|".join(sorted({name.split("/")[0] for name in METRICS}))
    for path in PAGES:
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        named = set(re.findall(rf"`((?:{rooms})/[a-z_0-9]+)`", text))
        assert named <= set(METRICS), path.name


def test_presets_are_those_of_the_config():
    rows = re.findall(
        r"^\| \[`([^`]+)`\]\(algorithms/(.+)\.md\) \| (.*) \|$", page("docs/reference/algorithms.md"), flags=re.MULTILINE
    )
    words = {name: [preset.paper, *in_words(AlgorithmConfig(preset=name)).values()] for name, preset in PRESETS.items()}
    assert [(name, file, cells.split(" | ")) for name, file, cells in rows] == [(name, name, row) for name, row in words.items()]


def test_rewards_and_their_keywords_are_those_of_the_code():
    text = page("docs/how-to/rewards.md")
    assert set(TABLE_NAME.findall(section_of(text, "Built in"))) == set(builtin_rewards())
    assert set(TABLE_NAME.findall(section_of(text, "Your own"))) == set(OFFERED)


def test_names_of_the_glossary_are_settings():
    leaves = {doc.leaf for doc in explain()}
    words = section_of(page("docs/reference/glossary.md"), "Names of the same thing")
    named = [word for cell in re.findall(r"^\| (`.*?) \|", words, flags=re.MULTILINE) for word in re.findall(r"`([\w.]+)`", cell)]
    assert {word for word in named if "." not in word} <= leaves
    assert {f"algorithm.{word}" for word in named if "." in word} <= {doc.path for doc in explain()}
    assert len(named) >= 7


def script_of(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    return script


def test_hours_to_published_accuracies_are_for_as_many_completions_as_were_published():
    """Batches, and completions of each. verl's 7B: 105 of 1,024 x 5, as the page of recipes says."""
    published = [(116, 64 * 5), (290, 256 * 4), (290, 256 * 4), (140, 1024 * 5), (105, 1024 * 5)]
    script = script_of("write_plan_docs")
    for (title, steps, _, words), (batches, size) in zip(script.TARGETS, published, strict=True):
        rollout = script.made(words).setup.config.rollout
        assert steps * rollout.prompts_per_step * rollout.completions_per_prompt == batches * size, title


def test_the_page_of_plans_is_current_and_has_every_recipe():
    script = script_of("write_plan_docs")
    assert page("docs/reference/plans.md") == script.render(), "run python scripts/write_plan_docs.py"
    assert {setup.words.split()[0] for setup in script.SETUPS} == {recipe.name for recipe in recipes()}


def test_the_page_of_the_command_line_is_current():
    script = script_of("write_cli_docs")
    assert page("docs/reference/cli.md") == script.render(), "run python scripts/write_cli_docs.py"


def words_shown(source):
    """The strings of a module but for the docstrings of modules, classes and functions, which no user is shown."""
    tree = ast.parse(source)
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    return [
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docstrings
    ]


def test_messages_name_no_file_that_a_wheel_lacks():
    shipped = [path for path in (ROOT / "src" / "groupwise").rglob("*") if path.suffix in (".py", ".yaml")]
    for path in shipped:
        text = path.read_text(encoding="utf-8")
        for words in words_shown(text) if path.suffix == ".py" else [text]:
            assert not re.search(r"\bdocs/[\w./-]+\.md", words), f"{path.name}: {words}"
    for name, text in script_of("write_cli_docs").commands(typer.main.get_command(app), "groupwise"):
        assert "docs/" not in text, name
    assert [doc.path for doc in explain() if re.search(r"docs/.*\.md", doc.description)] == []


def test_the_dockerfile_copies_what_is_there():
    named = [name for line in re.findall(r"^COPY (.*)$", page("Dockerfile"), flags=re.MULTILINE) for name in line.split()[:-1]]
    assert {"src", "pyproject.toml", "constraints.txt"} <= set(named)
    assert all((ROOT / name).exists() for name in named)
    assert set(named) <= {line.removeprefix("!") for line in page(".dockerignore").split()}


def test_what_runs_in_a_container_is_not_its_first_process():
    shown = re.findall(r"docker run .*", page("Dockerfile"))
    assert shown
    assert all(line.startswith("docker run --init ") for line in shown)


def test_the_types_checked_do_not_depend_on_optional_packages():
    """Packages of the extras that developers do not install are skipped by mypy; else `make lint` differs where one is there."""
    project = tomllib.loads(page("pyproject.toml"))
    extras = {
        extra: {re.match(r"[\w-]+", package)[0] for package in packages}
        for extra, packages in project["project"]["optional-dependencies"].items()
    }
    (skipped,) = [table["module"] for table in project["tool"]["mypy"]["overrides"] if table.get("follow_imports") == "skip"]
    known = {"mkdocs-material": "mkdocs", "mkdocstrings": "griffe"}
    further = set().union(*extras.values()) - extras["dev"]
    assert {known.get(package, package) for package in further} <= {name.removesuffix(".*") for name in skipped}


def test_the_tables_of_scale_are_the_planner_s():
    assert page("docs/explanation/scale.md") == script_of("write_scale_docs").render(page("docs/explanation/scale.md")), (
        "run python scripts/write_scale_docs.py"
    )


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_says_for_whom_it_is_how_to_start_it_and_what_to_expect(recipe):
    comment = [line for line in recipe.path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    words = re.findall(r"^# ([A-Z][a-z ]+):", "\n".join(comment), flags=re.MULTILINE)
    assert {"For whom", "Hardware", "Start", "Expect"} <= set(words)
    starts = [line for line in comment if re.search(r"groupwise train ", line)]
    assert all(f"train {recipe.name}" in line for line in starts)
    assert starts
    for file in re.findall(r"launch/[\w.-]+", "\n".join(comment)):
        assert (ROOT / file).exists(), file


def test_revisions_that_pages_name_are_in_the_history():
    """A word of digits alone may be a size."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()

    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("the history is not here")
    known = {commit[:length] for commit in git("rev-list", "HEAD") for length in (7, 8)} | REVISIONS_OF_OTHERS
    measured = [page for folder in ("benchmarks", "experiments") for page in (ROOT / folder).glob("*.md")]
    named = [(p.name, word) for p in (*PAGES, *measured) for word in REVISION.findall(p.read_text(encoding="utf-8"))]
    assert len(named) > 100
    assert [(name, word) for name, word in named if word not in known] == []


def test_the_page_of_settings_is_current():
    script = script_of("write_config_docs")
    assert page("docs/reference/configuration.md") == script.render(), "run python scripts/write_config_docs.py"
    for doc in explain():
        assert f"- `{doc.leaf}:" in script.render()


def test_the_table_of_named_data_sets_is_that_of_the_code():
    from groupwise.data.named import NAMED

    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \| (\w+) \| ([\d,]+) \| (.*) \|$", page("docs/how-to/data.md"), flags=re.MULTILINE)
    known = [(name, one.hub, one.eval_split, f"{one.rows:,}", one.about) for name, one in NAMED.items()]
    assert rows == known


def test_the_lock_has_what_groupwise_needs_in_the_pinned_versions_with_digests():
    """But PyTorch, which each machine has in a build of its own, and what comes with that."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    def entries(name):
        text = re.sub(r"^#.*$|\\\n", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
        rows = [line.split(" --hash=") for line in text.splitlines() if line.strip()]
        found = [(Requirement(row[0].strip()), [part.strip() for part in row[1:]]) for row in rows]
        return {canonicalize_name(row.name): (str(row.specifier), digests) for row, digests in found}

    def needed(name):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found = [Requirement(text) for text in (project["dependencies"] if name == "groupwise" else requires(name) or [])]
        return {canonicalize_name(row.name) for row in found if row.marker is None or row.marker.evaluate({"extra": ""})}

    lock, pins = entries("requirements.lock"), entries("constraints.txt")
    assert all(digests and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in digests) for _, digests in lock.values())
    assert {name: lock[name][0] for name in lock.keys() & pins.keys()} == {
        name: pins[name][0] for name in lock.keys() & pins.keys()
    }
    of_torch = needed("torch") | {"torch"}
    missing, left = set(), [*needed("groupwise") - of_torch]
    seen = set(left)
    while left:
        name = left.pop()
        missing |= {name} - lock.keys()
        left += needed(name) - of_torch - seen
        seen |= needed(name)
    assert not missing, "run scripts/write_lock.py"
