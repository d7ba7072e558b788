"""One run's parts, put together: policy, engine, learner, run folder and trackers. The loop's verbs live here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from traceback import clear_frames
from typing import Any, NoReturn

from groupwise.config.schema import Config, KLConfig
from groupwise.distributed import World
from groupwise.distributed.world import Notices
from groupwise.engines import Engine
from groupwise.engines.wrappers import DealtEngine
from groupwise.episodes import EpisodeEngine
from groupwise.errors import GroupwiseError, StoppedError, TrainingError
from groupwise.evaluation import Evaluation, evaluate_stage
from groupwise.memory import KeptMemory, is_shortage, peak_memory_bytes, release_freed_memory
from groupwise.metrics import Max, Mean, Metric, Sum, values
from groupwise.models.load import Policy
from groupwise.models.scorer import Scorer
from groupwise.planner import Setup
from groupwise.planner.memory import Item, evaluation, sampling
from groupwise.planner.memory import warm_start as plan_of_warm_start
from groupwise.rollout import Rollout
from groupwise.threads import threads_in_use
from groupwise.tracking import Phase, RunFolder, Trackers
from groupwise.training.advantages import Advantages
from groupwise.training.ahead import Ahead
from groupwise.training.batches import Batches
from groupwise.training.checkpoint import CheckpointWriter, Snapshot, load_checkpoint, take_snapshot
from groupwise.training.checkpoint_folder import last_good, latest_checkpoint, read_state
from groupwise.training.ending import save_final_model, write_summary
from groupwise.training.learner import Learner
from groupwise.training.microbatches import PassBudget
from groupwise.training.resume import about_run
from groupwise.training.seeds import seed_generators
from groupwise.training.setup import Prepared
from groupwise.training.sharding import Sharding, with_whole_weights
from groupwise.training.short_memory import less_memory, planned, rows_that_fit, short_of_memory, tokens_that_fit
from groupwise.training.stopping import AbandonStep, StopSignals
from groupwise.training.warm_start import warm_start
from groupwise.training.window import HeldWindow
from groupwise.types import Group, Prompt

__all__ = ["Run", "StepReport"]

_MOST_DROPPED = 5
"""Updates dropped in a row, for gradients that are not finite, after which a run stops."""


@dataclass(frozen=True)
class StepReport:
    """What a callback is told after each step."""

    step: int
    """From 1."""
    metrics: Mapping[str, float]
    groups: Sequence[Group]
    advantages: Advantages
    folder: Path
    """The run's, where everything about the step has been written."""


def _as_plain(said: Any) -> Any:
    """The value of a numpy or torch scalar, whose False is no ``False``."""
    return said.item() if getattr(said, "ndim", None) == 0 else said


@dataclass
class Run:
    """Everything a training run consists of while it lasts."""

    config: Config
    world: World
    recipe: str
    prepared: Prepared
    folder: RunFolder
    trackers: Trackers
    policy: Policy
    scorer: Scorer
    sharding: Sharding
    engine: Engine
    started: float
    checkpoint: Path | None = None
    """What the run resumes from."""
    trained: bool = False
    """Whether its final model was there already, and only has to be judged."""
    learner: Learner | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    step_started: float = 0.0
    gave_way: bool = False
    """Whether it was said that other programs keep cores busy."""
    done: int = 0
    """Steps."""
    saved_updates: int = 0
    """Those that the newest checkpoint has."""
    signals: StopSignals = field(default_factory=StopSignals)
    undo: ExitStack = field(default_factory=ExitStack)
    """Sets back what the run set for its process."""
    writer: CheckpointWriter = field(init=False)
    batches: Batches = field(init=False)
    notices: Notices = field(init=False)
    budget: PassBudget = field(init=False)
    told_of_room: set[str] = field(default_factory=set)
    """What was said of memory that is short."""
    held: HeldWindow = field(default_factory=HeldWindow)
    """A batch whose updates were not all made when the run was stopped."""
    known: dict[str, Any] = field(default_factory=dict)
    """The rewards' state before the step."""
    kept: KeptMemory = field(default_factory=KeptMemory)
    ahead: Ahead | None = None
    """What is sampled for later steps, where the config wants it."""
    unpushed: BaseException | None = None
    """Why the engine lacks the policy's last weights."""

    def __post_init__(self) -> None:
        self.batches = Batches(self.config, self.prepared, self.world)
        self.notices = Notices(self.world, lambda sentence: self.trackers.say(sentence, "yellow"))
        if self.engine.limit is not None:
            self.engine.limit.tell = self.notices.note
        tokens = self.config.training.micro_batch_tokens
        self.budget = PassBudget(
            tokens, fixed=self.sharding.divides_weights, tell=self.notices.note, less_memory=less_memory(self._plan)
        )
        output = self.config.output
        self.writer = CheckpointWriter(
            self.folder.checkpoints, output.keep_checkpoints, output.keep_best, output.checkpoint_in_background,
            beside_learning=self.scorer.device.type != "cpu",
        )  # fmt: skip
        self.world.is_saving = lambda: self.writer.is_writing

    def close(self) -> None:
        """Close every part, also where an interrupt or an error ends another's; the folder's lock is let go last."""
        parts = ExitStack()  # the last is closed first
        parts.callback(self.folder.release)
        parts.callback(self.trackers.close)
        parts.callback(self._tell_of_checkpoints)
        parts.callback(self.writer.finish)  # again: an interrupt may have ended the first wait
        parts.callback(self.engine.close)
        parts.callback(self.prepared.rewards.close)
        parts.callback(self._tell_of_checkpoints)
        parts.callback(self.writer.finish)
        parts.callback(self.undo.close)
        if self.ahead is not None:
            parts.callback(self.ahead.close)
        parts.__exit__(*sys.exc_info())  # ``close`` would take what ended the run out of a new error's context

    @property
    def is_new(self) -> bool:
        return self.checkpoint is None and not self.trained

    @property
    def style(self) -> Any:
        return self.prepared.answer_style

    @property
    def sampler(self) -> Engine:
        """The engine with the weights of this moment."""
        return with_whole_weights(self.engine if self.ahead is None else self.ahead.free_engine, self.sharding)

    def evaluate(self, stage: str) -> None:
        """Judge the policy on the held-out problems in every mode, if there are any."""
        if not self.prepared.held_out_prompts:
            return
        release_freed_memory()  # its batches are of other sizes than a step's
        room = self._room_to_sample(self.prepared.held_out_prompts, evaluation, "an evaluation")
        with self.stopping(stops_after=stage != "final"), self.signals.abandonable(), room:
            results = evaluate_stage(
                DealtEngine(self.sampler, self.world), self.prepared.held_out_prompts, stage=stage, config=self.config, style=self.style,
                system=self.prepared.system, trackers=self.trackers,
            )  # fmt: skip
            # Before a signal is heeded, whose checkpoint says what was judged.
            self.evaluations.extend(result.kept() for result in results)
        self.notices.exchange()
        release_freed_memory()

    @contextmanager
    def _room_to_sample(self, prompts: Sequence[Prompt], items: Callable[[Setup, int], list[Item]], where: str) -> Iterator[None]:
        """Fewer sequences at once in here, where the planner says that as many as it may sample will not fit now."""
        limit = self.engine.limit
        if limit is None:
            yield
            return
        rows = rows_that_fit(self._planned(prompts), limit.rows, items)
        self._tell_of_room(
            f"at most {rows:,} of {limit.rows:,} sequences are sampled at once in {where}, and the completions stay the same",
            rows < limit.rows,
        )
        with limit.lowered(rows):
            yield

    @contextmanager
    def _room_to_learn(self, setup: Setup | None, completion: int, where: str) -> Iterator[None]:
        """Smaller passes in here, where the planner says that those of ``training.micro_batch_tokens`` will not fit now."""
        tokens = tokens_that_fit(setup, self.budget.tokens, completion)
        self._tell_of_room(
            f"a pass of {where} has at most {tokens:,} tokens instead of {self.budget.tokens:,}, and its numbers stay the same",
            tokens < self.budget.tokens,
        )
        with self.budget.lowered(tokens):
            yield

    @cached_property
    def _plan(self) -> Setup | None:
        return planned(self.config, self.scorer.device, processes=self.world.size)

    @property
    def short_of_memory(self) -> str:
        """What to set where its memory runs out."""
        return short_of_memory(self._plan)

    def _planned(self, prompts: Sequence[Prompt]) -> Setup | None:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        return None if self._plan is None else replace(self._plan, prompt_tokens=longest)

    def _tell_of_room(self, sentence: str, short: bool) -> None:
        """Once for each sentence: the next step may have to do the same."""
        if short and sentence not in self.told_of_room:
            self.told_of_room.add(sentence)
            self.notices.note(f"memory is short: {sentence}")

    @contextmanager
    def stopping(self, stops_after: bool = True) -> Iterator[None]:
        """A context: what a signal abandons inside it, or what fails, ends the run, after saving it; several processes come to its
        end together, and stop there, unless ``stops_after`` is False: where nothing follows it, or what follows saves first."""
        try:
            yield
        except AbandonStep:
            self.stop()
        except Exception as error:
            self._end_failed(error)
        if self.world.size > 1 and stops_after and self._asked_to_stop():
            self.stop()

    def _asked_to_stop(self) -> bool:
        """Whether a signal came, to whichever process."""
        heard = next((s for s in self.world.all_gather_object(self.signals.received) if s is not None), None)
        if heard is not None:  # else one may have come here since it was asked for: the next time tells the others
            self.signals.received = heard
        return heard is not None

    def evaluate_at_start(self, stage: str) -> None:
        if self.config.evaluation.at_start:
            self.evaluate(stage)

    def warm_start(self) -> None:
        settings = self.config.warm_start
        if settings.steps == 0:
            return
        self.engine.release_memory()
        abandonable, setup = self.signals.abandonable(), self._planned([self.prepared.train_prompts[0]])
        room = self._room_to_learn(
            None if setup is None else plan_of_warm_start(setup), self.config.rollout.max_completion_tokens, "the warm start"
        )
        phase = self.trackers.phase("warm start", settings.steps, "steps")
        with self.stopping(stops_after=False), abandonable, room, phase as bar:
            warm_start(
                self.scorer, self.prepared.train_prompts, self.policy.tokenizer, self.style, self.config,
                on_step=lambda _, loss: bar.advance(loss=loss), on_dropped=self._warm_start_dropped,
                world=self.world, sharding=self.sharding, budget=self.budget, episodes=self.prepared.episodes,
            )  # fmt: skip
        release_freed_memory()  # its optimiser has ended, and its batches are of other sizes than a step's
        self.notices.exchange()

    def _warm_start_dropped(self, step: int, in_a_row: int) -> None:
        self.trackers.say(f"warm start, step {step + 1}: the gradient was not finite, and its update was not made", "yellow")
        if in_a_row >= _MOST_DROPPED:
            raise TrainingError(
                f"the gradient was not finite in {_MOST_DROPPED} steps of the warm start in a row: lower warm_start.learning_rate"
            )

    def begin_learning(self) -> int:
        """The optimiser, and the reference, which is the policy as GRPO finds it; or both as a checkpoint has them. Neither is made
        where the run only has to be judged.

        Returns how many steps are done already.
        """
        if self.trained:
            self.trackers.say(
                f"All {self.done} steps were made, and {self.folder.final_model} is whole: what is left is to judge it."
            )
            return self.done
        self.learner = Learner(self.scorer, self.config, world=self.world, sharding=self.sharding, budget=self.budget)
        if self.prepared.rewards.has_state:
            self.learner.parts["rewards"] = self.prepared.rewards
        self.learner.parts["window"] = self.held
        if self.config.rollout.ahead:
            self.ahead = Ahead(self.config, self.world, self.policy, self.engine, self.batches.prompts, self.learner)
            self.learner.parts["ahead"] = self.ahead
        self.sharding.check()
        if self.checkpoint is None:
            if self.config.warm_start.steps:  # else there is nothing yet that could be lost
                self.checkpoint_if_due(-1)
                self._push()
                self._end_unpushed()
            return 0
        self.done = done = load_checkpoint(self.checkpoint, self.learner)
        self.saved_updates = self.learner.updates
        self.engine.refresh(self.learner.updates)
        inside = ", inside the updates of the next" if self.held.has_window else ""
        self.trackers.say(f"Resuming from {self.checkpoint}, after step {done}{inside}.")
        if self.ahead is not None:
            self._tell_of_newer_weights(self.ahead.sampled_again(), "could not be taken over")
        self.sharding.check()
        return done

    def evaluate_where_it_begins(self) -> None:
        """After the warm start, or where a checkpoint was written before the evaluation that follows it."""
        if self.trained or self.held.has_window:
            return
        state = read_state(self.checkpoint) if self.checkpoint else {}
        judged = {row["stage"] for row in state.get("evaluations", [])}
        if self.done and f"step-{self.done}" not in judged:
            self.evaluate_if_due(self.done - 1)
        if not self.done and self.config.warm_start.steps and "warm_start" not in judged:
            self.evaluate_at_start("warm_start")

    def renew_reference_if_due(self, step: int) -> None:
        """Outer iterations, ``reference_updates`` of them, equally long, each start with a new reference; so does every
        ``reference_every``-th step."""
        kl, steps = self.config.algorithm.kl or KLConfig(), self.config.training.steps
        outer, every = kl.reference_updates, kl.reference_every
        new_iteration = step * outer // steps != (step - 1) * outer // steps
        if self.learner and step > 0 and (new_iteration or (every and step % every == 0)):
            self.writer.finish(copies=False)
            self.learner.renew_reference(step)

    def collect(self, step: int, bar: Phase) -> Rollout:
        """Sample and score the step's groups; with dynamic sampling, replace those without variance.

        A signal abandons it here: nothing has been learnt from it yet. So does a failure, as of a reward function, or a server
        that stays away.
        """
        self.step_started = time.perf_counter()
        self.engine.metrics()  # what it has to say of evaluations and the warm start belongs to no step
        if self.held.has_window:
            if self.ahead is not None:
                self.ahead.go_on(step)
            self.metrics = dict(self.held.rollout_metrics)
            return Rollout(self.held.groups(partial(self.batches.prompt_of, self.checkpoint)), [], 0.0, 0.0)
        self.known = self.prepared.rewards.state_dict()

        def progress(finished: int, _: int) -> None:
            bar.advance(0, completions=finished)

        try:
            with self.signals.abandonable():
                ready = None if self.ahead is None else self.ahead.take(step, progress)
                prompts = self.batches.prompts(step) if ready is None else []
                # After the resets that render prompts: a resumed run makes some that an unbroken one made in earlier steps.
                seed_generators(self.config.training.seed, step)
                room = self._room_to_sample(prompts, sampling, "a step") if ready is None else nullcontext()
                with room:
                    rollout, sampled = self.batches.collect(self.sampler, step, on_progress=progress, ready=ready)
        except AbandonStep:
            self.prepared.rewards.load_state_dict(self.known)
            self.stop()
        except Exception as error:
            self.prepared.rewards.load_state_dict(self.known)
            self._end_failed(error)
        for failure in rollout.failures:
            self.trackers.say(f"step {step + 1}: {failure.message}; its group is left out", "yellow")
        self.metrics = rollout.metrics(self.style)
        if self.ahead is not None:
            self.metrics |= self.world.reduce(self.ahead.metrics()) | self.ahead.staleness(rollout.groups)
        if self.config.rollout.refill_rounds:
            self.metrics["groups/sampled"] = Sum(sampled)
        return rollout

    def learn(self, rollout: Rollout) -> Advantages:
        """Update the policy, and tell the engine. A signal may come between two updates; what is left is then done after a resume. Within
        the first update it abandons the step, which is sampled again then; a batch that was sampled ahead is kept."""
        assert self.learner is not None
        if self.ahead is not None:
            self.ahead.learnt(self.done)
        if not rollout.groups:
            return []
        self.writer.finish(copies=False)  # it may write from the weights that are about to change
        if self.ahead is None:  # else it samples meanwhile
            self.engine.release_memory()
        longest = max(len(c.token_ids) for group in rollout.groups for c in group.completions)
        held = self.held.take()
        try:
            with self._room_to_learn(self._planned([group.prompt for group in rollout.groups]), longest, "a step"):
                advantages, measured = self.learner.learn(
                    rollout.groups, step=self.done, stop=self.signals.at_once_and_received, within=True,
                    held=held if self.world.size == 1 else None,  # no update was made then: see ``refuse_to_share``
                )  # fmt: skip
        except Exception as error:
            # A checkpoint would say that no update of this step was made, which may be wrong once one was begun. It would also
            # lack a batch that was sampled ahead: a resumed run would sample it with newer weights.
            if self.learner.stepped or self.ahead is not None:
                raise
            self.prepared.rewards.load_state_dict(self.known)
            self._end_failed(error)
        if (paused := self.learner.paused) is not None:
            # One that was sampled ahead, or came with a checkpoint, is kept: what it was sampled with may be gone.
            if paused.updates == 0 and self.ahead is None and held is None:
                self.prepared.rewards.load_state_dict(self.known)
                self.stop()
            self.held.window, self.held.rollout_metrics = paused, self.metrics
            self.stop(paused.updates)
        self.metrics |= measured
        if self.ahead is None or not self.ahead.borrows:  # else it still samples with the weights that it has
            self._push()
        return advantages

    def _push(self) -> None:
        """Tell the engine of the new weights. Where its server stays away, or a signal comes while it is waited for, ``unpushed``
        says so, in all processes: what was learnt is recorded and saved first. In one process whatever else the engine raises is
        kept so too; of several, one may fail alone. A collective call."""
        assert self.learner is not None

        def heed() -> None:
            if self.signals.at_once_and_received():
                raise AbandonStep

        pushing = self.engine.engine if isinstance(self.engine, EpisodeEngine) else self.engine
        pushing.heed = heed
        try:
            self.engine.refresh(self.learner.updates)
        except (AbandonStep, TrainingError) as error:
            self.unpushed = error
        except Exception as error:
            if self.world.size > 1:
                raise
            self.unpushed = error
        finally:
            pushing.heed = None
        if self.world.size > 1:  # one may have failed alone, and to save is for all
            self.unpushed = next((why for why in self.world.all_gather_object(self.unpushed) if why is not None), None)

    def _end_unpushed(self) -> None:
        """Save what is done, and end the run, where the engine did not get the last weights."""
        if isinstance(self.unpushed, AbandonStep):
            self.stop()
        if isinstance(self.unpushed, Exception) and not isinstance(self.unpushed, TrainingError):
            self._end_failed(self.unpushed)
        if self.unpushed is not None:
            raise TrainingError(f"{self.unpushed}; step {self.done} is saved in {self.save(self.done)}") from self.unpushed

    def _end_failed(self, error: Exception) -> NoReturn:
        """End the run where sampling, scoring or a function of the user's failed, or memory ran out; first save what was learnt since
        the last checkpoint. Several processes cannot: one of them may have failed alone."""
        # The last: the final model is whole then.
        if self.world.size > 1 or self.learner is None or self.trained or self.folder.trained.exists():
            raise error
        self.writer.finish()  # only then is it known whether the disk took the newest checkpoint
        # A warm start makes no updates, and has a checkpoint where there are any.
        warm = self.is_new and not self.done and self.config.warm_start.steps and not self.config.output.checkpoint_every
        if self.learner.updates == self.saved_updates and not self.writer.failed and not warm:
            raise error
        short = is_shortage(error)
        if short:
            clear_frames(error.__traceback__)  # what the failed call held
        try:
            said = f"step {self.done} is saved in {self.save(self.done)}"
        except Exception as unsaved:
            said = f"what was learnt since the last checkpoint is lost: {unsaved}"
        if isinstance(error, GroupwiseError):
            raise type(error)(f"{error}; {said}") from error
        if not (short and isinstance(error, MemoryError | RuntimeError | OSError)):  # these ``explain_short_memory`` tells of
            error.add_note(said)
        raise error

    def record(self, step: int, rollout: Rollout, advantages: Advantages, on_step: Callable[[StepReport], Any] | None) -> bool:
        """Hand the step's numbers to trackers and callback. False if the callback asks to stop (by returning False).

        Raises TrainingError after too many updates in a row that were not made."""
        assert self.learner is not None
        self.notices.exchange()
        learnt = self.metrics.pop("speed/learnt_tokens", None)
        if learnt is not None:
            passes = learnt.value * self.config.algorithm.updates_per_batch
            self.metrics["speed/learnt_tokens_per_s"] = Mean(passes, self.metrics["time/learn_s"].value)
        of_engine: dict[str, Metric] = {}
        try:
            of_engine = self.engine.metrics()
        except Exception as error:
            if self.world.size > 1:  # one may have failed alone
                raise
            self.unpushed = self.unpushed or error  # the step is recorded and saved first
        self.metrics |= (
            self.world.reduce(of_engine)
            | {
                "time/step_s": Sum(time.perf_counter() - self.step_started),
                "memory/peak_gib": Max(max(self.world.all_gather_object(peak_memory_bytes(self.scorer.device.type))) / 2**30),
                "progress/epoch": Max((step + 1) * self.config.rollout.prompts_per_step / len(self.prepared.train_prompts)),
                "progress/policy_version": Max(self.learner.updates),
            }
            | self._threads()
        )
        self.done = step + 1
        self.kept.after_step()
        numbers = values(self.metrics)
        self.trackers.step(step + 1, numbers)
        self.trackers.completions(step + 1, rollout.groups, advantages, self.learner.token_advantages)
        if self.learner.dropped_in_a_row >= _MOST_DROPPED:
            raise TrainingError(
                f"the gradient was not finite in {_MOST_DROPPED} updates in a row, none of which was made: lower "
                "optimizer.learning_rate, or look at the last completions and rewards in the run's folder; "
                f"{self.world.on_rank0(self._last_good)}"
            )
        report = StepReport(step + 1, numbers, rollout.groups, advantages, self.folder.path)
        try:
            going_on = on_step is None or self.world.on_rank0(lambda: _as_plain(on_step(report)) is not False)
        except Exception as error:
            self._end_failed(error)
        self._end_unpushed()
        return going_on

    def _threads(self) -> dict[str, Metric]:
        """How many threads computed, on a CPU; the first step with fewer than there are is told."""
        if self.scorer.device.type != "cpu":
            return {}
        now, most = threads_in_use()
        if now < most and not self.gave_way:
            self.gave_way = True
            self.trackers.say(
                f"Another program keeps a core busy: computing with {now} of {most} threads while it does, since waiting for it would "
                "take longer (training.threads fixes a number; a float32 run repeats bit for bit only with one).",
                "dim",
            )
        return {"progress/threads": Max(now)}

    def _last_good(self) -> str:
        assert self.learner is not None
        self.writer.finish()
        return last_good(self.folder.checkpoints, self.learner.updates, self.checkpoint) or self.saved()

    def saved(self) -> str:
        """What there is to resume from, in words."""
        self.writer.finish()
        newest = latest_checkpoint(self.folder.checkpoints) or self.checkpoint
        return f"the last checkpoint is {newest}" if newest else "there is no checkpoint (output.checkpoint_every)"

    def save(self, done: int, updates: int = 0) -> Path:
        """The last checkpoint, after ``done`` steps and so many updates of the next. Raises CheckpointError on a full disk."""
        snapshot = self._snapshot(done, updates, stopping=True)
        return self.world.on_rank0(lambda: self.writer.write(snapshot))

    def _snapshot(self, done: int, updates: int = 0, stopping: bool = False) -> Snapshot:
        """Take a snapshot, a collective call; the first process's is whole. ``stopping``: a signal ends the run."""
        assert self.learner is not None
        self.writer.finish()  # two copies at once would take twice the memory
        self.sharding.check()
        if self.ahead is not None:
            self._tell_of_newer_weights(self.ahead.finish_for_checkpoint(stopping), "could not be saved")
        about = about_run(self.prepared, self.evaluations)
        return take_snapshot(done, self.policy, self.learner, about=about, updates=updates)

    def _tell_of_newer_weights(self, steps: Sequence[int], what: str) -> None:
        for step in steps:
            self.trackers.say(
                f"The batch of step {step + 1}, which is sampled ahead, {what}: the resumed run samples it "
                "with newer weights, so its numbers are not those of a run that was not stopped.",
                "yellow",
            )

    def checkpoint_if_due(self, step: int) -> None:
        """Also when a signal asked for it. A disk that is full is told, and the run goes on: the next one may succeed."""
        every = self.config.output.checkpoint_every
        if self._asked_to_stop():
            self.stop()
        assert self.learner is not None
        # After dropped updates alone there is nothing new, and a good one would go.
        news = not self.learner.dropped_in_a_row or self.learner.updates > self.saved_updates
        if every and (step + 1) % every == 0 and news:
            snapshot = self._snapshot(step + 1)
            self.saved_updates = self.learner.updates
            if self.world.is_first:
                self.writer.begin(snapshot)
        self._tell_of_checkpoints()

    def _tell_of_checkpoints(self) -> None:
        for sentence in self.writer.news():
            self.trackers.say(sentence, "red")

    def stop(self, updates: int = 0) -> NoReturn:
        """Save what is done, and so many updates of the next step, and end the run, as a signal asked."""
        number = self.signals.received
        assert number is not None
        if self.trained:  # a checkpoint would lack what had been learnt beside the weights
            raise StoppedError(
                f"stopped by {number.name} after the last step; {self.folder.final_model} is whole: "
                f"judge it with {self._resuming}",
                128 + number,
            )
        if self.learner is None:
            raise StoppedError(
                f"stopped by {number.name} before the first step: nothing was learnt yet that could be saved, so start again",
                128 + number,
            )
        saved, inside = self.save(self.done, updates), f" and {updates} updates of the next" if updates else ""
        raise StoppedError(
            f"stopped by {number.name} after step {self.done}{inside}, which is saved in {saved}: continue with {self._resuming}",
            128 + number,
        )

    @property
    def _resuming(self) -> str:
        return f"--resume (in Python: resume=True, run_folder={str(self.folder.path)!r})"

    def evaluate_if_due(self, step: int) -> None:
        every = self.config.evaluation.every
        if every and (step + 1) % every == 0 and step + 1 < self.config.training.steps:
            self.evaluate(f"step-{step + 1}")

    def finish(self) -> dict[str, Any]:
        """Judge and save the trained model, and write what the run came to."""
        if self.ahead is not None:
            self.ahead.close()
        self.sharding.check()
        if not self.trained:
            save_final_model(self)  # before it is judged: what ends the run meanwhile takes only the judgement with it
        self.evaluate("final")
        peak = max(self.world.all_gather_object(peak_memory_bytes(self.scorer.device.type)))
        return self.world.on_rank0(lambda: write_summary(self, peak))
