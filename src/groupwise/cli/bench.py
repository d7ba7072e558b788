"""``groupwise bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import NumProcesses, Overrides, ProgressAside, start_processes

if TYPE_CHECKING:
    from groupwise.planner import Phase, Plan
    from groupwise.training.trial import Trial

__all__ = ["bench"]

_GIB = 2**30


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
    from groupwise.models.embedded import fetch_model

    config = load_config(source, overrides or ())
    fetch_model(config.model)
    start_processes(num_processes)
    from groupwise.cli.plan import plan_of
    from groupwise.cli.show import console, print_json
    from groupwise.distributed import is_first_process
    from groupwise.training.trial import run_trial, trial_settings

    settings = [*(overrides or ()), *trial_settings(steps, as_written, whole, config.algorithm.needs_reference)]
    found = run_trial(load_config(source, settings), console(stderr=as_json), whole=whole)
    if not is_first_process():
        return
    planned = plan_of(
        source, settings, world_size=found.processes, prompt_tokens=found.prompt_tokens,
        completion_tokens=round(found.completion_tokens), measure=measure,
    )  # fmt: skip
    rows = _side_by_side(planned, found, whole)
    if as_json:
        sides = {name: {"planned": plan, "measured": measured, "ratio": _ratio(plan, measured)} for name, plan, measured in rows}
        print_json({"measured": found.to_json(), "planned": planned.to_json(), "side_by_side": sides})
    else:
        _show(planned, found, rows, whole)


def _fullest(planned: Plan, whole: bool) -> Phase:
    """Of what a trial does, which judges and saves nothing unless it is ``whole``."""
    left_out = () if whole else ("evaluation", "final model")
    return max((phase for phase in planned.phases if phase.name not in left_out), key=lambda phase: phase.bytes)


def _side_by_side(planned: Plan, found: Trial, whole: bool) -> list[tuple[str, float, float]]:
    """What, as planned, as measured."""
    from groupwise.training.trial import planned_peaks

    cost, peaks = planned.cost, planned_peaks(planned.phases)
    return [
        ("peak memory, GiB", _fullest(planned, whole).bytes / _GIB, found.peak_bytes / _GIB),
        *((f"- {name}, GiB", peaks[name] / _GIB, peak / _GIB) for name, peak in found.phase_bytes.items() if name in peaks),
        ("sampling, s", cost.sampling_s, found.sampling_s),
        ("learning, s", cost.learning_s, found.learning_s),
        ("optimiser, s", cost.optimizer_s, found.optimizer_s),
        ("communication, s", cost.communication_s, found.exchange_s),
        ("a step, s", cost.step_s, found.step_s),
    ]


def _ratio(planned: float, measured: float) -> float | None:
    return planned / measured if measured > 0 and planned > 0 else None


def _show(planned: Plan, found: Trial, rows: list[tuple[str, float, float]], whole: bool) -> None:
    from groupwise.cli.show import console, table
    from groupwise.tracking.text import harmless

    out = console()
    shown = [(name, f"{plan:.2f}", f"{measured:.2f}", _share(_ratio(plan, measured))) for name, plan, measured in rows]
    out.print(table(["", "planned", "measured", "planned / measured"], shown))
    lines = [
        f"{_counted(found.steps, 'step', 'steps')}, {_processes(found)}; prompts of at most {found.prompt_tokens} tokens, completions of "
        f"{found.completion_tokens:.0f}; {found.sampled_tokens_per_s:,.0f} tokens/s sampled, {found.learnt_tokens_per_s:,.0f} learnt",
        f"planned for {planned.hardware.name} ({planned.hardware.source}); fullest while {_fullest(planned, whole).name}",
    ]
    if found.scoring_s > 0.1 * found.step_s:
        lines.append(f"the reward functions took {found.scoring_s:.1f} s of a step")
    if found.halvings:
        lines.append(
            f"memory ran out {_counted(found.halvings, 'time', 'times')}, and the token budget of a pass was halved: "
            "lower training.micro_batch_tokens"
        )
    for line in lines:
        out.print(harmless(line), soft_wrap=True)


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _processes(found: Trial) -> str:
    return "one process" if found.processes == 1 else f"{found.processes} processes"


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
