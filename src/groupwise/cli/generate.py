"""``groupwise generate``: one answer, one per line of standard input, or a conversation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from groupwise.cli.options import DeviceMap, Model, NumProcesses, TrustRemoteCode, check_device_map, start_processes

if TYPE_CHECKING:
    from groupwise.chat import Speaker

__all__ = ["converse", "generate"]

WELCOME = "Type a question and press Enter. /new forgets the conversation, /exit or Ctrl-D leaves."
SHORT_OF_MEMORY = "lower --max-tokens, ask a shorter question, or take a smaller model"


def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The question. Without it you chat, or lines are read.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", help="System prompt: a text, xml, boxed or none. Else the one it was trained with."),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="1 is the model itself, 0 is greedy.")] = 1.0,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Longest answer; else what the run trained it with, or 512."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same answer.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    num_processes: NumProcesses = 1,
) -> None:
    """Let a model answer: one PROMPT, each line of standard input, or, in a terminal, a conversation.

    \b
    Examples:
      groupwise generate runs/quickstart-1/final_model
      groupwise generate smollm2-135m-instruct "Why is the sky blue?" --greedy --max-tokens 100
      groupwise generate my-model --num-processes 8 < questions.txt > answers.txt
    """
    from groupwise.distributed import open_world, world_size
    from groupwise.errors import ConfigError

    check_device_map(device_map, num_processes)
    many = num_processes > 1 or world_size() > 1
    if many and (prompt is not None or sys.stdin.isatty()):
        raise ConfigError("several processes divide lines of standard input, and there are none: give them, or start one process")
    start_processes(num_processes)
    from groupwise.chat import answer_lines, answer_lines_together, make_speaker, settings_to_ask
    from groupwise.models.embedded import fetch_model
    from groupwise.training.short_memory import explain_short_memory

    options = [f"model.device_map={device_map}"] if device_map else []
    options += ["model.trust_remote_code=true"] if trust_remote_code else []
    config, longest = settings_to_ask(model, options, system=system, max_tokens=max_tokens)
    fetch_model(config.model)
    short = explain_short_memory(remedy=SHORT_OF_MEMORY)
    if many:
        from groupwise.models.load import resolve_device

        with open_world(resolve_device(config.model.device).type == "cpu", config.training.process_timeout_s) as world, short:
            lines = world.first_does(lambda: [line for line in sys.stdin if line.strip()])
            answer_lines_together(make_speaker(config, longest, temperature, greedy, seed), lines, sys.stdout, world)
        return
    with short:
        speaker = make_speaker(config, longest, temperature, greedy, seed)
        if prompt is not None:
            speaker.answer(prompt, sys.stdout)
        elif sys.stdin.isatty():
            converse(speaker, sys.stdout)
        else:
            answer_lines(speaker, sys.stdin, sys.stdout)


def converse(speaker: Speaker, out: TextIO) -> None:
    """A conversation in the terminal, until /exit or the end of input; Ctrl-C stops an answer."""
    out.write(f"{speaker.policy.name}. {WELCOME}\n")
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            out.write("\n")
            return
        if question == "/exit":
            return
        if question == "/new":
            speaker.forget()
            out.write("(a new conversation)\n")
        elif question:
            _turn(speaker, question, out)


def _turn(speaker: Speaker, question: str, out: TextIO) -> None:
    from groupwise.errors import ConfigError

    try:
        speaker.answer(question, out)
    except KeyboardInterrupt:
        out.write("\n(stopped)\n")
    except ConfigError as full:
        speaker.forget()
        out.write(f"({full}; the conversation was forgotten)\n")
