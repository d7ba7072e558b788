"""The application: its commands, and how errors leave it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from groupwise.cli import configuration, data, evaluate, models, plan, runs, train
from groupwise.errors import NO_WINDOWS, GroupwiseError
from groupwise.streams import keep_stdout, lost_output, make_output_safe

__all__ = ["app", "main"]

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

HELP = """Train language models with GRPO: sample a group of answers, score them, learn from the better ones.

\b
Start here:
  groupwise recipes                          what is ready to run
  groupwise train quickstart --dry-run       check everything, load no weights
  groupwise train quickstart                 a real run: five minutes on two CPU cores
  groupwise generate runs/NAME/final_model   talk to what came out

Any setting can be changed on the way, as in: groupwise train quickstart training.steps=10. `groupwise config` explains them all.
"""


class Door(TyperGroup):
    """Lets a user's mistake leave as one sentence and its exit code, and Ctrl-C as 130; GROUPWISE_DEBUG=1 shows the traceback.

    A name that no file may have, a path that may not be looked at, and a home folder that nobody has are told here, since every
    command looks for files of names that it is given.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GroupwiseError as error:
            if os.environ.get("GROUPWISE_DEBUG") == "1":
                raise
            if not error.told:
                from groupwise.tracking.text import message

                typer.echo(f"groupwise: {message(error)}", err=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if (said := _of_a_name(error)) is None or os.environ.get("GROUPWISE_DEBUG") == "1":
                raise
            typer.echo(f"groupwise: {said}", err=True)
            raise typer.Exit(2) from None
        except RuntimeError as error:
            if (path := _of_nobody(error)) is None or os.environ.get("GROUPWISE_DEBUG") == "1":
                raise
            home = path.partition(os.sep)[0]
            typer.echo(
                f"groupwise: {path!r} cannot be found, since no home folder of {home!r} is known: write the whole path",
                err=True,
            )
            raise typer.Exit(2) from None
        except Exception as error:
            if (
                type(error).__name__ != "NoSuchOption" or (written := _as_setting(error)) is None
            ):  # click's, which typer may bring itself
                raise
            option = error.option_name  # type: ignore[attr-defined]
            typer.echo(f"groupwise: {option} is no option: settings are written {written}, without dashes", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("\ngroupwise: stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None


def _of_a_name(error: OSError) -> str | None:
    """What to say where a name is too long for a file, or pathlib may not look at one."""
    if error.errno == errno.ENAMETOOLONG:
        name = max(str(error.filename).split(os.sep), key=len)
        return f"the name '{name[:40]}...' of {len(os.fsencode(name))} bytes is too long for a file: shorten it"
    if error.errno == errno.EACCES and _frame_in(error, Path.stat):
        return f"{str(error.filename)!r} cannot be looked at ({error.strerror}): name one that you may read"
    return None


def _of_nobody(error: RuntimeError) -> str | None:
    """The path whose `~name` is nobody's, where ``error`` is pathlib's of that; its message does not name it."""
    frame = _frame_in(error, Path.expanduser)
    return str(frame.f_locals["self"]) if frame else None


def _frame_in(error: BaseException, function: Callable[..., Any]) -> FrameType | None:
    """The frame in which ``error`` was raised, where that is one of ``function``, or called from it in C."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    frame = last.tb_frame if last is not None else None
    return frame if frame is not None and frame.f_code is getattr(function, "__code__", None) else None


def _as_setting(error: Any) -> str | None:
    """``--steps 3`` as it is written here, ``training.steps=3``; None where no setting is called so, or the command takes none."""
    from groupwise.config.fields import field_paths, suggest

    command = error.ctx.command if error.ctx else None
    if command is None or not any(parameter.name in ("overrides", "words") for parameter in command.params):
        return None
    name = error.option_name.lstrip("-").partition("=")[0].replace("-", "_")
    known = field_paths()
    paths = [path for path in (suggest(name) or ([name] if name in known else [])) if path in known]
    exact = name in known or any(path.rsplit(".", 1)[-1] == name for path in paths)
    if not paths or (error.possibilities and not exact):
        return None
    path = min(paths, key=lambda one: SECTION_ORDER.index(one.partition(".")[0]) if one.partition(".")[0] in SECTION_ORDER else 9)
    return f"{path}={_value_after(error.option_name)}"


SECTION_ORDER = ("training", "rollout", "optimizer", "model", "algorithm", "evaluation", "output", "data")
"""Which section is meant where several have a setting of one name."""


def _value_after(option: str) -> str:
    """What stands behind the option on the command line; a setting is quoted by whoever needs it."""
    words = sys.argv[1:]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option and following and not following.startswith("--"):
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return "VALUE"


app = typer.Typer(
    cls=Door,
    name="groupwise",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would swallow the brackets in examples
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from groupwise import __version__

        typer.echo(f"groupwise {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("train", short_help="Train a model by a recipe or a YAML file.")(train.train)
app.command("eval", short_help="Judge a model on held-out problems.")(evaluate.evaluate)
app.command("generate", short_help="Put a question to a model, or chat with it.")(models.generate)
app.command("serve", short_help="Serve a model to OpenAI's clients.")(models.serve)
app.command("merge", short_help="Make a whole model of an adapter.")(models.merge)
app.command("report", short_help="Write a page about one run or several.")(runs.report)
app.command("doctor", short_help="Diagnose a run, or its settings.")(runs.doctor)
app.command("plan", short_help="Say whether a run fits, and how long a step takes.")(plan.plan)
app.command("bench", short_help="Try a run for a few steps: memory and speed, beside the plan.")(plan.bench)
app.add_typer(data.app, name="data", short_help="Look at problems, and prepare them once.")
app.command("recipes", short_help="List the recipes that come with groupwise.")(configuration.recipes)
app.command("algorithms", short_help="List the published methods, or show one with its formula.")(configuration.algorithms)
app.command("config", short_help="Explain the settings of a run.")(configuration.config)


def main() -> None:
    """Entry point of the command ``groupwise``."""
    if sys.platform == "win32":
        typer.echo(f"groupwise: {NO_WINDOWS}", err=True)
        raise SystemExit(2)
    for stream in (sys.stdin, sys.stdout):
        # Questions, answers and JSON in files and pipes are UTF-8 whatever the locale.
        if hasattr(stream, "reconfigure") and not stream.isatty():
            stream.reconfigure(encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        # A terminal in a narrow encoding shows a replacement instead of stopping a run over one character.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    make_output_safe()  # `groupwise train ... | head` trains to the end
    try:
        app()
    except SystemExit as end:
        reason = lost_output()
        if "--json" in sys.argv[1:]:
            keep_stdout()  # what is said while the process ends is no part of the JSON
        if reason is None:
            raise
        typer.echo(f"groupwise: standard output cannot be written ({reason}): what was printed is incomplete", err=True)
        raise SystemExit(end.code or 1) from None
