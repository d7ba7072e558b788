"""``groupwise generate``, ``serve`` and ``merge``: a model answers here or at an address, and an adapter becomes a model."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from groupwise.cli.options import DeviceMap, Model, NumProcesses, TrustRemoteCode, check_device_map, start_processes

if TYPE_CHECKING:
    from groupwise.chat import Speaker
    from groupwise.config import Config

__all__ = ["converse", "generate", "merge", "serve"]

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
    if prompt is None and sys.stdin is None:
        raise ConfigError("standard input is closed, so that there is no question: give a PROMPT, or lines of standard input")
    many = num_processes > 1 or world_size() > 1
    if many and (prompt is not None or sys.stdin.isatty()):
        raise ConfigError("several processes divide lines of standard input, and there are none: give them, or start one process")
    from groupwise.chat import answer_lines, answer_lines_together, check_text, make_speaker, settings_to_ask
    from groupwise.models.embedded import fetch_model
    from groupwise.training.short_memory import explain_short_memory

    check_text(prompt or "", "the prompt")
    options = [f"model.device_map={device_map}"] if device_map else []
    options += ["model.trust_remote_code=true"] if trust_remote_code else []
    config, longest = settings_to_ask(model, options, system=system, max_tokens=max_tokens)
    fetch_model(config.model)
    start_processes(num_processes)  # now, so that a mistake is told once
    short = explain_short_memory(remedy=SHORT_OF_MEMORY)
    if many:
        from groupwise.models.load import resolve_device

        with open_world(resolve_device(config.model.device).type == "cpu", config.training.process_timeout_s) as world, short:
            lines = world.on_rank0(lambda: [line for line in _lines() if line.strip()])
            answer_lines_together(make_speaker(config, longest, temperature, greedy, seed), lines, sys.stdout, world)
        return
    with short:
        speaker = make_speaker(config, longest, temperature, greedy, seed)
        if prompt is not None:
            speaker.answer(prompt, sys.stdout)
        elif sys.stdin.isatty():
            converse(speaker, sys.stdout)
        else:
            answer_lines(speaker, _lines(), sys.stdout)


def _lines() -> Iterator[str]:
    """Of standard input. Raises ConfigError where it is not UTF-8."""
    from groupwise.errors import ConfigError

    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text ({error.reason}): save it as UTF-8") from error


def serve(
    model: Model,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; any but this machine's own needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="What clients call the model; else MODEL as it stands here.")] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", help="System prompt of conversations without one: a text, xml, boxed or none. Else the trained one."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Longest answer where a client names none; else as trained, or 512."),
    ] = None,
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model to OpenAI's clients: chat completions, streams, tools and log-probabilities, until Ctrl-C.

    The key is that of GROUPWISE_SERVE_KEY. Without one, this machine's own address needs none, and for any other a key is made and shown.

    \b
    Examples:
      groupwise serve runs/quickstart-1
      OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_agent.py
      GROUPWISE_SERVE_KEY=$(openssl rand -hex 32) groupwise serve my-model --host 0.0.0.0 --name mine
    """
    from groupwise.chat import settings_to_ask
    from groupwise.models.embedded import fetch_model
    from groupwise.serving import find_key, open_server

    key, made = find_key(host)
    options = [f"model.device_map={device_map}"] if device_map else []
    options += ["model.trust_remote_code=true"] if trust_remote_code else []
    config, longest = settings_to_ask(model, options, system=system, max_tokens=max_tokens, plays=False)
    fetch_model(config.model)
    server = open_server(config, longest, name or model, host, port, key)
    try:
        needs = "no key" if key is None else f"the key {key}" if made else "the key of GROUPWISE_SERVE_KEY"
        typer.echo(f"groupwise: {server.service.name} answers at {server.url}, with {needs}; Ctrl-C ends it", err=True)
        server.wait()
    finally:
        server.close()


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
    from groupwise.chat import check_text
    from groupwise.errors import ConfigError

    try:
        check_text(question, "the prompt")
    except ConfigError as unreadable:
        out.write(f"({unreadable})\n")
        return
    try:
        speaker.answer(question, out)
    except KeyboardInterrupt:
        out.write("\n(stopped)\n")
    except ConfigError as full:
        speaker.forget()
        out.write(f"({full}; the conversation was forgotten)\n")


def merge(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A run's folder, a checkpoint, or a folder with adapter_config.json.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written; it must not exist yet.")],
    base: Annotated[
        str | None, typer.Option("--base", help="The model under the adapter; else the one it was trained on.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Merge a LoRA adapter into its base, and write a normal model folder.

    A quantised base is dequantised; the result has the run's dtype and needs neither peft nor bitsandbytes.

    \b
    Examples:
      groupwise merge runs/qlora-1/checkpoints/step-40 step-40-merged
      groupwise merge somebodys-adapter merged --base Qwen/Qwen2.5-1.5B-Instruct
    """
    from groupwise.models.embedded import fetch_model
    from groupwise.models.load import load_policy, save_model

    out = out.expanduser()  # in quotes a shell leaves the tilde
    _check_out(out)
    folder = _adapter_in(adapter.expanduser())
    config = _settings(folder, base)
    config.model.trust_remote_code = trust_remote_code
    fetch_model(config.model)
    save_model(load_policy(config.model, adapter=folder), out)
    typer.echo(f"{config.model.name} with the adapter of {folder} is in {out}")


def _check_out(out: Path) -> None:
    """Raise ModelError where ``out`` exists, or no folder can be made there; leave nothing."""
    from groupwise.durable import try_folder
    from groupwise.errors import ModelError

    try:
        if out.exists():
            raise ModelError(f"{out} exists already: name a folder that does not")
        try_folder(out)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # the command says which name
            raise
        raise ModelError(
            f"{str(out)!r} cannot be written ({error.strerror}: {error.filename}): name a folder in one that can be"
        ) from error


def _adapter_in(path: Path) -> Path:
    """The folder with the adapter's own files."""
    from groupwise.errors import ModelError

    for place in (".", "adapter", "final_model/adapter", "model/adapter"):
        if (path / place / "adapter_config.json").is_file():
            return (path / place).resolve()
    raise ModelError(
        f"{path} holds no adapter (adapter_config.json): name a run with model.lora, a checkpoint of one, or an adapter's folder"
    )


def _settings(folder: Path, base: str | None) -> Config:
    """How the base is loaded: as the run did that made the adapter, else by the name that the adapter gives."""
    from groupwise.chat import run_of
    from groupwise.config import load_config
    from groupwise.config.load import load_run_config
    from groupwise.models.load import base_under

    run = run_of(folder, alone=True)
    if run is not None:
        config = load_run_config(run, ["model.lora=null"])
        same = not base or base == config.model.name
        return config if same else load_run_config(run, ["model.lora=null", "model.revision=null", f"model.name={base}"])
    name, revision = (base, None) if base else base_under(folder)
    return load_config(None, {"model.name": name, "model.revision": revision})
