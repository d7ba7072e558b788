"""``groupwise eval`` from a model folder to figures, on a tiny random model with a word tokenizer."""

import json

import pytest

from groupwise.config.schema import Config
from groupwise.errors import ConfigError, DataError, ModelError
from groupwise.evaluation import evaluate_model, held_out_prompts
from groupwise.tracking import JsonlTracker, RunFolder, Trackers
from groupwise.types import Problem


class Words:
    """A tokenizer of one id per word."""

    bos_token = eos_token = eos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [len(word) for word in text.split()]}


def config(**sections):
    settings = {
        "model": {"dtype": "float32", "device": "cpu"},
        "data": {"source": "arithmetic", "holdout": 6, "arithmetic": {"problems": 4}},
        "prompt": {"style": "plain", "system": "none"},
        "rollout": {"max_completion_tokens": 5, "engine": "transformers"},
        "evaluation": {"problems": 4},
    }
    return Config.model_validate({name: {**settings.get(name, {}), **sections.get(name, {})} for name in settings | sections})


def problems(*questions):
    return [Problem(f"p{i}", question, "4") for i, question in enumerate(questions)]


def test_the_first_problems_are_taken_and_rendered():
    prompts = held_out_prompts(problems("a", "b", "c", "d", "e"), Words(), config(), "Be brief.", 100)
    assert [prompt.problem.id for prompt in prompts] == ["p0", "p1", "p2", "p3"]
    assert prompts[0].text == "Be brief.\n\nUser: a\nAssistant: "
    assert len(held_out_prompts(problems(*"abcde"), Words(), config(evaluation={"problems": None}), None, 100)) == 5


def test_prompt_and_completion_share_the_context(caplog):
    asked = problems("a", "one two three four", "b")
    with pytest.raises(DataError, match="problem p1 has 6 tokens, more than the 4 allowed"):
        held_out_prompts(asked, Words(), config(), None, 9)
    dropping = config(data={"on_long_prompt": "drop"})
    kept = held_out_prompts(asked, Words(), dropping, None, 9)
    assert [prompt.problem.id for prompt in kept] == ["p0", "p2"]
    assert "1 of 3 held-out problems were dropped" in caplog.text
    assert len(held_out_prompts(asked, Words(), dropping, None, 11)) == 3
    limited = config(data={"on_long_prompt": "drop", "max_prompt_tokens": 4})
    assert len(held_out_prompts(asked, Words(), limited, None, 11)) == 2
    with pytest.raises(ConfigError, match=r"max_completion_tokens is 5, but the context of .* is 5 tokens"):
        held_out_prompts(asked, Words(), dropping, None, 5)


def test_no_problems_are_refused_before_the_model_is_asked():
    with pytest.raises(DataError, match="0 held-out"):
        held_out_prompts([], Words(), config(), None, 100)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        evaluate_model(str(tmp_path), config())


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    torch, transformers, tokenizers = (pytest.importorskip(name) for name in ("torch", "transformers", "tokenizers"))
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {"<end>": 0, "<unk>": 1, **{str(i): i + 2 for i in range(30)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, max_position_embeddings=200, eos_token_id=0, bos_token_id=None, **shape)
    )
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("engine", [pytest.param("transformers", marks=pytest.mark.slow), "builtin"])
def test_a_model_folder_is_judged_in_every_mode_and_twice_the_same(tiny_model, tmp_path, engine):
    folder = RunFolder(tmp_path)
    judged_by = config(rollout={"engine": engine})
    results = evaluate_model(tiny_model, judged_by, trackers=Trackers([JsonlTracker(folder)]))
    assert [(result.stage, result.mode, result.n) for result in results] == [("eval", "sampled", 4), ("eval", "greedy", 4)]
    for result in results:
        assert 1 <= result.mean_tokens <= 5
        assert result.strict_accuracy == 0.0
        rows = [json.loads(line) for line in folder.evaluation_file("eval", result.mode).read_text().splitlines()]
        assert rows == list(result.records)
    again = evaluate_model(tiny_model, judged_by)
    assert [result.records for result in again] == [result.records for result in results]
    assert results[0].records != results[1].records
