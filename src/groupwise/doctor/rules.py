"""The table of rules. A rule is a small pure function and the words that explain what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.doctor import episodes, inputs, rehearsal, rewarding, sampling, updates
from groupwise.doctor.findings import Evidence, Finding, Severity

__all__ = ["RULES", "Rule", "Subject"]

Subject = Literal["settings", "problems", "rehearsal", "run"]
"""What a rule's function takes: a ``Config``, a ``ProblemSet``, a ``Rehearsal`` or a ``RunRecord``."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault."""

    name: str
    subject: Subject
    title: str
    severity: Severity
    check: Callable[[Any], Evidence | None]
    meaning: str
    remedy: str
    at_once: bool = False
    """Whether a single step of a run shows it for certain."""

    def examine(self, subject: Any) -> Finding | None:
        evidence = self.check(subject)
        if evidence is None:
            return None
        return Finding(
            self.name, self.title, evidence.severity or self.severity, evidence.summary, self.meaning,
            evidence.remedy or self.remedy, evidence.steps, evidence.numbers, evidence.examples,
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    Rule(
        "rate-too-low", "settings", "Learning rate too low for the precision", "warning", inputs.rate_too_low,
        "AdamW moves a weight by about the learning rate; a bfloat16 has 8 significant bits, so a step much smaller than the "
        "weight is rounded back to where it was, every time: most of what is learnt is thrown away.",
        "Leave optimizer.precision at masters (fp32 copies in the optimiser), or set model.dtype to float32; where memory "
        "forbids both, optimizer.precision=stochastic loses none of it on average.",
    ),
    Rule(
        "rate-too-high", "settings", "Learning rate far above the usual range", "warning", inputs.rate_too_high,
        "Rewards are noisy: a large step follows the noise, the policy collapses within a few steps, and does not recover.",
        "Lower optimizer.learning_rate to 1e-6 (billions of weights) to 2e-5 (a hundred million).",
    ),
    Rule(
        "reward-hacking-unseen", "settings", "Reward hacking would stay unseen", "note", inputs.cannot_see_hacking,
        "The reward is what is trained on; only problems outside training tell whether it stands for what is wanted.",
        "Keep some problems out (data.holdout, or data.eval_source), and set evaluation.every to about a tenth of the steps.",
    ),
    Rule(
        "no-checkpoints", "settings", "A long run that saves nothing before its end", "note", inputs.no_checkpoints,
        "SIGTERM, Ctrl-C and a closed terminal are answered with a checkpoint; SIGKILL, the system's out-of-memory killer, a crash and "
        "a power cut are not, and --resume then starts from the beginning.",
        "Set output.checkpoint_every to a tenth of the steps or so; output.keep_checkpoints bounds the disk space.",
    ),
    Rule(
        "evaluation-cut-shorter", "settings", "Evaluated with a lower token limit than trained", "warning", inputs.evaluation_cut_shorter,
        "Answers that need more tokens are cut before they are given, and count as wrong.",
        "Remove evaluation.max_completion_tokens, or make it at least rollout.max_completion_tokens.",
    ),
    Rule(
        "too-cold", "settings", "Temperature too low for groups to differ", "warning", inputs.hardly_any_chance,
        "What is learnt is the difference within a group; completions that are all the same have none.",
        "Set rollout.temperature to 1, the policy itself; it is also the temperature of the log-probabilities that are trained.",
    ),
    Rule(
        "sampled-distribution-cut", "settings", "Sampled from one distribution, trained on another", "warning",
        inputs.truncated_distribution,
        "The gradient of GRPO assumes that completions come from the policy. Tokens that top-p or top-k never let through are "
        "never compared, and the bias adds up over steps.",
        "Leave rollout.top_p at 1 and rollout.top_k null.",
    ),
    Rule(
        "duplicates", "problems", "Training problems that repeat", "note", inputs.duplicates,
        "A repeated problem weighs more than others, and is memorised sooner.",
        "Remove the repeats; `groupwise data inspect` shows the rows.",
    ),
    Rule(
        "contradictions", "problems", "One question, different reference answers", "warning", inputs.contradictions,
        "The policy is punished for a right answer, and the groups of such problems teach noise.",
        "Correct or remove these rows.",
    ),
    Rule(
        "leakage", "problems", "Held-out problems are in the training data", "warning", inputs.leakage,
        "Accuracy on them shows what was memorised. Only questions that are the same letter for letter are kept apart by the split.",
        "Remove these rows from the training source, or judge by another set (data.eval_source).",
    ),
    Rule(
        "reward-fails", "rehearsal", "A reward function fails", "critical", rehearsal.reward_fails,
        "It raised, hung or returned something other than a number, on a worked answer, a wrong, an empty or a nonsense one. A "
        "policy writes all of these.",
        "Fix the function: it must return one number (or None) for any text.",
    ),
    Rule(
        "reward-blind", "rehearsal", "The reward does not tell right from wrong", "warning", rehearsal.blind_reward,
        "The policy learns what is paid. Where right answers are not paid more, they are not learnt.",
        "Check that the function looks where prompt.system asks the answer to stand, and that weights do not cancel out.",
    ),
    Rule(
        "end-unpaid", "rehearsal", "No reward minds whether an answer ends", "note", rehearsal.unpaid_end,
        "A policy that ends its answers usually goes on to do so. At a high rate one update can take that away, and where nothing "
        "pays for the end no later one brings it back.",
        "Add a function that minds what follows the answer: strict_xml, length, overlong, or accuracy with in_format. Watch "
        "completions/stop_rate.",
    ),
    Rule(
        "answer-does-not-fit", "rehearsal", "Worked answers longer than the token limit", "warning", rehearsal.answer_too_long,
        "A policy that reasons as the data do is cut before its answer, scores as wrong, and learns to be brief instead.",
        "Raise rollout.max_completion_tokens.",
    ),
    Rule(
        "judge-reads-too-little", "rehearsal", "The reward model cannot read all of a completion", "note", rehearsal.cut_for_the_judge,
        "What does not fit loses its beginning: the question first, which a judge of the answer needs.",
        "Name a reward model with a longer context, raise its max_input_tokens, lower rollout.max_completion_tokens, or leave the "
        "system prompt out for it (show_system_prompt: false).",
    ),
    Rule(
        "end-token-untaught", "rehearsal", "The end token is not the one that ends a turn", "warning", rehearsal.untaught_end,
        "A policy ends a completion with the token that it has seen there. Where another one counts as the end, completions run on "
        "to the limit.",
        "Use the instruct model's own tokenizer and template, or set eos_token in its tokenizer_config.json to the token that ends a turn.",
    ),
    Rule(
        "memory-short", "rehearsal", "Less memory free than the run will need", "warning", rehearsal.memory_short,
        "The plan counts completions that all reach the limit. A process that takes more than the machine has gets killed, mostly "
        "late in the run. On a GPU passes, and sequences at once, are halved, which is slower; where that does not help the run ends.",
        "Free memory, or change the settings that `groupwise plan` suggests.",
    ),
    Rule(
        "reward-constant", "run", "A reward function gives everybody the same", "warning", rewarding.constant,
        "A score that never varies cancels out of every advantage: it teaches nothing, and usually means that the function never "
        "finds what it looks for.",
        "Try the function on one of the completions below; check names of columns, tags and letter case.",
    ),
    Rule(
        "reward-failing", "run", "A reward function, or the environment, fails", "warning", rewarding.failing,
        "Such groups are left out of the update (rewards.on_error: skip): they cost their sampling and teach nothing, and what is "
        "left out is seldom a fair sample.",
        "The terminal names function or environment, problem and cause of each. Fix the function, or raise rewards.timeout_s if it is "
        "slow; of an environment, fix its step, or raise rollout.tool_timeout_s.",
        at_once=True,
    ),
    Rule(
        "judged-in-part", "run", "The reward model judges what it has not read", "warning", rewarding.judged_in_part,
        "Prompt and completion together are longer than the reward model's limit, and it sees them without their beginning: the "
        "question goes first, then the start of the answer. Its scores stand for less and less as completions grow.",
        "Name a reward model with a longer context, raise its max_input_tokens, or lower rollout.max_completion_tokens.",
    ),
    Rule(
        "strict-misses-right-answers", "run", "Right answers are paid as wrong", "warning", rewarding.disagreeing_verdicts,
        "The strict reading, by which rewards and accuracy go, does not find an answer that is there. The policy is taught that its "
        "reasoning is wrong when only the form is.",
        "Look at the completions below: ask for the form in prompt.system, add a format reward, a warm start, or a lenient reward "
        "(function: accuracy, arguments: {lenient: true}).",
    ),
    Rule(
        "reward-against-the-answer", "run", "Wrong completions earn more than right ones", "warning", rewarding.against_the_answer,
        "Within a group only the order of rewards counts: here it pushes towards wrong answers.",
        "Raise the weight of the correctness reward above what all other functions together can give.",
    ),
    Rule(
        "reward-exploding", "run", "Rewards grow without bound", "warning", rewarding.exploding,
        "A reward that can always be raised is being raised, usually by length or repetition; everything else becomes small beside it.",
        "Bound the function, such as min(score, limit), or hold what it returns: its `clip`, or rewards.clip for the sum. `normalise: std` "
        "where its size drifts. Or lower its weight.",
    ),
    Rule(
        "reward-saturated", "run", "The problems are solved: nothing left to learn", "note", rewarding.saturated,
        "Groups in which everything is right have no variance, and no gradient.",
        "Stop here, or go on with harder problems.",
    ),
    Rule(
        "no-variance", "run", "Hardly a group has anything to learn from", "critical", rewarding.no_variance,
        "Where all completions of a group score the same every advantage is 0. Usually the policy never succeeds, or the reward "
        "cannot tell degrees of failure apart.",
        "Easier problems, a stronger model, warm_start.steps, a reward with degrees (format), or more completions per prompt.",
    ),
    Rule(
        "reward-hacking", "run", "The reward rises and the accuracy falls", "critical", rewarding.hacking,
        "The policy has found something that is paid and is not what you want.",
        "Read the completions below for what they have in common; correct the reward; start again from before it began. "
        "algorithm.kl holds the policy nearer to where it started.",
    ),
    Rule(
        "format-without-answer", "run", "The form is learnt, the answer is not", "warning", sampling.format_without_answer,
        "The format reward is the easier one to earn, and once every completion earns it, what is left is too seldom right to learn from.",
        "Easier problems or a stronger model first; more completions per prompt, so that some are right. "
        "Read what is paid: tags that are only recited should earn nothing.",
    ),
    Rule(
        "answers-lost", "run", "Fewer answers are right than before training", "warning", rewarding.lost_answers,
        "A format reward is earned sooner than a right answer, so the first updates teach the form alone, mostly by shorter reasoning. "
        "Lost answers may come back once right ones are paid often enough. Otherwise the steps are too large, or the reward pays for "
        "something else.",
        "Wait for another evaluation. Where they do not come back, and some answers are right in the form before training: no reward for "
        "the form (a lower weight changes nothing where all of a group are wrong, since algorithm.advantage.scale group_std divides it "
        "out). Else a lower optimizer.learning_rate, more optimizer.warmup_steps, or a system prompt with which the untrained "
        "model is in the form more often.",
    ),
    Rule(
        "mode-collapse", "run", "One answer to every problem", "critical", sampling.collapsed_texts,
        "The policy has found one text that scores well enough, and no longer looks at the question.",
        "Go back to an earlier checkpoint; lower optimizer.learning_rate; see whether the reward pays for something without a right "
        "answer; algorithm.entropy.bonus of 0.001; rollout.temperature at 1; a KL (algorithm.kl).",
    ),
    Rule(
        "entropy-collapse", "run", "Entropy collapsed without a gain in accuracy", "warning", sampling.entropy_collapse,
        "The policy writes nearly the same whatever is drawn, so groups stop differing, and learning stops.",
        "Lower optimizer.learning_rate; with several updates a batch set algorithm.loss.epsilon_high to 0.28; "
        "algorithm.entropy.bonus of 0.001; rollout.temperature at 1 if it is lower; a KL (algorithm.kl).",
    ),
    Rule(
        "never-stops", "run", "No completion ever ends by itself", "critical", sampling.never_stops,
        "Either the model does not know the token that counts as its end (a base model, a wrong template or tokenizer), or the limit is "
        "far too low for it.",
        "See whether the completions below are finished in substance. If so: an instruct model, prompt.style chat, or a warm "
        "start. If not: raise rollout.max_completion_tokens.",
    ),
    Rule(
        "stops-stopping", "run", "The policy unlearns to stop", "warning", sampling.stops_stopping,
        "Ending was usual and is no longer. Elsewhere a masked end token does this; here the end token is trained, so that length or "
        "going on must be paid.",
        "Look at which reward function gains by length; add a `length` reward, or score cut completions 0 for correctness.",
    ),
    Rule(
        "truncated", "run", "Many completions are cut at the limit", "warning", sampling.cut_short,
        "A cut completion is scored without its end, mostly as wrong, so that the policy is taught to be brief rather than right.",
        "Raise rollout.max_completion_tokens if they are still reasoning; a `length` reward if they repeat themselves.",
    ),
    Rule(
        "talks-on", "run", "Completions go on into the next turn", "critical", sampling.talks_on,
        "The end of the turn was sampled, or the next turn begun, and not taken for the end: a wrong end token, or a prompt style "
        "that the model was not trained with.",
        "prompt.style chat with the model's own template; check eos_token in its tokenizer_config.json.",
    ),
    Rule(
        "goes-on", "run", "Completions answer and do not end", "warning", sampling.goes_on,
        "Nothing tells the policy to stop where it is done. Common causes: a prompt without the chat template; rewards that ignore what "
        "follows the answer; supervised training that masked the end token as padding (pad = eos).",
        "prompt.style chat; a reward that minds what follows (strict_xml, or length); warm_start.steps, which trains the end token; the "
        "token that ends a turn as eos_token in tokenizer_config.json. A higher limit does not help.",
    ),
    Rule(
        "length-creep", "run", "Longer and longer, not better", "warning", sampling.length_creep,
        "Length is drifting without being paid back in right answers. `sequence_mean` itself favours long wrong completions, since "
        "each of their tokens weighs less (arXiv 2503.20783).",
        "algorithm.preset dr_grpo or dapo; a `length` reward; see whether another reward pays for length.",
    ),
    Rule(
        "kl-above-band", "run", "The policy is far from the reference", "warning", updates.kl_above_band,
        "Above about 0.1 nats per token the policy's text differs much from the reference's; what it knew may be lost.",
        "Raise algorithm.kl.beta, or let algorithm.kl.target (0.05 to 0.1) steer it; lower optimizer.learning_rate; or renew the "
        "reference (algorithm.kl.reference_updates).",
    ),
    Rule(
        "kl-below-band", "run", "The KL penalty holds the policy at its start", "note", updates.kl_below_band,
        "The KL term and the small steps leave the policy next to its reference, and the reward does not move.",
        "Lower algorithm.kl.beta (none at all, algorithm.kl=null, is common), or raise optimizer.learning_rate.",
    ),
    Rule(
        "kl-negative", "run", "A negative KL, which is impossible", "critical", updates.negative_kl,
        "The logged estimate exp(d) - 1 - d is never negative. Log-probabilities of policy and reference do not belong to the same tokens.",
        "This is a defect and not a setting: please report it, with the run's config.yaml and metrics.jsonl.",
        at_once=True,
    ),
    Rule(
        "ratio-off", "run", "The policy that learns is not the one that sampled", "warning", updates.ratio_off,
        "The ratio weighs what was sampled by what is being trained. Far from 1 the clip throws most of the gradient away, and what "
        "is left points elsewhere.",
        "Lower optimizer.learning_rate or algorithm.updates_per_batch. With one update a batch it must be 1: report it.",
        at_once=True,
    ),
    Rule(
        "not-finite", "run", "Loss, gradient or reward is not a number", "critical", updates.not_finite,
        "A NaN or infinity came up. The update was not made, and the step is lost; five in a row end the run.",
        "Lower optimizer.learning_rate, set optimizer.max_grad_norm to 0.1 and optimizer.warmup_steps to a tenth of the steps; look for "
        "rewards of extreme size, and hold them by rewards.clip.",
        at_once=True,
    ),
    Rule(
        "gradient-spikes", "run", "The gradient jumps", "note", updates.spikes,
        "A single batch had ten times the usual gradient; clipping by norm (optimizer.max_grad_norm) bounds the step, not its direction.",
        "Read that step's completions. If it happens often: a lower learning rate, more optimizer.warmup_steps, larger batches.",
    ),
    Rule(
        "loss-spikes", "run", "The loss jumps", "note", updates.loss_spikes,
        "On-policy the policy's loss stays near 0; a jump means that the ratio left 1, or that a value's targets were far off.",
        "Read that step's completions. If it happens often: a lower optimizer.learning_rate, or fewer algorithm.updates_per_batch.",
    ),
    Rule(
        "updates-lost", "run", "Updates are rounded away", "warning", updates.updates_lost,
        "A step smaller than half the distance to the next number that the weight's format has leaves the weight where it was, every "
        "time: what is learnt is thrown away.",
        "optimizer.precision masters (or stochastic, where memory forbids), model.dtype float32, or a higher optimizer.learning_rate.",
    ),
    Rule(
        "no-movement", "run", "Updates that change nothing", "critical", updates.no_movement,
        "Gradients are computed and steps are made, yet the policy is still the reference: updates are rounded away, or they go "
        "to weights that the policy does not use.",
        "optimizer.precision at masters, a higher optimizer.learning_rate; with an adapter, see that it is switched on.",
    ),
    Rule(
        "sampler-mismatch", "run", "Sampler and trainer disagree", "warning", sampling.sampler_mismatch,
        "The same token has another probability when it is sampled than when it is trained. The update is then off-policy without "
        "knowing it, which can ruin a run slowly.",
        "rollout.engine transformers shows whether the sampler differs; rollout.top_p at 1 and top_k null.",
    ),
    Rule(
        "sampler-stale", "run", "Updates do not reach the sampler", "critical", sampling.stale_sampler,
        "Completions still come from old weights, as when an adapter is trained and the engine samples without it. Every "
        "step learns from older samples.",
        "Report it for a built-in engine. For an engine of your own: take the weights, adapters merged, at every refresh.",
    ),
    Rule(
        "correction-at-its-cap", "run", "More mismatch than the correction can put right", "warning", updates.correction_cut,
        "The correction weighs each token by how much likelier the trainer finds it than the sampler did. Where the weight is capped the "
        "gradient stays off-policy, and is none of its own.",
        "Look for the cause rather than raise algorithm.correction.cap: another engine or precision (rollout.engine, "
        "rollout.quantization).",
    ),
    Rule(
        "samples-too-old", "run", "Samples too old to learn from", "warning", updates.samples_too_old,
        "Batches are sampled ahead of time, by older weights. What corrects for that is bounded, and here it is at its bound for so "
        "many tokens that the gradient is no longer the one of fresh samples.",
        "Lower rollout.ahead, optimizer.learning_rate or algorithm.updates_per_batch: what counts is how far the weights move meanwhile.",
    ),
    Rule(
        "value-harmful", "run", "The learned value is worse than none", "warning", updates.value_harmful,
        "Advantages are returns less the value. One that explains less than a constant adds noise to every token's advantage.",
        "Raise algorithm.value.learning_rate, set algorithm.advantage.lam to 1, which does not bootstrap from the value, or take a group "
        "baseline (algorithm.advantage.type group).",
    ),
    Rule(
        "value-biased", "run", "The learned value is off in one direction", "warning", updates.value_biased,
        "Whatever the policy does, it looks better (or worse) than expected, and is pushed up (or down) as a whole.",
        "Raise algorithm.value.learning_rate; see whether algorithm.value.clip holds the value back (value/clip_share).",
    ),
    Rule(
        "kl-target-missed", "run", "The adaptive KL does not reach its target", "warning", updates.kl_target_missed,
        "beta has been changed a hundredfold and the KL has not followed: something else moves the policy (or holds it).",
        "A lower optimizer.learning_rate where the KL is too high, a higher one where it is too low; or another algorithm.kl.target.",
    ),
    Rule(
        "refills-exhausted", "run", "Refilling does not find groups to learn from", "warning", updates.refills_exhausted,
        "Problems are too hard or too easy for this policy: nearly all of what is sampled costs time and teaches nothing.",
        "Problems of another difficulty, a reward with degrees, or more rollout.completions_per_prompt; more rollout.refill_rounds "
        "only where a few more would do.",
    ),
    Rule(
        "reward-clipped", "run", "A reward is at its clip", "warning", updates.reward_clipped,
        "Scores beyond the clip are all the same, so that their groups have no variance: the reward is saturated.",
        "Widen the function's clip, or normalise its scores; where it is a model's score that only rises, look for reward hacking.",
    ),
    Rule(
        "reward-processes-die", "run", "A reward function's processes die", "note", updates.reward_processes_killed,
        "Each takes its time limit, and the completions that it was asked about have no score.",
        "Raise rewards.timeout_s if the function is slow; fix it if it crashes or exhausts memory on what the policy writes.",
    ),
    Rule(
        "leakage-seen", "run", "Judged by problems that were trained on", "warning", inputs.leakage_in_run,
        "These prompts stand both in completions.jsonl and in the evaluations: their accuracy shows memory.",
        "Remove them from the training source, or judge by another set (data.eval_source).",
        at_once=True,
    ),
    Rule(
        "never-calls", "run", "Tools are there and hardly ever called", "warning", episodes.never_calls,
        "A completion without a call is like one without tools, and what is never tried is never learnt.",
        "A warm start with played examples (warm_start, the column script); see that the prompt tells of the tools, and that "
        "rollout.call_format is the one that the model was trained with (json for Qwen2.5-Coder, whose template says otherwise). If calls "
        "were usual before: see whether they are paid.",
    ),
    Rule(
        "calls-in-a-loop", "run", "The same call again and again", "warning", episodes.calls_in_a_loop,
        "The policy does not take up what it is told: turns and tokens are spent, and the episode ends at a limit.",
        "Read the results below: does the tool say what is wrong with a call, and does the policy know how to answer? A warm start with "
        "examples that go on to the answer; a reward that takes off a little for each call; a lower rollout.max_turns.",
    ),
    Rule(
        "invalid-calls", "run", "Calls that cannot be made", "warning", episodes.invalid_calls,
        "Of a tool or an argument that does not exist, or not in the form of rollout.call_format. Nothing is called, and the policy is "
        "told why.",
        "A warm start in the form that is read; fewer arguments, and plainer ones; a reward that takes off for invalid calls (`calls`, "
        "failure: invalid). If the share rises: a lower optimizer.learning_rate.",
    ),
    Rule(
        "tool-errors", "run", "Tools fail", "warning", episodes.tool_errors,
        "The policy is told the error and is scored all the same: it learns from the tool's faults, or unlearns to call it.",
        "Fix the tool where its error is a defect; let it return a sentence where the question was a bad one; raise "
        "rollout.tool_timeout_s if it is slow, or lower rollout.concurrent_tool_calls if it cannot serve so many.",
    ),
    Rule(
        "reward-without-tool", "run", "The reward comes without the tool", "note", episodes.pays_without_the_tool,
        "Advantages compare completions of one problem: where those without a call score higher, calling is unlearnt.",
        "That may be right, where the policy knows the answer. If not: see what pays (a reward for length, or for a form in which calls do "
        "not stand), problems that cannot be done without the tool, or a small reward for a call that worked.",
    ),
    Rule(
        "loss-zero-at-start", "run", "The loss is 0 at the start, and that is right", "normal", updates.first_loss_is_zero,
        "The advantages of a group add up to 0 and at the first update the ratio is exactly 1, so the objective's value is 0 whatever "
        "the policy does. Its gradient is not: loss is no measure of progress in GRPO.",
        "Nothing to do. Watch reward/mean and accuracy/strict.",
    ),
)  # fmt: skip
