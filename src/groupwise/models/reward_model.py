"""Reward models: a sequence classifier's output as the score of a completion.

B rows of one forward pass, T tokens, C labels. Scores are functions of prompt and completion alone: what else is in the batch, and in
which order, only shows in rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from groupwise.config.rewards import RewardModelConfig
from groupwise.config.schema import ModelConfig
from groupwise.errors import ModelError, RewardError
from groupwise.importing import in_one_line
from groupwise.memory import own_memory
from groupwise.metrics import Mean, Metric
from groupwise.models.adapters import base_module, is_adapted
from groupwise.models.folder import check_folder, is_folder_name
from groupwise.models.load import (
    caps_attention,
    context_length,
    embedding_rows,
    embeds_all,
    load_model_config,
    load_tokenizer,
    origin_of,
    resolve_device,
    source_of,
)
from groupwise.models.quiet import quiet

__all__ = [
    "RewardModel", "check_classifier", "label_index", "load_classifier", "load_classifier_tokenizer", "plan_batches", "unwrapped",
]  # fmt: skip


def unwrapped(model: Any) -> Any:
    """The model of transformers in what ``torch.compile`` and peft put around it; an adapter's layers stay in their places. All
    else as it is.

    Raises ModelError for vectors before the prompt, which are no such layers.
    """
    if not isinstance(model, nn.Module):  # a proxy may have an attribute of every name
        return model
    inner: Any = getattr(model, "_orig_mod", model)
    if is_adapted(inner) and inner.active_peft_config.is_prompt_learning:
        raise ModelError(
            f"the reward model has a {type(inner.active_peft_config).__name__}, trained vectors before the prompt, which is not "
            "covered: call it in a reward function of your own"
        )
    return base_module(inner)


def check_classifier(config: RewardModelConfig) -> Any:
    """The classifier's Hugging Face config, after everything that can be checked without weights. Raises ModelError."""
    with _as_reward_model(config):
        resolve_device(config.device)
        if is_folder_name(config.name):
            # transformers puts an adapter on by itself, where peft is there
            check_folder(Path(config.name).expanduser(), takes_adapters=find_spec("peft") is not None)
            if config.revision not in (None, "main"):  # as for the policy
                raise ModelError(
                    f"its revision is {config.revision!r}, but a folder has no revisions: remove it, or name a model of the Hub"
                )
        hf_config = load_model_config(_as_model(config))
    remote_code = "AutoModelForSequenceClassification" in (getattr(hf_config, "auto_map", None) or {})
    built_as = getattr(hf_config, "architectures", None) or []
    if not remote_code and built_as and not any("ForSequenceClassification" in name for name in built_as):
        raise ModelError(
            f"the reward model {config.name!r} is a {built_as[0]}, which has no trained score head: name a sequence classifier "
            "(…ForSequenceClassification), or make this one a reward function of your own"
        )
    if not remote_code and hf_config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ModelError(
            f"the reward model {config.name!r} is of the type {hf_config.model_type!r}, of which transformers has no sequence "
            "classifier: name a model that AutoModelForSequenceClassification loads"
        )
    return hf_config


def label_index(hf_config: Any, label: str | int | None, name: str) -> int:
    """Which output is the score. Raises ModelError where there are several and ``label`` names none of them."""
    count = int(hf_config.num_labels)
    if label is None and count == 1:
        return 0
    names = {int(index): str(word) for index, word in (hf_config.id2label or {}).items()}
    listed = ", ".join(names.get(index, str(index)) for index in range(min(count, 12))) + (", ..." if count > 12 else "")
    if label is None:
        raise ModelError(
            f"the reward model {name!r} has {count} labels ({listed}), but a reward is one number: set its label to the one to score, "
            "or name a model with one output"
        )
    if isinstance(label, str):
        matches = [index for index, word in names.items() if word.lower() == label.strip().lower()]
        if not matches and label.strip().isdigit():
            matches = [int(label)]
    else:
        matches = [label]
    if not matches or not 0 <= matches[0] < count:
        raise ModelError(f"the reward model {name!r} has no label {label!r}: its labels are {listed}")
    return matches[0]


def load_classifier_tokenizer(config: RewardModelConfig) -> Any:
    """The classifier's own tokenizer. Raises ModelError."""
    with _as_reward_model(config):
        return load_tokenizer(_as_model(config))


def load_classifier(config: RewardModelConfig) -> PreTrainedModel:
    """The weights, in eval mode and without gradients, on their device. Raises ModelError, also for a head that was never trained."""
    of_model = _as_model(config)
    with _as_reward_model(config):
        try:
            with quiet():
                loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                    source_of(of_model),
                    dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
                    **({"attn_implementation": "eager"} if caps_attention(load_model_config(of_model)) else {}),
                    output_loading_info=True,
                    **origin_of(of_model),
                )
        except (ImportError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
            raise ModelError(f"model {config.name!r} cannot be loaded ({in_one_line(error)}): check its files") from error
        model, info = loaded
        device = resolve_device(config.device)
        if device.type == "cpu":
            own_memory([*model.parameters(), *model.buffers()])
        if missing := sorted(info["missing_keys"]):
            raise ModelError(
                f"the weights of {config.name!r} lack {len(missing)} tensors of its architecture (such as {missing[0]}), which would "
                "be random numbers: name a model whose score head was trained"
            )
        model.to(device)
    return model.requires_grad_(False).eval()  # type: ignore[no-any-return]


@contextmanager
def _score_in_float32(model: nn.Module) -> Iterator[None]:
    """Compute a linear head in float32 for as long as a pass takes, when the model itself is coarser. Its weights stay as they are.

    A bfloat16 has 8 significant bits: scores near 10 would be 1/16 apart, and completions of one group would tie.
    """
    head: Any = getattr(model, "score", None) or getattr(model, "classifier", None)
    if hasattr(head, "modules_to_save"):  # peft's, around a head that an adapter brings
        head = head.modules_to_save[head.active_adapters[0]]
    if not isinstance(head, nn.Linear) or head.weight.dtype == torch.float32:
        yield
        return

    def widened(head: nn.Linear, arguments: tuple[Tensor, ...], _: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(arguments[0].float(), head.weight.float(), bias)

    hook = head.register_forward_hook(widened)
    try:
        yield
    finally:
        hook.remove()


def _as_model(config: RewardModelConfig) -> ModelConfig:
    """The settings that any model has, in the form that the loading functions read."""
    return ModelConfig(name=config.name, revision=config.revision, trust_remote_code=config.trust_remote_code)


@contextmanager
def _as_reward_model(config: RewardModelConfig) -> Iterator[None]:
    """Sentences about a model, said of this one: settings are named where they stand for a reward model."""
    try:
        yield
    except ModelError as error:
        said = str(error).replace(" (--trust-remote-code of generate and merge)", ", with the reward's number for N")
        said = said.replace("add model.trust", "add rewards.functions[N].model.trust")
        for setting in ("device", "revision"):
            said = said.replace(f"model.{setting}", f"its {setting}")
        raise ModelError(f"the reward model {config.name!r} is no use: {said}") from error


Encoded = dict[str, list[int]]
"""One text's ``input_ids``, and ``token_type_ids`` where the model knows them."""


class RewardModel:
    """Scores of a reward model, one for each prompt with its completion."""

    is_reward_model = True
    """The mark by which rewards know, without torch, that there are weights to ``load`` and numbers to ``take_metrics`` of."""
    reward_scope = "batch"
    """All completions of a step in one call, so that batches are full."""

    def __init__(self, model: str | Path | PreTrainedModel, tokenizer: Any = None, **settings: Any) -> None:
        """``model``: a folder, a Hub name, or a sequence classifier that is loaded already, with an adapter or compiled too.
        ``settings``: as in `RewardModelConfig`, such as ``label``, ``max_input_tokens``, ``batch_tokens``.

        A name or folder is checked now and its weights are read by `load`, or by the first call. A loaded one is put in eval mode, since
        dropout would make its scores random. Raises ModelError for a model that
        cannot give scores, RewardError for a bad setting.
        """
        model = unwrapped(model)
        self._model = model.eval() if isinstance(model, PreTrainedModel) else None
        name = str(model.config._name_or_path or "reward_model") if isinstance(model, PreTrainedModel) else str(model)
        self.settings = _settings(name, settings)
        hf_config = model.config if isinstance(model, PreTrainedModel) else check_classifier(self.settings)
        self._label = label_index(hf_config, self.settings.label, name)
        self._one_hot = (
            int(hf_config.num_labels or 1) > 1 and getattr(hf_config, "problem_type", None) != "multi_label_classification"
        )
        self.tokenizer = tokenizer or _own_tokenizer(self.settings, loaded=self._model is not None)
        self.max_input_tokens = min(self.settings.max_input_tokens or 2**20, _positions(hf_config, self.tokenizer))
        self.form = self.settings.form
        self._check_form()
        self._long = self._tokens = Mean(0, 0)

    @classmethod
    def from_config(cls, config: RewardModelConfig) -> RewardModel:
        """Make one from an entry of ``rewards.functions``; reads no weights."""
        return cls(config.name, **config.model_dump(exclude={"name"}))

    @property
    def __name__(self) -> str:
        return self.settings.name.rstrip("/").rpartition("/")[2]

    @property
    def summary(self) -> str:
        """What it does, for people who check a run before it starts."""
        label = f", label {self.settings.label}" if self.settings.label is not None else ""
        form = {"as_prompt": "the prompt's own form", "text": "one text", "pair": "two texts"}.get(self.form, "a conversation")
        return f"The {self.settings.score} of {self.settings.name}{label} on {form} of at most {self.max_input_tokens:,} tokens."

    @property
    def model(self) -> PreTrainedModel:
        """The classifier; its weights are read at the first use."""
        if self._model is None:
            self._model = load_classifier(self.settings)
            rows = embedding_rows(self._model)
            if not embeds_all(self.tokenizer, rows):
                raise ModelError(
                    f"the tokenizer of the reward model {self.settings.name!r} knows {len(self.tokenizer)} tokens, but the model embeds "
                    f"only {rows}: use the tokenizer that belongs to it"
                )
        return self._model

    def load(self) -> str:
        """Read the weights, if they are not there yet, and say in a sentence what they are. Raises ModelError."""
        model = self.model
        return (
            f"Reward model {self.settings.name}: {model.num_parameters() / 1e6:,.1f} million weights in "
            f"{str(model.dtype).removeprefix('torch.')} on {model.device}."
        )

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """One score for each pair of a prompt and a completion, texts or conversations. The same pair twice is computed once.

        Raises RewardError for a pair that is too long where ``on_long`` is error, and for one that the chat template refuses.
        """
        encoded = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        self._tokens += Mean.of(len(one["input_ids"]) for one in encoded)
        distinct = {_key(one): one for one in encoded}
        keys, scores = list(distinct), dict.fromkeys(distinct, 0.0)
        for rows in plan_batches([len(distinct[key]["input_ids"]) for key in keys], self.settings.batch_tokens):
            batch = [keys[row] for row in rows]
            scores |= zip(batch, self._scores_B([distinct[key] for key in batch]).tolist(), strict=True)
        return [scores[_key(one)] for one in encoded]

    def check(self, prompt: Any) -> None:
        """Raise RewardError where a prompt of this kind cannot be scored: its chat template refuses it, or the form does not suit it."""
        self.text(prompt, "2")

    def take_metrics(self) -> dict[str, Metric]:
        """Numbers of the calls since the last time this was asked for."""
        metrics: dict[str, Metric] = {"reward_model/truncated": self._long, "reward_model/tokens_mean": self._tokens}
        counted = self._tokens.count > 0
        self._long = self._tokens = Mean(0, 0)
        return metrics if counted else {}

    def count_tokens(self, prompt: Any, completion: Any) -> int:
        """Length of prompt and completion together as they are tokenised, before anything is cut."""
        return len(self._tokenised(prompt, completion)["input_ids"])

    def text(self, prompt: Any, completion: Any) -> str | tuple[str, str]:
        """What the tokenizer is given: one text, or a pair of them."""
        if self._by_template(prompt):
            return self._conversation(prompt, completion)
        before, words = _plain(self._shown(prompt)), _plain(completion)
        if self.form == "pair":
            return before, words
        return before + words if isinstance(prompt, str) else f"{before}\n{words}"

    def _by_template(self, prompt: Any) -> bool:
        """Whether the chat template writes the text, its special tokens included."""
        return self.form == "conversation" or (self.form == "as_prompt" and not isinstance(prompt, str))

    def _conversation(self, prompt: Any, completion: Any) -> str:
        asked = [{"role": "user", "content": prompt.strip()}] if isinstance(prompt, str) else self._shown(prompt)
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        try:
            turns = [*asked, *said]
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **self.settings.template_arguments))
        except Exception as error:  # a template is a program of the checkpoint's, and raises what it likes
            raise RewardError(
                f"the chat template of the reward model {self.settings.name!r} refuses a conversation of the roles "
                f"{', '.join(str(turn['role']) for turn in turns)} ({in_one_line(error)}): set its show_system_prompt: false, or "
                "form: text"
            ) from error

    def _shown(self, prompt: Any) -> Any:
        if isinstance(prompt, str) or self.settings.show_system_prompt:
            return prompt
        return [message for message in prompt if message["role"] != "system"]

    def _check_form(self) -> None:
        """Settle ``auto``, and try the chat template out before it is needed."""
        template = getattr(self.tokenizer, "chat_template", None)
        if self.form == "auto":
            self.form = "conversation" if template else "text"
        elif self.form == "conversation" and not template:
            raise RewardError(
                f"the reward model {self.settings.name!r} has no chat template, but its form is conversation: set it to text or pair"
            )
        if self.form == "conversation":
            self._conversation([{"role": "user", "content": "1 + 1?"}], "2")

    def _encode(self, prompt: Any, completion: Any) -> Encoded:
        """Token ids, cut at the front where there are too many; the length before that is what is counted."""
        encoding = self._tokenised(prompt, completion)
        size = len(encoding["input_ids"])
        if (largest := max(encoding["input_ids"], default=0)) >= (rows := embedding_rows(self.model)):
            raise RewardError(
                f"the reward model {self.settings.name!r} has rows for {rows} tokens alone, and the text has the token {largest}, a mark "
                "of models of another kind: set rewards.on_error to skip, or take another reward model"
            )
        self._long += Mean(size > self.max_input_tokens, 1)
        if size > self.max_input_tokens:
            if self.settings.on_long == "error":
                raise RewardError(
                    f"the reward model {self.settings.name!r} is given {size} tokens of prompt and completion, but takes "
                    f"{self.max_input_tokens}: lower rollout.max_completion_tokens, raise its max_input_tokens, or set its "
                    "on_long: truncate"
                )
            with _cutting_the_front(self.tokenizer):
                encoding = self._tokenised(prompt, completion, truncation=True, max_length=self.max_input_tokens)
        return {key: list(encoding[key]) for key in ("input_ids", "token_type_ids") if key in encoding}

    def _tokenised(self, prompt: Any, completion: Any, **options: Any) -> Any:
        given = self.text(prompt, completion)
        texts = [given] if isinstance(given, str) else list(given)
        special = self.settings.special_tokens and not self._by_template(prompt)
        return self.tokenizer(*texts, add_special_tokens=special, **options)

    def _scores_B(self, batch: Sequence[Encoded]) -> Tensor:
        """``[B]`` in float32."""
        longest = max(len(one["input_ids"]) for one in batch)
        with _pad_id(self.model, [one["input_ids"][-1] for one in batch]) as pad, _score_in_float32(self.model):
            inputs = {
                key: _right_padded([one[key] for one in batch], longest, pad if key == "input_ids" else 0) for key in batch[0]
            }
            inputs["attention_mask"] = _right_padded([[1] * len(one["input_ids"]) for one in batch], longest, 0)
            logits_BC = self.model(**{key: value.to(self.model.device) for key, value in inputs.items()}).logits.float()
        logits_B = logits_BC[:, self._label]
        if self._one_hot:
            others = [c for c in range(logits_BC.shape[1]) if c != self._label]
            logits_B = logits_B - logits_BC[:, others].logsumexp(dim=1)
        return logits_B.sigmoid() if self.settings.score == "probability" else logits_B


def _key(one: Encoded) -> tuple[int, ...]:
    return tuple(number for part in one.values() for number in part)


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Rows of each forward pass: texts of similar length together, as many as fit ``batch_tokens`` once padded to the longest.

    One that is longer than that by itself is alone.

    >>> plan_batches([3, 9, 4, 8], batch_tokens=18)
    [[1, 3], [2, 0]]
    """
    batches: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if room == 0:
            batches.append([])
            room = max(1, batch_tokens // max(1, lengths[row]))
        batches[-1].append(row)
        room -= 1
    return batches


def _settings(name: str, given: Mapping[str, Any]) -> RewardModelConfig:
    try:
        return RewardModelConfig.model_validate({**given, "name": name})
    except ValidationError as failure:
        first = failure.errors()[0]
        setting = ".".join(str(part) for part in first["loc"])
        raise RewardError(
            f"the reward model {name!r} is given {setting}={first['input']!r:.60}: {first['msg'][0].lower()}{first['msg'][1:]}; its "
            f"settings are {', '.join(RewardModelConfig.model_fields)}"
        ) from None


def _own_tokenizer(settings: RewardModelConfig, loaded: bool) -> Any:
    if not loaded:
        return load_classifier_tokenizer(settings)
    try:
        return AutoTokenizer.from_pretrained(settings.name, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"there is no tokenizer at {settings.name!r}, where the reward model came from: give it as RewardModel(model, tokenizer)"
        ) from error


def _positions(hf_config: Any, tokenizer: Any) -> int:
    """The model's context, or the tokenizer's limit where that is tighter (RoBERTa counts two positions that no token has)."""
    limit = getattr(tokenizer, "model_max_length", None)
    return min(context_length(hf_config, tokenizer), limit if isinstance(limit, int) and limit > 0 else 2**20)


def _plain(said: Any) -> str:
    return said if isinstance(said, str) else "\n".join(str(message["content"]) for message in said)


def _right_padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> Tensor:
    return torch.tensor([[*row, *([fill] * (length - len(row)))] for row in rows])


@contextmanager
def _cutting_the_front(tokenizer: Any) -> Iterator[None]:
    """The completion stands at the end, and is what is judged."""
    before, tokenizer.truncation_side = tokenizer.truncation_side, "left"
    try:
        yield
    finally:
        tokenizer.truncation_side = before


@contextmanager
def _pad_id(model: PreTrainedModel, last_ids: Sequence[int]) -> Iterator[int]:
    """The id to pad with.

    Decoders read their score off the last token that is not the config's pad token. Where the config names one, that is the
    checkpoint's own rule and holds for one row as for many. Where it names none, the score stands at the last token: then any id
    will do that no row ends with, and the config is told it for as long as the pass takes.
    """
    holders = list({id(holder): holder for holder in (model.config, model.config.get_text_config())}.values())
    named = next((pad for pad in (getattr(holder, "pad_token_id", None) for holder in holders) if pad is not None), None)
    if named is not None:
        yield named
        return
    free = next(number for number in range(len(last_ids) + 1) if number not in last_ids)
    try:
        for holder in holders:
            holder.pad_token_id = free
        yield free
    finally:
        for holder in holders:
            holder.pad_token_id = None
