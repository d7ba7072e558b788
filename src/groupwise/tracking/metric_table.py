"""Every number that a run logs: its unit and what it means. A test holds this table and the loop's names equal."""

from __future__ import annotations

import re

__all__ = ["EVALUATION_METRICS", "METRICS", "describe_metric"]

_EACH = "<component>"

METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", "Mean reward of the step's completions, which GRPO raises."),
    "reward/std": (
        "reward",
        "Mean standard deviation of rewards within a group: what there is to learn from.",
    ),
    "reward/<component>": ("score", "Mean score of one reward function, before its weight."),
    "shaping/mean_<component>": (
        "score",
        "Running mean of one function's scores, or of their sum (total), where normalised.",
    ),
    "shaping/std_<component>": ("score", "Running standard deviation of these."),
    "shaping/clipped_<component>": ("share", "Scores, or sums (total), that the clip changed."),
    "reward_model/truncated_<component>": (
        "share",
        "Texts that were too long for one reward model, and lost their beginning.",
    ),
    "reward_model/tokens_mean_<component>": (
        "tokens",
        "Mean length of what one reward model reads.",
    ),
    "steps/count_<component>": ("steps", "Mean number of steps that one function found in a completion."),
    "steps/reward_<component>": ("score", "Mean reward of a step, before clipping and weight."),
    "calls/failed_<component>": ("count", "Calls of one function that failed (rewards.on_error: skip)."),
    "calls/killed_<component>": ("count", "Processes of one isolated function that were killed or died."),
    "answers/unchecked": (
        "count",
        "Answers on which math-verify gave no verdict (rewards.on_error); accuracy/strict leaves them out.",
    ),
    "accuracy/strict": ("share", "Completions of the step whose answer is right in the place asked for."),
    "accuracy/format": ("share", "Completions of the step in exactly the form asked for; only with answers in XML tags."),
    "groups/zero_variance": (
        "share",
        "Groups whose completions all scored the same: compared within the group, they teach nothing.",
    ),
    "groups/failed": ("count", "Groups left out because a reward function or the environment failed."),
    "groups/sampled": (
        "count",
        "Groups sampled, refills and failed ones included; only with rollout.refill_rounds.",
    ),
    "completions/tokens_mean": ("tokens", "Mean length of a completion, stop token included."),
    "completions/tokens_max": ("tokens", "Longest completion of the step."),
    "completions/truncated": ("share", "Completions cut at a limit, mostly rollout.max_completion_tokens."),
    "completions/stop_rate": ("share", "Completions that the policy ended by itself."),
    "completions/prompt_cached": (
        "share",
        "Prompt tokens that vLLM took from its prefix cache.",
    ),
    "episodes/turns": (
        "turns",
        "Mean number of turns of the policy in a completion; these only with rollout.tools or an environment.",
    ),
    "episodes/calls": ("calls", "Mean number of calls of tools in a completion."),
    "episodes/invalid_calls": ("share", "Calls that could not be read, or of a tool or argument that does not exist."),
    "episodes/failed_calls": ("share", "Calls in which the tool raised, returned no text, or took too long."),
    "episodes/given_tokens": (
        "tokens",
        "Mean number of tokens that tools returned, turns' marks and rewritten histories included.",
    ),
    "episodes/max_turns": ("share", "Completions that called a tool in their last turn (rollout.max_turns)."),
    "episodes/context_full": ("share", "Completions that had no room for what a tool returned."),
    "policy/loss": ("1", "The objective's value: no measure of progress."),
    "policy/kl": ("nats", "Mean k3 estimate of the KL from the reference, per token."),
    "policy/ratio": (
        "ratio",
        "Mean ratio of the policy to itself before the batch's first update (stale_samples=behaviour: to the sampler).",
    ),
    "policy/ratio_deviation": ("ratio", "Largest |ratio - 1| of a token (with a ratio of completions, of a completion)."),
    "policy/clip_share": (
        "share",
        "Tokens that the clip cut off (above 0.3 steps are too large), or with cispo and topr whose weight it held; 0 on-policy.",
    ),
    "policy/entropy": ("nats", "Mean -log probability of sampled tokens; falling to 0 means collapse."),
    "policy/sampler_mismatch": (
        "nats",
        "Mean |log-probability when sampled - when trained| at the first update: rounding, an adapter's dropout, age with rollout.ahead.",
    ),
    "policy/full_entropy": (
        "nats",
        "Mean exact entropy of the tokens' distributions; only in steps with an entropy bonus.",
    ),
    "policy/entropy_bonus": ("1", "Weight of the entropy bonus in this step: 0 while the entropy is above its floor."),
    "policy/tokens_kept": ("share", "Tokens that the top-entropy share lets take part in the policy's loss."),
    "loss/<component>": ("own", "A number that a loss of your own returns."),
    "policy/sampler_kl": (
        "nats",
        "Mean k3 estimate of the KL of the sampler from the trainer, per token.",
    ),
    "policy/push_probe": (
        "nats",
        "Mean |difference| of log-probabilities of vLLM's probe after a push.",
    ),
    "policy/correction": ("ratio", "Mean weight of the correction for the sampler's mismatch."),
    "policy/correction_cut": ("share", "Tokens whose correction was beyond the cap."),
    "rollout/staleness": (
        "updates",
        "Mean age of the weights that sampled; only with rollout.ahead.",
    ),
    "policy/beta": ("1", "The KL's coefficient in this step; only with algorithm.kl.target."),
    "value/loss": ("reward^2", "Loss of the learned value: half its mean squared error."),
    "value/explained_variance": (
        "1",
        "1 - Var(return - value) / Var(return) before the update: 1 is perfect, 0 a constant, below 0 harmful.",
    ),
    "value/error": ("reward", "Mean of value - return: far from 0, the value is biased."),
    "value/grad_norm": ("1", "Global norm of a separate critic's gradient before clipping."),
    "value/clip_share": ("share", "Tokens whose value the clip held back."),
    "optimizer/learning_rate": ("1", "Learning rate of the step's last update."),
    "optimizer/grad_norm": ("1", "Global norm of the gradient before clipping; of several updates the largest."),
    "optimizer/dropped_updates": ("count", "Updates not made because the gradient was not finite."),
    "optimizer/updates_lost": (
        "share",
        "Weights with a gradient whose update was rounded away for good, in a sample; not measured with stochastic rounding.",
    ),
    "optimizer/loss_scale": ("1", "Factor of the loss before the backward pass; only with model.dtype float16."),
    "updates/loss_<k>": (
        "1",
        "`policy/loss` of update k; these only with updates_per_batch above 1.",
    ),
    "updates/ratio_<k>": ("ratio", "`policy/ratio` of update k."),
    "updates/clip_share_<k>": ("share", "`policy/clip_share` of update k."),
    "updates/kl_<k>": ("nats", "`policy/kl` of update k."),
    "updates/grad_norm_<k>": ("1", "`optimizer/grad_norm` of update k."),
    "time/sample_s": ("s", "Sampling; like every time but the step's, the slowest process's."),
    "time/wait_s": (
        "s",
        "Waiting for completions that are sampled ahead.",
    ),
    "time/score_s": ("s", "Scoring them with the reward functions."),
    "time/learn_s": ("s", "Forward and backward passes."),
    "time/reference_s": ("s", "Log-probabilities of the reference."),
    "time/optimizer_s": ("s", "Optimiser updates."),
    "time/exchange_s": ("s", "Adding up gradients over processes, waiting included; 0 with one."),
    "time/push_s": ("s", "Sending the weights to vLLM, and checking them."),
    "time/step_s": ("s", "The whole step."),
    "speed/sampled_tokens_per_s": ("tokens/s", "Completion tokens sampled per second of sampling."),
    "speed/learnt_tokens_per_s": ("tokens/s", "Completion tokens trained per second of forward and backward."),
    "memory/halvings": (
        "count",
        "Halvings of a pass's token budget in this step, for lack of memory.",
    ),
    "memory/sampling_halvings": (
        "count",
        "Halvings of the sequences sampled at once since the run began or was resumed, in all processes, for lack of memory.",
    ),
    "memory/peak_gib": ("GiB", "Peak memory since the run began or was resumed: of the accelerator, or of the process on CPU."),
    "progress/threads": ("count", "Threads that compute, on a CPU."),
    "progress/epoch": ("epochs", "Passes over the training problems so far."),
    "progress/policy_version": ("updates", "Optimiser steps that the policy has seen."),
}
"""Name -> (unit, meaning). A name with ``<component>`` stands for one name per reward function, with ``<k>`` for one per update."""

EVALUATION_METRICS: dict[str, tuple[str, str]] = {
    "evaluation/<mode>_strict": ("share", "Held-out problems answered right in the place asked for."),
    "evaluation/<mode>_lenient": ("share", "Held-out problems with the right answer anywhere."),
    "evaluation/<mode>_format": ("share", "Held-out problems answered in exactly the form asked for."),
    "evaluation/<mode>_stopped": ("share", "Held-out problems whose answer the model ended by itself."),
    "evaluation/<mode>_tokens": ("tokens", "Mean length of an answer to a held-out problem."),
    "evaluation/<mode>_success": ("share", "Held-out episodes to which the environment gave more than 0."),
    "evaluation/<mode>_reward": ("reward", "Mean reward that the environment gave."),
    "evaluation/<mode>_environment_failed": ("share", "Episodes in which the environment failed, left out of the two above."),
    "evaluation/<mode>_turns": (
        "turns",
        "Mean turns of the policy in a held-out episode; these only with episodes.",
    ),
    "evaluation/<mode>_calls": ("calls", "Mean calls of tools."),
    "evaluation/<mode>_invalid_calls": ("share", "Calls that could not be made."),
    "evaluation/<mode>_failed_calls": ("share", "Calls in which the tool raised, returned no text, or took too long."),
    "evaluation/<mode>_sampled_tokens": ("tokens", "Mean tokens that the policy sampled."),
    "evaluation/<mode>_given_tokens": ("tokens", "Mean tokens that it was given."),
    "evaluation/<mode>_pass_at_<k>": ("share", "Problems of which one of k samples is right, unbiased; with several samples."),
    "evaluation/<mode>_majority_at_<k>": ("share", "Problems whose most frequent of k answers is right; with several samples."),
}
"""What tensorboard, wandb and trackio get of an evaluation; ``<mode>`` is ``greedy`` or ``sampled``. The run's folder has it whole."""


def describe_metric(name: str) -> tuple[str, str] | None:
    """Unit and meaning of a logged name; ``None`` for a name that the table does not know."""
    if name in METRICS:
        return METRICS[name]
    if name.startswith("evaluation/"):
        figure = name.removeprefix("evaluation/").partition("_")[2]
        return EVALUATION_METRICS.get("evaluation/<mode>_" + re.sub(r"_at_\d+$", "_at_<k>", figure))
    if name.startswith("updates/"):
        return METRICS.get(re.sub(r"_\d+$", "_<k>", name))
    families = (known for known in METRICS if known.endswith(_EACH) and name.startswith(known.removesuffix(_EACH)))
    return next((METRICS[family] for family in families), None)
