"""What a run says: transformers' own callbacks and verbosity, and a word about arguments that mean something else here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

from groupwise.trl.config import ArgumentError, GRPOConfig

__all__ = ["callback_handler", "set_verbosity", "words_about"]


def callback_handler(
    args: GRPOConfig, callbacks: Sequence[Any] | None, model: Any, tokenizer: Any, optimizer: Any, scheduler: Any
) -> CallbackHandler:
    """transformers' defaults, trackers that ``report_to`` names, the script's own, and a progress bar or printed logs."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        trackers = get_reporting_integration_callbacks(args.report_to)
    except ValueError as error:
        raise ArgumentError(f"report_to={args.report_to!r}: {error}") from error
    display = PrinterCallback if args.disable_tqdm else ProgressCallback
    chosen = [DefaultFlowCallback, *trackers, *(callbacks or []), display]
    try:
        return CallbackHandler(chosen, model, tokenizer, optimizer, scheduler)
    except RuntimeError as error:  # a tracker whose package is not installed
        raise ArgumentError(f"report_to={args.report_to!r}: {error}") from error


def set_verbosity(level: str) -> None:
    """``log_level``, as transformers' trainer takes it; ``passive`` leaves everything as it is."""
    if level != "passive":
        from transformers.utils import logging

        logging.set_verbosity(logging.log_levels[level])


def words_about(args: GRPOConfig, model: Any, quantization_config: Any) -> Iterator[str]:
    """What a script should know of how its arguments are taken."""
    if args.use_vllm:
        yield "use_vllm=True: groupwise's own engine samples in vLLM's place, from the very weights that are trained"
    if args.use_transformers_continuous_batching or args.use_transformers_paged:
        yield "use_transformers_continuous_batching, use_transformers_paged: groupwise's own engine samples, and batches continuously"
    if args.use_liger_kernel:
        yield "use_liger_kernel=True: the logits of all tokens never exist at once here anyway; Liger's kernels are not used"
    if args.cast_lm_head_to_fp32 and args.bf16:
        yield (
            "cast_lm_head_to_fp32=True with bf16: sampler and learner compute the head in the same bfloat16, and the softmax over it in "
            "float32; bf16=False computes all in float32"
        )
    if args.optim.startswith("paged"):
        yield f"optim={args.optim!r}: the optimiser's state is not paged; its numbers are the same"
    if args.repetition_penalty != 1 or args.min_p or args.top_p < 1 or args.top_k > 0:
        yield (
            "repetition_penalty, min_p, top_p and top_k change what is sampled and not the log-probabilities that are trained, as in "
            "TRL: the policy is taught by samples of another distribution than its own"
        )
    if args.loss_type == "cispo" and (args.epsilon if args.epsilon_high is None else args.epsilon_high) <= 1:
        yield (
            "loss_type='cispo' holds every token's weight at or below epsilon_high (by default epsilon), here at 1 or below, where it "
            "only scales the loss: 5.0 is usual"
        )
    if args.importance_sampling_level == "sequence" and args.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        yield (
            f"importance_sampling_level='sequence' with loss_type={args.loss_type!r}, which adds up tokens: it weights each sequence by "
            "its completion length, where GSPO weighs all alike: loss_type='grpo' is GSPO's"
        )
    if args.loss_type == "luspo" and args.importance_sampling_level != "sequence":
        yield "loss_type='luspo' is meant for importance_sampling_level='sequence'"
    if not isinstance(model, str) and (args.model_init_kwargs or quantization_config is not None):
        yield "model_init_kwargs and quantization_config are for a model that is given by its name: this one is loaded already"
