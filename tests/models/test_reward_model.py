"""Reward models: every score is that of one text at a time, read by the classifier alone, without padding and without a batch."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from groupwise.config.rewards import RewardFunctionConfig, RewardModelConfig, RewardsConfig
from groupwise.errors import ModelError, RewardError
from groupwise.models.reward_model import RewardModel, plan_batches
from groupwise.rewards import RewardSuite

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SMALL = {
    "vocab_size": 270, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you?"}]
WORDS = ["fine", "", "I am very well, thank you for asking, and how about you?", "fine", "é" * 7, "no"]


def said(words):
    return [[{"role": "assistant", "content": word}] for word in words]


def tokenizer(template=TEMPLATE, pad="<|pad|>", **special):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token=pad, **special)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if "cls_token" in special:
        ids = [(name, made.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
        )
    made.chat_template = template
    return made


def classifier(kind, config, seed=0, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config(**SMALL, **settings)).eval()


def llama(**settings):
    return classifier(LlamaForSequenceClassification, LlamaConfig, **{"num_labels": 1, "pad_token_id": None, **settings})


def saved(folder, model, words):
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@torch.no_grad()
def slow(model, words, texts, special=False):
    """One text at a time through the classifier itself."""
    return [model(**words(text, return_tensors="pt", add_special_tokens=special)).logits[0].tolist() for text in texts]


@torch.no_grad()
def by_last_token(model, words, texts):
    """The head on the last token's hidden state, written out."""
    ids = [words(text, return_tensors="pt", add_special_tokens=False)["input_ids"] for text in texts]
    return [model.score(model.model(one).last_hidden_state[0, -1]).item() for one in ids]


def chat_texts(words, prompt, completions):
    return [words.apply_chat_template([*prompt, *c], tokenize=False) for c in completions]


@pytest.mark.parametrize("pad", ["named", "missing", "end"])
@pytest.mark.parametrize("batch_tokens", [1, 150, 100_000])
def test_scores_are_those_of_one_conversation_at_a_time(pad, batch_tokens):
    """Also where the checkpoint names no pad token, and where texts end with the token that pads."""
    template = TEMPLATE if pad != "end" else TEMPLATE.replace("<|im_end|>\n", "<|im_end|>")
    words = tokenizer(template, pad=None if pad == "missing" else "<|im_end|>" if pad == "end" else "<|pad|>")
    model = llama(pad_token_id=words.pad_token_id if pad == "named" else None)
    judge = RewardModel(model, words, batch_tokens=batch_tokens)
    texts = chat_texts(words, PROMPT, said(WORDS))
    found = judge([PROMPT] * len(WORDS), said(WORDS))
    assert found == pytest.approx([row[0] for row in slow(model, words, texts)], abs=1e-4)
    assert found == pytest.approx(by_last_token(model, words, texts), abs=1e-4)
    assert max(found) - min(found) > 0.1
    assert model.config.pad_token_id == (words.pad_token_id if pad == "named" else None), "the model is left as it was"


def test_a_checkpoint_that_pads_with_the_end_token_keeps_its_own_rule():
    """transformers reads the score off the last token that is not the config's pad token; one at a time it does the same."""
    words = tokenizer(TEMPLATE.replace("<|im_end|>\n", "<|im_end|>"), pad="<|im_end|>")
    model = llama(pad_token_id=words.pad_token_id)
    texts = chat_texts(words, PROMPT, said(WORDS))
    found = RewardModel(model, words)([PROMPT] * len(WORDS), said(WORDS))
    assert found == pytest.approx([row[0] for row in slow(model, words, texts)], abs=1e-4)
    assert found != pytest.approx(by_last_token(model, words, texts), abs=1e-2)


@pytest.mark.parametrize("kind", [(Qwen3ForSequenceClassification, Qwen3Config), (BertForSequenceClassification, BertConfig)])
def test_other_architectures(kind):
    words = tokenizer()
    head = {"head_dim": 8, "num_key_value_heads": 2} if kind[1] is Qwen3Config else {}
    model = classifier(*kind, num_labels=1, pad_token_id=words.pad_token_id, **head)
    found = RewardModel(model, words)([PROMPT] * len(WORDS), said(WORDS))
    assert found == pytest.approx([row[0] for row in slow(model, words, chat_texts(words, PROMPT, said(WORDS)))], abs=1e-4)


@pytest.mark.parametrize("around", ["an adapter", "compile"])
def test_what_is_put_around_a_model_is_looked_through(around):
    words = tokenizer()
    model = llama(pad_token_id=words.pad_token_id)
    texts = chat_texts(words, PROMPT, said(WORDS))
    plain = [row[0] for row in slow(model, words, texts)]
    if around == "compile":
        assert RewardModel(torch.compile(model), words)([PROMPT] * len(WORDS), said(WORDS)) == pytest.approx(plain, abs=1e-4)
        return
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="SEQ_CLS", init_lora_weights=False)).eval()
    found = RewardModel(adapted, words)([PROMPT] * len(WORDS), said(WORDS))
    assert found == pytest.approx([row[0] for row in slow(adapted, words, texts)], abs=1e-4)
    assert found != pytest.approx(plain, abs=1e-2)
    before = peft.get_peft_model(llama(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS"))
    with pytest.raises(ModelError, match="a PromptTuningConfig, trained vectors before the prompt"):
        RewardModel(before, words)


def test_forms():
    """Text where there is no template, pairs of texts as cross-encoders want them, and what is left of the system prompt."""
    plain, chat = tokenizer(None), tokenizer()
    model = llama(pad_token_id=plain.pad_token_id)
    assert RewardModel(model, plain).text(PROMPT, said(["fine"])[0]) == "Be brief.\nHow are you?\nfine"
    assert RewardModel(model, plain).text("How are you? ", "fine") == "How are you? fine"
    assert RewardModel(model, chat, form="text").text("How? ", "fine") == "How? fine"
    assert RewardModel(model, chat, form="as_prompt").text("How? ", "fine") == "How? fine"
    asked = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n"
    assert RewardModel(model, chat).text("How? ", "fine") == asked
    assert RewardModel(model, chat, form="as_prompt").text([{"role": "user", "content": "How?"}], "fine") == asked
    assert "Be brief" in RewardModel(model, chat).text(PROMPT, "fine")
    assert "Be brief" not in RewardModel(model, chat, show_system_prompt=False).text(PROMPT, "fine")
    assert RewardModel(model, plain, form="pair").text("How?", "fine") == ("How?", "fine")
    with pytest.raises(RewardError, match="has no chat template, but its form is conversation: set it to text or pair"):
        RewardModel(model, plain, form="conversation")


def test_text_gets_the_tokenizers_own_special_tokens_and_pairs_their_segments():
    words = tokenizer(None, cls_token="[CLS]", sep_token="[SEP]")
    words.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    model = classifier(BertForSequenceClassification, BertConfig, num_labels=1, pad_token_id=words.pad_token_id)
    as_text = RewardModel(model, words)(["How? "] * 3, ["fine", "not so well today", ""])
    expected = slow(model, words, ["How? fine", "How? not so well today", "How? "], special=True)
    assert as_text == pytest.approx([row[0] for row in expected], abs=1e-4)
    bare = RewardModel(model, words, special_tokens=False)(["How? "], ["fine"])
    assert bare == pytest.approx(slow(model, words, ["How? fine"])[0], abs=1e-4)
    as_pair = RewardModel(model, words, form="pair")(["How?"] * 2, ["fine", "not so well today"])
    with torch.no_grad():
        alone = [model(**words("How?", word, return_tensors="pt")).logits.item() for word in ("fine", "not so well today")]
    assert as_pair == pytest.approx(alone, abs=1e-4)
    assert as_pair[0] != pytest.approx(as_text[0], abs=1e-3)


@pytest.mark.parametrize("form", ["conversation", "as_prompt"])
def test_a_template_writes_its_own_special_tokens(form):
    """A tokenizer that adds some to every text must not add them to these."""
    words = tokenizer("[CLS]" + TEMPLATE + "[SEP]", cls_token="[CLS]", sep_token="[SEP]")
    model = classifier(BertForSequenceClassification, BertConfig, num_labels=1, pad_token_id=words.pad_token_id)
    found = RewardModel(model, words, form=form)([PROMPT] * 2, said(["fine", "no"]))
    expected = slow(model, words, chat_texts(words, PROMPT, said(["fine", "no"])))
    assert found == pytest.approx([row[0] for row in expected], abs=1e-4)


def test_a_label_of_several_gives_its_log_odds_or_its_probability():
    words, labels = tokenizer(), {0: "bad", 1: "so-so", 2: "Good"}
    model = llama(num_labels=3, id2label=labels, label2id={word: i for i, word in labels.items()}, pad_token_id=259)
    rows = torch.tensor(slow(model, words, chat_texts(words, PROMPT, said(WORDS))))
    shares = rows.softmax(dim=1)[:, 2]
    prompts = [PROMPT] * len(WORDS)
    assert RewardModel(model, words, label="good")(prompts, said(WORDS)) == pytest.approx((shares / (1 - shares)).log(), abs=1e-4)
    assert RewardModel(model, words, label=2, score="probability")(prompts, said(WORDS)) == pytest.approx(shares, abs=1e-4)
    model.config.problem_type = "multi_label_classification"
    assert RewardModel(model, words, label="2")(prompts, said(WORDS)) == pytest.approx(rows[:, 2], abs=1e-4)
    with pytest.raises(ModelError, match=r"has 3 labels \(bad, so-so, Good\), but a reward is one number: set its label"):
        RewardModel(model, words)
    for wrong in ("best", 3, -1):
        with pytest.raises(ModelError, match=f"has no label {wrong!r}: its labels are bad, so-so, Good"):
            RewardModel(model, words, label=wrong)


def test_a_single_output_as_a_probability():
    words = tokenizer()
    model = llama(pad_token_id=words.pad_token_id)
    logit = RewardModel(model, words)(["How?"], ["fine"])[0]
    assert RewardModel(model, words, score="probability")(["How?"], ["fine"]) == [pytest.approx(1 / (1 + math.exp(-logit)))]


def test_what_is_too_long_loses_its_beginning_and_is_counted():
    words = tokenizer(None)
    model = llama(pad_token_id=words.pad_token_id)
    judge = RewardModel(model, words, max_input_tokens=20)
    found = judge(["x" * 30, "y" * 5], ["the very end", "fine"])
    assert found == pytest.approx([row[0] for row in slow(model, words, ["xxxxxxxxthe very end", "yyyyyfine"])], abs=1e-4)
    assert {name: metric.value for name, metric in judge.take_metrics().items()} == {
        "reward_model/truncated": 0.5,
        "reward_model/tokens_mean": (20 + 9) / 2,  # as the model reads them
    }
    assert judge.take_metrics() == {}, "numbers are handed out once"
    assert words.truncation_side == "right", "the tokenizer is left as it was"
    assert RewardModel(model, words).max_input_tokens == 256, "by default what the model was made for"
    with pytest.raises(RewardError, match=r"is given 42 tokens of prompt and completion, but takes 20: lower rollout\.max_comp"):
        RewardModel(model, words, max_input_tokens=20, on_long="error")(["x" * 30], ["the very end"])


def test_what_was_counted_by_hand_is_none_of_a_run_s_numbers():
    words = tokenizer(None)
    judge = RewardModel(llama(pad_token_id=words.pad_token_id), words)
    judge(["How?", "Why?"], ["fine", "so"])
    config = RewardsConfig(functions=[RewardFunctionConfig(function="judge")])
    RewardSuite.from_config(config, "xml", {"judge": judge}).load()
    assert judge.take_metrics() == {}


def test_the_same_text_is_computed_once(monkeypatch):
    words = tokenizer()
    model = llama(pad_token_id=words.pad_token_id)
    rows = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: rows.append(len(inputs["input_ids"])) or forward(**inputs))
    found = RewardModel(model, words)(["How?"] * 4, ["fine", "no", "fine", "fine"])
    assert sum(rows) == 2
    assert found[0] == found[2] == found[3] != found[1]


@pytest.mark.parametrize(
    ("lengths", "tokens", "batches"),
    [([], 8, []), ([5], 1, [[0]]), ([1, 1, 1], 2, [[0, 1], [2]]), ([2, 9, 3], 9, [[1], [2, 0]]), ([4, 4, 4], 100, [[0, 1, 2]])],
)
def test_batches_hold_to_the_budget(lengths, tokens, batches):
    assert plan_batches(lengths, tokens) == batches


# --- from a folder ----------------------------------------------------------------------------------------------------


def test_a_folder_is_checked_without_weights_and_loaded_once(tmp_path, monkeypatch):
    words = tokenizer()
    model = llama(pad_token_id=words.pad_token_id)
    folder = saved(tmp_path / "judge", model, words)
    from transformers import AutoModelForSequenceClassification

    load, loads = AutoModelForSequenceClassification.from_pretrained, []
    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", lambda *a, **k: loads.append(a) or load(*a, **k))
    judge = RewardModel.from_config(RewardModelConfig(name=str(folder), device="cpu"))
    assert (judge.__name__, loads) == ("judge", [])
    assert judge.summary == f"The logit of {folder} on a conversation of at most 256 tokens."
    assert judge.load().endswith("million weights in float32 on cpu.")
    found = judge([PROMPT] * 2, said(["fine", "no"])) + judge([PROMPT], said(["well"]))
    assert len(loads) == 1
    expected = slow(model, words, chat_texts(words, PROMPT, said(["fine", "no", "well"])))
    assert found == pytest.approx([row[0] for row in expected], abs=1e-4)
    assert not any(parameter.requires_grad for parameter in judge.model.parameters())


def test_bfloat16_scores_are_finer_than_a_bfloat16(tmp_path):
    """Logits near 10 in bfloat16 are 1/16 apart: completions of a group would tie."""
    words = tokenizer()
    folder = saved(tmp_path / "judge", llama(pad_token_id=words.pad_token_id), words)
    judge = RewardModel(folder, dtype="bfloat16", device="cpu")
    found = torch.tensor(judge([PROMPT] * len(WORDS), said(WORDS)))
    assert judge.model.dtype == torch.bfloat16
    assert not torch.equal(found, found.bfloat16().float())
    exact = torch.tensor(RewardModel(folder, dtype="float32", device="cpu")([PROMPT] * len(WORDS), said(WORDS)))
    torch.testing.assert_close(found, exact, atol=0.15, rtol=0.05)


def test_a_model_that_is_handed_over_scores_as_the_one_from_its_folder(tmp_path):
    """It may come from training, whose dropout is on; and only its mode is changed."""
    words = tokenizer()
    folder = saved(tmp_path / "judge", llama(pad_token_id=words.pad_token_id, attention_dropout=0.5).bfloat16(), words)
    model = LlamaForSequenceClassification.from_pretrained(folder, dtype="auto")
    found = RewardModel(model.train(), words)([PROMPT] * len(WORDS), said(WORDS))
    assert found == RewardModel(folder, device="cpu")([PROMPT] * len(WORDS), said(WORDS))
    assert (model.score.weight.dtype, len(model.score._forward_hooks)) == (torch.bfloat16, 0)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_cannot_give_scores_is_refused_without_weights(tmp_path):
    words = tokenizer()
    base = saved(tmp_path / "base", LlamaForCausalLM(LlamaConfig(**SMALL)), words)
    with pytest.raises(
        ModelError, match="base' is a LlamaForCausalLM, which has no trained score head: name a sequence classifier"
    ):
        RewardModel(base)
    two = saved(tmp_path / "two", llama(num_labels=2), words)
    with pytest.raises(ModelError, match=r"has 2 labels \(LABEL_0, LABEL_1\), but a reward is one number"):
        RewardModel(two)
    with pytest.raises(ModelError, match=r"the reward model '.*nowhere' is no use: the model folder .* does not exist"):
        RewardModel(tmp_path / "nowhere")
    one = saved(tmp_path / "one", llama(), words)
    with pytest.raises(ModelError, match="is no use: its device is 'cuda:99'"):
        RewardModel(one, device="cuda:99")
    with pytest.raises(ModelError, match="is no use: its revision is 'v2', but a folder has no revisions: remove it, or name a"):
        RewardModel(one, revision="v2")
    assert RewardModel(one, revision="main").__name__ == "one"
    with pytest.raises(
        RewardError, match=r"is given max_input_tokens=0: input should be greater than or equal to 1; its settings are name,"
    ):
        RewardModel(one, max_input_tokens=0)
    with pytest.raises(RewardError, match=r"is given lable='good': .*; its settings are name, revision, label"):
        RewardModel(one, lable="good")


def test_an_untrained_head_and_a_strange_tokenizer_are_refused_with_the_weights(tmp_path):
    words = tokenizer()
    folder = saved(tmp_path / "judge", llama(), words)
    config = json.loads((folder / "config.json").read_text())
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lack 1 tensors of its architecture \(such as score\.weight\), which would be random"):
        RewardModel(folder, device="cpu").load()
    words.add_tokens([f"word{i}" for i in range(30)])
    folder = saved(tmp_path / "other", llama(), words)
    with pytest.raises(
        ModelError, match=r"knows 28\d tokens, but the model embeds only 270: use the tokenizer that belongs to it"
    ):
        RewardModel(folder, device="cpu").load()


def test_a_template_that_refuses_the_system_prompt_is_told_of():
    words = tokenizer("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE)
    model = llama(pad_token_id=words.pad_token_id)
    with pytest.raises(
        RewardError, match=r"refuses a conversation of the roles system, user, assistant \(TemplateError: no system\): set its"
    ):
        RewardModel(model, words).check(PROMPT)
    RewardModel(model, words, show_system_prompt=False).check(PROMPT)
