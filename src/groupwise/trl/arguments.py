"""Every argument of TRL's ``GRPOConfig`` (1.16), with its default and what becomes of it here: one table, from which the config
class, its checks and the list of ``python -m groupwise.trl`` are made. A test compares it with TRL's own fields.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.engines.base import COLDEST

__all__ = ["ARGUMENTS", "REMOVED", "RULES", "Argument", "Fate", "render_table"]

Fate = Literal["honoured", "harmless", "refused"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. ``text`` is what it does here (honoured; empty where that is what TRL's documentation says), why it changes nothing
    (harmless), or what to do instead (refused)."""

    name: str
    kind: str
    """Its type, as a key of ``KINDS``."""
    default: Any
    """TRL's."""
    fate: Fate
    text: str
    of_trl: bool = True
    """Among TRL 1.16's fields with transformers 5; others are in scripts written for earlier ones, or groupwise's own."""
    values: tuple[Any, ...] = ()
    """All that it may be; empty where that is no list."""
    rule: str = "a number"
    """What a number must be, as a key of ``RULES``."""
    late: bool = False
    """Whether it may be set after the trainer was made: ``train()`` reads it."""
    warns: bool = False
    """Whether ``text`` is said where it is not at its default."""

    @property
    def type(self) -> Any:
        return KINDS[self.kind]


KINDS: Mapping[str, Any] = {
    "int": int, "float": float, "str": str, "bool": bool,
    "int?": int | None, "float?": float | None, "str?": str | None, "bool?": bool | None,
    "dict?": dict | str | None, "names?": list[str] | str | None, "names": list[str], "floats?": list[float] | None,
    "number?": int | str | None, "flag": bool | str,
}  # fmt: skip

RULES: Mapping[str, Callable[[float], bool]] = {
    "a number": lambda x: not math.isnan(x),
    "above 0": lambda x: x > 0,
    "1e-6 or more": lambda x: x >= COLDEST,
    "0 or more": lambda x: x >= 0,
    "0 to 1": lambda x: 0 <= x <= 1,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "0 or more and below 1": lambda x: 0 <= x < 1,
    "1 or more": lambda x: x >= 1,
    "2 or more": lambda x: x >= 2,
}

# name type: rule, or the values that it may have = default; others with the same text | fate | text. Further lines are indented. Fates:
# h(onoured, as TRL's documentation says where there is no text), - (harmless), x (refused); ! where the text is a warning; * where train()
# reads it, so that it may be set on ``trainer.args`` until then.
_TABLE = """
output_dir str? = None; run_name str? = None; project str = 'huggingface' | h*
num_train_epochs float = 3.0; learning_rate float: 0 or more = 1e-06; lr_scheduler_kwargs dict? = None; warmup_steps float: 0 or more = 0;
    torch_empty_cache_steps int? = None | h*
logging_strategy str: 'no', 'steps', 'epoch' = 'steps'; logging_steps float = 10; logging_first_step bool = False | h*
eval_strategy str: 'no', 'steps', 'epoch' = 'no'; eval_steps float? = None; eval_delay float: 0 or more = 0; eval_on_start bool = False;
    greater_is_better bool? = None | h*
save_steps float = 500; save_total_limit int? = None; save_only_model bool = False | h*
gradient_accumulation_steps int: above 0 = 1; per_device_eval_batch_size int: above 0 = 8 | h
weight_decay float: 0 or more = 0.0; adam_beta1 float: 0 or more and below 1 = 0.9; adam_beta2 float: 0 or more and below 1 = 0.999;
    adam_epsilon float: above 0 = 1e-08; max_grad_norm float: 0 or more = 1.0 | h
seed int = 42; full_determinism bool = False; tf32 bool? = None; use_cpu bool = False; ddp_timeout int: above 0 = 1800; trust_remote_code
    bool = False | h
log_level str: 'passive', 'debug', 'info', 'warning', 'error', 'critical' = 'passive'; disable_tqdm bool? = None; num_completions_to_print
    int? = None | h
report_to names? = 'none'; trackio_space_id str? = None; trackio_bucket_id str? = None; trackio_static_space_id flag = None | h
shuffle_dataset bool? = True; remove_unused_columns bool? = False; chat_template_kwargs dict? = None | h
num_generations int?: 2 or more = 8; num_generations_eval int?: 1 or more = None; generation_batch_size int?: 1 or more = None;
    steps_per_generation int?: 1 or more = None | h
max_completion_length int?: above 0 = 512; max_tool_calling_iterations int?: 0 or more = None; mask_truncated_completions bool = False | h
temperature float: 1e-6 or more = 1.0; top_p float: above 0 and at most 1 = 1.0; top_k int = 0; min_p float?: 0 to 1 = None | h
num_iterations int: above 0 = 1; epsilon float: 0 or more = 0.2; delta float? = None | h
sapo_temperature_neg float: above 0 = 1.05; sapo_temperature_pos float: above 0 = 1.0 | h
vespo_k_pos float = 2.0; vespo_k_neg float = 3.0; vespo_lambda_pos float: above 0 = 3.0; vespo_lambda_neg float: above 0 = 2.0 | h
reward_weights floats? = None; multi_objective_aggregation str: 'sum_then_normalize', 'normalize_then_sum' = 'sum_then_normalize';
    scale_rewards str: 'group', 'batch', 'none', True, False = 'group' | h
beta float: 0 or more = 0.0; use_bias_correction_kl bool = True; sync_ref_model bool = False; ref_model_mixup_alpha float: above 0 and at
    most 1 = 0.6; ref_model_sync_steps int: above 0 = 512 | h
off_policy_mask_threshold float?: 0 or more = None; top_entropy_quantile float: 0 to 1 = 1.0 | h
entropy_coef float: 0 or more = 0.0; use_adaptive_entropy bool = False; entropy_coef_min float = 0.0; entropy_coef_max float = 1.0;
    entropy_coef_delta float = 0.005; entropy_target float = 0.2 | h
per_device_train_batch_size int: above 0 = 8 | h | Completions of a process in one micro-step; several may be computed at once or in parts.
max_steps int = -1 | h* | Optimiser steps; wins over `num_train_epochs`. A stream (`IterableDataset`) needs it.
lr_scheduler_type str: 'linear', 'cosine', 'cosine_with_restarts', 'polynomial', 'constant', 'constant_with_warmup', 'inverse_sqrt',
    'cosine_with_min_lr', 'cosine_warmup_with_min_lr', 'warmup_stable_decay' = 'linear' | h* | Any name of transformers' `get_scheduler` but
    `reduce_lr_on_plateau` and `greedy`.
optim str: 'adamw_torch', 'adamw_torch_fused', 'paged_adamw_32bit', 'adamw_8bit', 'adamw_bnb_8bit', 'paged_adamw_8bit' = 'adamw_torch_fused'
    | h | AdamW as `adamw_*` and `paged_adamw_*`, 8-bit too; others: `optimizers=(optimizer, None)`.
optim_args str? = None | x | Pass `optimizers=(optimizer, None)` with an optimiser made as you want it.
optim_target_modules names? = None | x | Remove it: it belongs to GaLore and APOLLO, which are not here.
average_tokens_across_devices bool = True | - | Losses are always divided by counts over all processes.
label_smoothing_factor float = 0.0 | - | GRPO has no labels, in TRL neither.
fp16 bool = False | h | A model loaded by name computes in float16, its loss scaled, with fp32 master weights.
bf16 bool? = None | h | A model loaded by name computes in bfloat16 with fp32 master weights; False without `fp16`: in float32.
bf16_full_eval bool = False; fp16_full_eval bool = False | x | Leave it out: evaluation computes in the numbers of training.
gradient_checkpointing bool = True | h | Activations are recomputed in the backward pass. Sampling keeps its cache.
gradient_checkpointing_kwargs dict? = None | - | Checkpointing is always the non-reentrant kind; gradients are the same.
torch_compile bool = False; torch_compile_backend str? = None; torch_compile_mode str? = None | x | Leave it out: nothing is compiled.
use_liger_kernel bool = False | -! | Liger's kernels are not used: the output head goes in tiles anyway.
liger_kernel_config dict? = None | - | Liger's kernels are not used.
use_cache bool = False | - | Sampling always has a KV cache, learning never.
neftune_noise_alpha float? = None | x | Leave it out: noise would make the sampled policy another than the trained one.
auto_find_batch_size bool = False | x | Lower `per_device_train_batch_size` and raise `gradient_accumulation_steps` (TRL refuses it too).
log_on_each_node bool = True; log_level_replica str = 'warning' | - | The first process logs.
logging_nan_inf_filter bool = True | - | An update whose gradient is not finite is dropped, and its loss left out of the log.
include_num_input_tokens_seen flag = 'no' | x | Leave it out: `num_tokens` is always logged.
prediction_loss_only bool = False | - | GRPO's evaluation returns no predictions, in TRL neither.
eval_do_concat_batches bool = True; eval_use_gather_object bool = False; eval_accumulation_steps int? = None | - | GRPO's evaluation returns
    no predictions.
include_for_metrics names = []; batch_eval_metrics bool = False | x | Leave it out: there is no `compute_metrics`; write a reward function
    with weight 0 instead.
save_strategy str: 'no', 'steps', 'epoch' = 'steps' | h* | `no`, `steps` or `epoch`; for `best`, compare `state.log_history` yourself.
save_on_each_node bool = False | - | The first process saves.
enable_jit_checkpoint bool = False | x | Leave it out and set `save_steps`.
push_to_hub bool = False | x | Leave it out, and upload the folder of `save_model()` with `hf upload`.
hub_token str? = None; hub_private_repo bool? = None; hub_strategy str = 'every_save'; hub_always_push bool = False; hub_revision str? =
    None | - | Only matters with `push_to_hub`.
hub_model_id str? = None | - | `trainer.hub_model_id`; only matters with `push_to_hub`.
load_best_model_at_end bool = False | x | Keep all checkpoints and take the one that `state.log_history` shows to be best.
metric_for_best_model str? = None | h* | The metric of evaluation that `state.best_metric` follows, for `EarlyStoppingCallback` too.
ignore_data_skip bool = False | x | Leave it out: the order of prompts is a function of seed and epoch, so that resuming skips nothing.
restore_callback_states_from_checkpoint bool = False | x | Leave it out and let your callback keep its own state.
data_seed int? = None | - | TRL orders GRPO's prompts by `seed` too.
accelerator_config dict? = None | x | Leave it out: groupwise divides the prompts among the processes.
parallelism_config dict? = None | x | Leave it out: replicas, FSDP2 or ZeRO by the configuration of `accelerate launch`.
dataloader_drop_last bool = False | - | A batch of prompts is always whole, in TRL too.
dataloader_num_workers int = 0 | - | Prompts are read in this process; `get_train_dataloader()` has as many.
dataloader_pin_memory bool = True; dataloader_persistent_workers bool = False; dataloader_prefetch_factor int? = None;
    dataloader_multiprocessing_context str? = None; dataloader_in_order bool = True | - | Prompts are read in this process.
label_names names? = None | - | GRPO has no labels.
train_sampling_strategy str = 'random' | - | `shuffle_dataset` decides, in TRL too.
length_column_name str = 'length' | - | Only matters for grouping by length, which GRPO has not, in TRL neither.
ddp_find_unused_parameters bool? = None; ddp_bucket_cap_mb int? = None; ddp_broadcast_buffers bool? = None; ddp_static_graph bool? = None |
    - | There is no `DistributedDataParallel`: gradients are added up once in an optimiser step.
ddp_backend str? = None | - | NCCL between GPUs, gloo between CPUs.
fsdp str? = None; fsdp_config dict? = None | x | Leave it out, and start the script by `accelerate launch --config_file
    launch/fsdp2-8gpu.yaml`.
deepspeed dict? = None | x | Leave it out, and start the script by `accelerate launch --config_file launch/zero3-8gpu.yaml`.
debug names? = '' | x | Leave it out: an update that is not finite is dropped and reported.
skip_memory_metrics bool = True | x | Leave it at True.
do_train bool = False | - | A flag for scripts; the trainer does not read it, transformers' neither.
do_eval bool = False | - | A flag for scripts; `eval_strategy` decides, and sets it.
do_predict bool = False | - | A flag for scripts; the trainer does not read it.
resume_from_checkpoint str? = None | - | A flag for scripts: pass it to `train(resume_from_checkpoint=...)`.
local_rank int = -1 | - | The launcher's environment says it.
model_init_kwargs dict? = None | h | `dtype`, `revision`, `attn_implementation`, `quantization_config`, `trust_remote_code`; `use_cache` and
    `device_map="auto"` change nothing; not others.
router_aux_loss_coef float?: None, 0.0 = None | h | 0.0 only: mixture-of-experts models must say so, since their auxiliary loss is not here.
disable_dropout bool = False | h | Dropout of the base model never acts here; True silences an adapter's too.
cast_lm_head_to_fp32 bool = False | -! | `bf16=False` computes all in float32; else the head is bfloat16, its softmax float32.
ds3_gather_for_generation bool = True | - | With ZeRO-3 the weights are whole while they sample.
pad_to_multiple_of number? = 'auto' | - | Nothing is padded.
generation_kwargs dict? = None | h | `do_sample=True` and what has an argument of its own, such as `min_p`; not others.
repetition_penalty float: above 0 = 1.0 | h | As in transformers, in sampling alone; sampled by the model's own module, which is slower.
cache_implementation str? = None | x | Leave it out: the engine has its own cache.
use_vllm bool = False | h! | Colocated: groupwise's own engine samples in its place, over the trained weights.
vllm_mode str = 'colocate' | h | `colocate`; with `use_vllm`, `server` is refused.
vllm_model_impl str = 'vllm'; vllm_enable_sleep_mode bool = False; vllm_server_base_url str? = None; vllm_server_host str = '0.0.0.0';
    vllm_server_port int = 8000; vllm_server_timeout float = 240.0; vllm_group_port int = 51216; vllm_gpu_memory_utilization float = 0.3;
    vllm_tensor_parallel_size int = 1 | - | Of vLLM, which does not run here.
vllm_max_model_length int? = None | -! | Of vLLM, which does not run here: prompts and completions have the model's whole context.
vllm_importance_sampling_correction bool = True; vllm_importance_sampling_mode str: 'sequence_mask', 'sequence_truncate', 'token_mask',
    'token_truncate' = 'sequence_mask'; vllm_importance_sampling_clip_max float? = 3.0; vllm_importance_sampling_clip_min float? = None;
    vllm_importance_sampling_cap float? = None | h | Acts with `use_vllm` beside `top_p`, `top_k`, `min_p`, `repetition_penalty` or
    `rollout_func`, and with `rollout_quantization`; else what samples is what is trained, and the ratio is 1.
vllm_structured_outputs_regex str? = None | - | With `use_vllm` it is refused: no engine here is held to a pattern.
epsilon_high float?: 0 or more = None | h | Upper clip range; with `loss_type="cispo"` the largest weight, by default `epsilon` as in TRL.
importance_sampling_level str: 'token', 'sequence', 'sequence_token' = 'token' | h | `sequence` is GSPO, and `sequence_token` the form of it
    in `trl.experimental.gspo_token`.
loss_type str: 'grpo', 'dapo', 'dr_grpo', 'bnpo', 'cispo', 'luspo', 'sapo', 'vespo' = 'dapo' | h | `grpo`, `dapo`, `dr_grpo`, `bnpo`,
    `cispo`, `luspo`, `sapo`, `vespo`; beyond TRL `gmpo`, `dppo`, `reinforce`, a registered name, or `my_loss.py:loss`.
log_completions bool = False | h | Prints completions and writes them to `completions/*.parquet` under `output_dir`.
log_multimodal bool = True | - | There is text only.
log_unique_prompts bool = False | - | In TRL it thins a table sent to wandb; here completions go to files, whole.
log_completions_hub_repo str? = None | x | Leave it out, and upload `completions/` yourself.
use_transformers_continuous_batching bool = False; use_transformers_paged bool = False | -! | groupwise's own engine samples, and batches
    continuously.
transformers_continuous_batching_config dict? = None | - | Only matters with `use_transformers_continuous_batching`.
"""

_FORMER = """
warmup_ratio float: 0 to 1 = 0.0 | h* | Share of the run that is warmup (transformers 4; now a `warmup_steps` below 1).
logging_dir str? = None | h | Folder of the TensorBoard callback, unless the variable TENSORBOARD_LOGGING_DIR names one.
no_cuda bool = False | h | The same as `use_cpu`.
overwrite_output_dir bool = False | - | Nothing in `output_dir` is removed.
save_safetensors bool = True | x | Leave it at True: weights are always written as safetensors.
group_by_length bool = False | - | GRPO has its own order of prompts, in TRL too.
include_tokens_per_second bool = False | x | Leave it out: `num_tokens` and `step_time` are logged.
max_prompt_length int? = None | x | Leave it out, as in TRL since 1.0, and filter the data set for prompts that are too long.
use_liger_loss bool = False | x | Leave it out: the output head goes in tiles anyway.
"""


_OWN = """
loss_settings dict? = None | h | groupwise's own: settings of a `loss_type` beyond TRL, such as `{"epsilon": 0.3}` of `gmpo`.
advantage_type str?: None, 'group', 'maxrl', 'gdpo' = None | h | groupwise's own, in place of `scale_rewards`: `group`, `maxrl`, `gdpo`,
    a registered name, or `my_advantage.py:advantage`.
advantage_settings dict? = None | h | groupwise's own: settings of `advantage_type`, such as `{"baseline": "leave_one_out"}` of `group`.
rollout_quantization str?: None, '8bit' = None | h | groupwise's own: `8bit` samples for training with weights rounded to 8 bits, on
    CPUs. Losses are multiplied for it as `vllm_importance_sampling_mode` says (`token_truncate` is for this), if
    `vllm_importance_sampling_correction` is on.
"""


def _read(table: str, of_trl: bool) -> Iterator[Argument]:
    fates: dict[str, Fate] = {"h": "honoured", "-": "harmless", "x": "refused"}
    for line in table.strip().replace("\n    ", " ").splitlines():
        arguments, fate, text = [*line.split(" | ", 2), ""][:3]
        for one in arguments.split("; "):
            about, default = one.rsplit(" = ", 1)
            name, kind = about.split(" ", 1)
            kind, _, rule = kind.partition(": ")
            yield Argument(
                name, kind, ast.literal_eval(default), fates[fate[0]], text, of_trl,
                values=ast.literal_eval(f"({rule},)") if rule and rule not in RULES else (),
                rule=rule if rule in RULES else "a number", late="*" in fate, warns="!" in fate,
            )  # fmt: skip


_REMOVED = {
    "there is one device, where the weights that are trained sample too": "vllm_device",
    "sampling has the numbers of training": "vllm_dtype",
    "completions end at max_completion_length": "vllm_max_model_len",
    "a prompt is computed once for its whole group": "vllm_enable_prefix_caching",
    "no engine here is held to a pattern; write a reward function that tests it": "vllm_guided_decoding_regex",
    "there is no vLLM to configure": "vllm_init_kwargs",
    "completions go to files, whole": "wandb_log_unique_prompts",
    "there is no compute_metrics": "include_inputs_for_metrics",
    "the device is found by itself": "use_mps_device",
    "use bf16": "half_precision_backend fp16_opt_level",
    "pass optimizers=(optimizer, None)": "adafactor",
    "prompts are read in this process": "dispatch_batches split_batches",
    "upload the folder of save_model() with `hf upload`": "push_to_hub_model_id push_to_hub_organization push_to_hub_token",
    "the launcher says how many processes there are": "tpu_num_cores",
    "the CPU's own kernels are used": "use_ipex",
    "nothing is compiled": "jit_mode_eval",
}
REMOVED: Mapping[str, str] = {name: why for why, names in _REMOVED.items() for name in names.split()}
"""Arguments of earlier versions of TRL and transformers that their present ones have no more: why they can be left out."""

ARGUMENTS: Mapping[str, Argument] = {row.name: row for row in [*_read(_TABLE, True), *_read(_FORMER.rstrip() + _OWN, False)]}


def render_table() -> str:
    """Every argument as Markdown, names that share a text in one line: what ``python -m groupwise.trl`` prints."""
    honoured = [row for row in ARGUMENTS.values() if row.fate == "honoured"]
    lines = ["### Honoured, with a note", "", *(f"- `{row.name}`: {row.text}" for row in honoured if row.text)]
    plain = [f"`{row.name}`" for row in honoured if not row.text]
    lines += ["", "### Honoured: they do what TRL's documentation says", "", f"{', '.join(plain)}."]
    for fate, title in (
        ("refused", "### Refused, unless at TRL's default: an error says what to do"),
        ("harmless", "### Accepted, and without effect"),
    ):
        of_text: dict[str, list[str]] = {}
        for row in ARGUMENTS.values():
            if row.fate == fate:
                of_text.setdefault(row.text, []).append(f"`{row.name}`")
        lines += ["", title, "", *(f"- {', '.join(same)}: {text}" for text, same in of_text.items())]
    return "\n".join(lines) + "\n"
