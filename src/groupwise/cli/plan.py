"""``groupwise plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.config.schema import Config
    from groupwise.planner import Hardware, Plan

__all__ = ["plan", "plan_of", "show_plan"]

_GIB = 2**30


def plan(
    source: Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's name, or a YAML file.")],
    overrides: Overrides = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 24GiB.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", metavar="NAME", help="A device of the table, such as rtx-4090, a100-80gb, or cpu.")
    ] = None,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Processes, one device each.")] = 1,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=0, help="Longest prompt; `groupwise data inspect` counts them.")
    ] = 0,
    completion_tokens: Annotated[
        int, typer.Option("--completion-tokens", min=0, help="Expected mean length, for the time alone; by default the limit.")
    ] = 0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's rates instead of looking them up (2 s).")
    ] = False,
    formulas: Annotated[bool, typer.Option("--formulas", help="Show how each figure comes about.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say before a run whether it fits, what takes the memory, what would fit, and how long a step takes.

    From the model's config.json alone: no weights are loaded. Without --gpu-memory and --hardware it plans for this machine.

    \b
    Examples:
      groupwise plan quickstart
      groupwise plan gsm8k-1.5b-24gb --gpu-memory 24GiB
      groupwise plan gsm8k-7b-8gpu --hardware a100-80gb --world-size 8
      groupwise plan polaris-3b --hardware a100-40gb rollout.prompts_per_step=4 --formulas
      groupwise plan gsm8k-0.5b --hardware rtx-4090 --json

    Exit code 1 means that it does not fit, 2 that the settings contradict each other or cannot be run.
    """
    from groupwise.cli.show import console, print_json

    made = plan_of(source, overrides, gpu_memory, hardware, world_size, prompt_tokens, completion_tokens, measure)
    if as_json:
        print_json(made.to_json() | ({"formulas": {i.name: i.formula for i in made.formulas()}} if formulas else {}))
    else:
        show_plan(made, console(), formulas)
    if not made.fits:
        raise typer.Exit(1)


def plan_of(
    source: str,
    overrides: list[str] | None = None,
    gpu_memory: str | None = None,
    hardware: str | None = None,
    world_size: int = 1,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    measure: bool = False,
) -> Plan:
    """What the command shows, for the same words."""
    from dataclasses import replace

    from groupwise.config import load_config
    from groupwise.config.load import find_source
    from groupwise.planner import make_plan
    from groupwise.planner.hardware import choose_hardware, parse_bytes
    from groupwise.planner.hints import hints

    config = load_config(source, overrides or ())
    limit = parse_bytes(gpu_memory) if gpu_memory else None
    device = _measured(config, hardware) if measure else choose_hardware(config.model.device, hardware, limit)
    made = make_plan(
        config,
        device,
        limit_bytes=limit,
        world_size=world_size,
        prompt_tokens=prompt_tokens,
        mean_completion_tokens=completion_tokens,
    )
    by_size = limit is not None and hardware is None and not measure
    return replace(made, hints=tuple(hints(config, find_source(source), device, hardware, by_size, world_size)))


def _measured(config: Config, hardware: str | None) -> Hardware:
    from groupwise.errors import ConfigError
    from groupwise.planner import find_shape
    from groupwise.planner.hardware import measure

    if hardware not in (None, "cpu"):
        raise ConfigError(f"--measure looks at this machine and --hardware {hardware} at another: leave one of them out")
    shape = find_shape(config.model)
    device = hardware or config.model.device.partition(":")[0]
    return measure(device, shape.width, shape.feed_forward, config.training.threads)


def show_plan(made: Plan, out: Console, formulas: bool) -> None:
    from groupwise.cli.show import table
    from groupwise.planner.plan import LEGEND
    from groupwise.tracking.text import harmless

    setup, peak, cost = made.setup, made.peak, made.cost

    def say(text: str, style: str = "") -> None:
        out.print(harmless(text, style), soft_wrap=True)

    learning = f", {setup.trained:,} of them learn" if setup.adapted else ""
    say(f"{setup.config.model.name}: {setup.shape.parameters:,} weights{learning}", "bold")
    verdict = "fits" if made.fits else "DOES NOT FIT"
    say(
        f"{verdict}: peak {_gib(peak.bytes)} of {_gib(made.limit_bytes)} on {made.hardware.name}, while {peak.name}; the largest part is "
        f"{peak.cause.name} ({_gib(peak.cause.bytes)})",
        "green" if made.fits else "bold red",
    )
    names = list(dict.fromkeys(i.name for p in sorted(made.phases, key=lambda p: -p.bytes) for i in p.items))
    sizes = [{i.name: i.bytes for i in p.items} for p in made.phases]
    rows = [(name, *(_gib(s[name]) if name in s else "" for s in sizes)) for name in names]
    out.print(table(["GiB", *(p.name for p in made.phases)], [*rows, ("all", *(_gib(p.bytes) for p in made.phases))]))
    if made.suggestions:
        out.print(
            table(
                ["what would fit" if made.suggestions[0].fits else "nearest, and still too much", "peak", "step", "what changes"],
                [(s.words, _gib(s.peak_bytes), f"{s.step_s:.1f} s", s.effect) for s in made.suggestions],
            )
        )
    say(
        f"a step: about {cost.step_s:.1f} s (sampling {cost.sampling_s:.1f}, learning {cost.learning_s:.1f}, optimiser "
        f"{cost.optimizer_s:.2f}, communication {cost.communication_s:.2f}); "
        f"{cost.sampling_flops / 1e12:,.1f} + {cost.learning_flops / 1e12:,.1f} TFLOP; "
        f"{made.prompts_per_hour:,.0f} prompts an hour{_epoch(made)}"
    )
    for line in made.assumptions:
        say(f"assumed: {line}", "dim")
    for line in made.hints:
        say(f"hint: {line}", "yellow")
    if formulas:
        out.print(table(["part", "GiB", "bytes ="], [(i.name, _gib(i.bytes), i.formula) for i in made.formulas()]))
        say("; ".join(f"{symbol} {meaning}" for symbol, meaning in LEGEND.items()))


def _epoch(made: Plan) -> str:
    from groupwise.planner.plan import training_problems

    if made.epoch_hours is None:
        return ""
    return f"; once over {training_problems(made.setup.config):,} problems: {made.epoch_hours:,.1f} hours"


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f}"
