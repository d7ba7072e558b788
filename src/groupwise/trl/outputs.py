"""What the trainer gives out beside training: logs, files, callbacks, and a clear no for what it does not have."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from groupwise.errors import ConfigError
from groupwise.models.load import Policy
from groupwise.trl import checkpoint as checkpoints

__all__ = ["Outputs", "drain", "summary_in"]

logger = logging.getLogger("groupwise")


class Outputs:
    """The part of ``GRPOTrainer`` that trains nothing."""

    args: Any
    policy: Policy
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add a row to ``state.log_history`` and show it to callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(
            self.args, self.state, self.control, dict(logs)
        )  # some take out what they do not show

    def _finished_before(self, checkpoint: Path) -> TrainOutput:
        """What a run came to that has nothing left to do; nothing is logged that it has not logged itself."""
        logger.warning("%s is of a run that made all its steps: nothing to carry on", checkpoint)
        self.control = self._event("on_train_begin")
        metrics = summary_in(self.state.log_history)
        self.control = self._event("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _event(self, name: str) -> TrainerControl:
        event: Callable[..., TrainerControl] = getattr(self.callback_handler, name)
        return event(self.args, self.state, self.control)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (with an adapter, the adapter alone) and the tokenizer to ``output_dir``, by default the run's."""
        checkpoints.save_policy(self.policy, Path(output_dir or self.args.output_dir))

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to the run's folder."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``{split}_results.json`` to the run's folder."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(self.args.output_dir) / f"{split}_results.json").write_text(json.dumps(metrics, indent=4, sort_keys=True))

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print ``metrics``, one a line."""
        print(f"***** {split} metrics *****", *(f"  {k} = {v}" for k, v in sorted(metrics.items())), sep="\n")

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refused: uploading is left to the Hub's own command."""
        raise ConfigError(f"push_to_hub() is not there: save_model() and then `hf upload NAME {self.args.output_dir}`")

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Refused, like ``push_to_hub``."""
        raise ConfigError("create_model_card() is not there: write README.md into the folder of save_model() yourself")

    def is_world_process_zero(self) -> bool:
        """There is one process."""
        return True

    is_local_process_zero = is_world_process_zero

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self.callback_handler.pop_callback(callback)

    def __getattr__(self, name: str) -> Any:
        if name == "accelerator":
            raise AttributeError(
                "groupwise.trl has no accelerator: it is one process, so its conditions on processes are all true"
            )
        raise AttributeError(f"groupwise.trl's GRPOTrainer has no {name!r}: dir(trainer) lists what it has")


def drain(numbers: dict[str, list[float]], prefix: str = "") -> dict[str, float | None]:
    """Means of what was gathered since the last log, without NaN; None where nothing else is left."""
    out: dict[str, float | None] = {}
    for name, gathered in numbers.items():
        known = [x for x in gathered if not math.isnan(x)]
        out[prefix + name] = statistics.fmean(known) if known else None
    numbers.clear()
    return out


def summary_in(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a run logged at its end. Where it did not come to that, the mean loss of the steps whose loss it logged (NaN: of none)."""
    for row in reversed(history):
        if "train_runtime" in row:
            return {name: value for name, value in row.items() if name != "step"}
    total, last = 0.0, 0
    for row in history:
        if "loss" in row:
            total, last = total + row["loss"] * (row["step"] - last), row["step"]
    return {"train_loss": total / last if last else math.nan}
