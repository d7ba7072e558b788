"""``groupwise plan`` and ``groupwise bench``: what a run will need, as computed and as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import AsJson, NumProcesses, Overrides, ProgressAside, start_processes

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.planner import Phase, Plan
    from groupwise.training.trial import Trial

__all__ = ["bench", "plan", "plan_of", "show_plan"]

_GIB = 2**30


def plan(
    source: Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's name, or a YAML file.")],
    overrides: Overrides = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 24GiB (2^30 bytes) or 24GB (10^9)."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", metavar="NAME", help="Such as rtx-4090, a100-80gb, or cpu.")
    ] = None,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Processes, one device each.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="Processes of one machine.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=0, help="Longest prompt; `groupwise data inspect` counts them.")
    ] = 0,
    completion_tokens: Annotated[
        int, typer.Option("--completion-tokens", min=0, help="Expected mean length, for the time alone; else the limit.")
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
      groupwise plan gsm8k-1.5b-24gb --gpu-memory 24GiB
      groupwise plan gsm8k-7b-8gpu --hardware a100-80gb --world-size 8
      groupwise plan polaris-3b --hardware a100-40gb rollout.prompts_per_step=4 --formulas

    Exit code 1 means that it does not fit, 2 that the settings contradict each other or cannot be run.
    """
    from groupwise.cli.show import console, print_json

    made = plan_of(source, overrides, gpu_memory, hardware, world_size, prompt_tokens, completion_tokens, measure, gpus_per_node)
    if as_json:
        print_json(made.to_json() | (_formulas_json(made) if formulas else {}))
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
    gpus_per_node: int = 8,
) -> Plan:
    """What the command shows, for the same words."""
    from dataclasses import replace

    from groupwise.config import load_config
    from groupwise.config.load import find_source
    from groupwise.planner import plan_run
    from groupwise.planner.plan import hints

    made = plan_run(
        load_config(source, overrides or ()),
        hardware=hardware,
        gpu_memory=gpu_memory,
        measured=measure,
        world_size=world_size,
        prompt_tokens=prompt_tokens,
        mean_completion_tokens=completion_tokens,
        gpus_per_node=gpus_per_node,
    )
    by_size = bool(gpu_memory) and hardware is None and not measure
    return replace(made, hints=tuple(hints(made, find_source(source), hardware, by_size, gpu_memory)))


def show_plan(made: Plan, out: Console, formulas: bool) -> None:
    from groupwise.cli.show import table
    from groupwise.planner.cost import cost_formulas
    from groupwise.planner.plan import LEGEND

    setup, peak, cost = made.setup, made.peak, made.cost
    learning = f", {setup.trained:,} of them learn" if setup.adapted else ""
    _say(out, f"{setup.config.model.name}: {setup.shape.parameters:,} weights{learning}", "bold")
    verdict = "fits" if made.fits else "DOES NOT FIT"
    _say(
        out,
        f"{verdict}: peak {_gib(peak.bytes)} of {_gib(made.limit_bytes)} GiB on {made.hardware.name}, {_WHEN[peak.name]}; the largest part "
        f"is {peak.cause.name} ({_gib(peak.cause.bytes)})",
        "green" if made.fits else "bold red",
    )
    _show_phases(made, out)
    _show_suggestions(made, out)
    _say(
        out,
        f"a step: about {cost.step_s:.1f} s (sampling {cost.sampling_s:.1f}, learning {cost.learning_s:.1f}, optimiser "
        f"{cost.optimizer_s:.2f}, communication {cost.communication_s:.2f}); "
        f"{cost.sampling_flops / 1e12:,.1f} + {cost.learning_flops / 1e12:,.1f} TFLOP; "
        f"{made.prompts_per_hour:,.0f} prompts an hour{_epoch(made)}",
    )
    for line in made.assumptions:
        _say(out, f"assumed: {line}", "dim")
    for line in made.hints:
        _say(out, f"hint: {line}", "yellow")
    if formulas:
        out.print(table(["part", "GiB", "bytes ="], [(i.name, _gib(i.bytes), i.formula) for i in made.formulas()]))
        _say(out, "; ".join(f"{symbol} {meaning}" for symbol, meaning in LEGEND.items()))
        out.print(table(["time", "", "="], cost_formulas(setup, made.hardware)))


def _formulas_json(made: Plan) -> dict[str, object]:
    from groupwise.planner.cost import cost_formulas

    of_time = {name: {"value": value, "formula": formula} for name, value, formula in cost_formulas(made.setup, made.hardware)}
    return {"formulas": {i.name: i.formula for i in made.formulas()}, "time_formulas": of_time}


_WHEN = {
    "loading": "while loading", "warm start": "in the warm start", "sampling": "while sampling",
    "evaluation": "during evaluation", "reference": "in the reference's pass",
    "output head": "at the output head", "learning": "while learning", "optimiser step": "in the optimiser's step",
    "checkpoint": "while a checkpoint is written beside sampling", "final model": "while the final model is saved",
}  # fmt: skip


_ROOMY = 5
"""Phases that a terminal of 80 columns has room for by their full names."""
_SHORT = {
    "loading": "load-\ning",
    "warm start": "warm\nstart",
    "sampling": "sampl.",
    "learning": "learn.",
    "output head": "output\nhead",
    "evaluation": "eval.",
    "reference": "refer-\nence",
    "optimiser step": "optim.\nstep",
    "checkpoint": "check-\npoint",
    "final model": "final\nmodel",
}


def _say(out: Console, text: str, style: str = "", indent: int = 0) -> None:
    """A sentence: wrapped between words on a terminal, a line of its own in a file."""
    from rich.padding import Padding

    from groupwise.tracking.text import harmless

    if out.is_terminal:
        out.print(Padding(harmless(text, style), (0, 0, 0, indent)))
    else:
        out.print(harmless(" " * indent + text, style), soft_wrap=True)


def _show_phases(made: Plan, out: Console) -> None:
    """Show what takes memory by phase; numbers stay whole, however narrow the terminal is: headings and names give way."""
    from groupwise.cli.show import table

    names = list(dict.fromkeys(i.name for p in sorted(made.phases, key=lambda p: -p.bytes) for i in p.items))
    sizes = [{i.name: i.bytes for i in p.items} for p in made.phases]
    rows = [(name, *(_gib(s[name]) if name in s else "" for s in sizes)) for name in names]
    heads = [_SHORT.get(p.name, p.name) if len(made.phases) > _ROOMY else p.name for p in made.phases]
    grid = table(["GiB", *heads], [*rows, ("all", *(_gib(p.bytes) for p in made.phases))])
    for column in grid.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    grid.padding = (0, 0, 0, 1)
    out.print(grid)


def _show_suggestions(made: Plan, out: Console) -> None:
    """Each with a line to copy: settings are not broken, however narrow the terminal is."""
    from groupwise.tracking.text import harmless

    if not made.suggestions:
        return
    fits = made.suggestions[0].fits
    _say(out, "what would fit, nearest first:" if fits else "nothing nearby fits; the nearest, and still too much:", "bold")
    for one in made.suggestions:
        out.print(harmless(f"  {one.words or '(the same settings)'}", "cyan"), soft_wrap=True)
        _say(out, f"{_gib(one.peak_bytes)} GiB, {one.step_s:.1f} s a step: {one.effect}", indent=6)
    out.print()


def _epoch(made: Plan) -> str:
    from groupwise.planner.plan import training_problems

    if made.epoch_hours is None:
        return ""
    return f"; one epoch of {training_problems(made.setup.config):,} problems: {made.epoch_steps:,} steps, {made.epoch_hours:,.1f} hours"


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f}"


def bench(
    source: Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's name, or a YAML file.")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Times are those of the steps after the first.")] = 3,
    as_written: Annotated[bool, typer.Option("--as-written", help="Let completions end where the model ends them.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Also warm up, evaluate and save; with the peak memory of each phase.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Plan with rates measured here (2 s).")] = False,
    num_processes: NumProcesses = 1,
    as_json: ProgressAside = False,
) -> None:
    """Try a run on this machine for a few steps: does it fit, how fast is it, and is the plan right?

    Its folder is thrown away. Unless --as-written, completions are noise up to their limit, since memory must suffice for that.

    \b
    Examples:
      groupwise bench gsm8k-1.5b-24gb training.micro_batch_tokens=4096
      groupwise bench gsm8k-7b-8gpu --num-processes 8 --steps 5
      groupwise bench mine.yaml --whole evaluation.problems=64

    Exit code 1 means that it could not be run here, for lack of memory for example.
    """
    from groupwise.config import load_config

    config = load_config(source, overrides or ())  # before torch is imported
    from groupwise.models.embedded import fetch_model

    fetch_model(config.model)
    start_processes(num_processes)
    from groupwise.cli.show import console, print_json
    from groupwise.distributed import is_first_process
    from groupwise.models.load import resolve_device
    from groupwise.training.trial import run_trial, trial_settings

    by_vllm = config.rollout.engine == "vllm"
    settings = [*(overrides or ()), *trial_settings(steps, as_written, whole, config.algorithm.needs_reference, by_vllm)]
    trial = run_trial(load_config(source, settings), console(stderr=as_json), whole=whole)
    if not is_first_process():
        return
    if resolve_device(config.model.device).type == "cpu":  # whatever GPU there is that this PyTorch cannot use
        settings.append("model.device=cpu")
    planned = plan_of(
        source, settings, world_size=trial.processes, prompt_tokens=trial.prompt_tokens,
        completion_tokens=round(trial.completion_tokens), measure=measure,
    )  # fmt: skip
    rows = _side_by_side(planned, trial, whole)
    if as_json:
        sides = {name: {"planned": plan, "measured": measured, "ratio": _ratio(plan, measured)} for name, plan, measured in rows}
        print_json({"measured": trial.to_json(), "planned": planned.to_json(), "side_by_side": sides})
    else:
        _show(planned, trial, rows, whole)


def _fullest(planned: Plan, whole: bool) -> Phase:
    """The phase with the highest planned peak, of those that a trial has: it warms up, judges and saves only if ``whole``."""
    left_out = () if whole else ("warm start", "evaluation", "final model")
    return max((phase for phase in planned.phases if phase.name not in left_out), key=lambda phase: phase.bytes)


def _side_by_side(planned: Plan, trial: Trial, whole: bool) -> list[tuple[str, float, float]]:
    """What, as planned, as measured."""
    from groupwise.training.trial import planned_peaks

    cost, peaks = planned.cost, planned_peaks(planned.phases)
    return [
        ("peak memory, GiB", _fullest(planned, whole).bytes / _GIB, trial.peak_bytes / _GIB),
        *((f"- {name}, GiB", peaks[name] / _GIB, peak / _GIB) for name, peak in trial.phase_bytes.items() if name in peaks),
        ("sampling, s", cost.sampling_s, trial.sampling_s),
        ("learning, s", cost.learning_s, trial.learning_s),
        ("optimiser, s", cost.optimizer_s, trial.optimizer_s),
        ("communication, s", cost.communication_s, trial.exchange_s),
        ("a step, s", cost.step_s, trial.step_s),
    ]


def _ratio(planned: float, measured: float) -> float | None:
    return planned / measured if measured > 0 and planned > 0 else None


def _show(planned: Plan, trial: Trial, rows: list[tuple[str, float, float]], whole: bool) -> None:
    from groupwise.cli.show import console, table
    from groupwise.tracking.text import harmless

    out = console()
    shown = [(name, f"{plan:.2f}", f"{measured:.2f}", _share(_ratio(plan, measured))) for name, plan, measured in rows]
    out.print(table(["", "planned", "measured", "planned / measured"], shown))
    lines = [
        f"{_counted(trial.steps, 'step', 'steps')}, {_processes(trial)}; prompts of at most {trial.prompt_tokens} tokens, completions of "
        f"{trial.completion_tokens:.0f}; {trial.sampled_tokens_per_s:,.0f} tokens/s sampled, {trial.learnt_tokens_per_s:,.0f} learnt",
        f"planned for {planned.hardware.name} ({planned.hardware.source}); fullest while {_fullest(planned, whole).name}",
    ]
    if trial.scoring_s > 0.1 * trial.step_s:
        lines.append(f"the reward functions took {trial.scoring_s:.1f} s of a step")
    if trial.halvings:
        lines.append(
            f"memory ran out {_counted(trial.halvings, 'time', 'times')}, and the token budget of a pass was halved: "
            "lower training.micro_batch_tokens"
        )
    for line in lines:
        out.print(harmless(line), soft_wrap=True)


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _processes(trial: Trial) -> str:
    return "one process" if trial.processes == 1 else f"{trial.processes} processes"


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
