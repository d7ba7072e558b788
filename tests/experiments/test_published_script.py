"""A published script beside ours, in miniature: code is cut out of a page whole or not at all, and what it does is seen and not changed."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from experiments import published_script
from experiments.common import PAGE, read_block
from tests.conftest import SHARED_DATA
from tests.tiny import write_tiny_llama

CODE = """import random
import torch
import wandb
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.manual_seed(3)
random.seed(3)


def prepare_dataset(split="train"):
    rows = load_from_disk("/nowhere/gsm8k")[split]
    return [{"prompt": "Sum.\\n" + row["question"], "answer": row["answer"].split("####")[1].strip()} for row in rows]


def combined_reward(prompts, completions, answer):
    return [float(len(set(c[0]["content"]))) + ("1" in a) for c, a in zip(completions, answer)]


def compute_log_probs(model, input_ids, attention_mask, logits_to_keep):
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    taken = input_ids[:, -logits_to_keep:, None]
    return logits[:, -logits_to_keep:].log_softmax(-1).gather(2, taken)[..., 0]


def generate_completions(model, tokenizer, prompts, number, limit):
    asked = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    ids, mask = (asked[key].repeat_interleave(number, 0) for key in ("input_ids", "attention_mask"))
    out = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id)
    new = out[:, ids.shape[1] :]
    before = (new == tokenizer.eos_token_id).int().cumsum(1).cumsum(1) <= 1
    return ids, mask, new, before.int()


def generate_rollout_data(model, ref_model, tokenizer, batch, number, limit):
    prompts = [row["prompt"] for row in batch]
    ids, mask, new, new_mask = generate_completions(model, tokenizer, prompts, number, limit)
    whole, whole_mask, keep = torch.cat([ids, new], 1), torch.cat([mask, new_mask], 1), new.shape[1]
    return {
        "input_ids": whole,
        "attention_mask": whole_mask,
        "completion_mask": new_mask,
        "old_log_probs": compute_log_probs(model, whole, whole_mask, keep),
        "ref_log_probs": compute_log_probs(ref_model, whole, whole_mask, keep),
        "texts": [[{"content": tokenizer.decode(one, skip_special_tokens=True)}] for one in new],
        "repeated_prompts": [p for p in prompts for _ in range(number)],
        "repeated_answers": [row["answer"] for row in batch for _ in range(number)],
        "logits_to_keep": keep,
        "num_generations": number,
    }


def grpo_loss(model, ref_model, data, reward_function, beta, epsilon):
    keep, mask = data["logits_to_keep"], data["completion_mask"]
    now = compute_log_probs(model, data["input_ids"], data["attention_mask"], keep)
    rewards = torch.tensor(
        reward_function(prompts=data["repeated_prompts"], completions=data["texts"], answer=data["repeated_answers"])
    ).view(-1, data["num_generations"])
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = (now - data["old_log_probs"]).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    apart = data["ref_log_probs"] - now
    per_token = gain - beta * (apart.exp() - apart - 1)
    return -((per_token * mask).sum(1) / mask.sum(1)).mean(), rewards.mean().item()


def train_with_grpo(model, tokenizer, rows, num_steps, batch_size, num_generations, max_completion_length, **rest):
    import copy

    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        with torch.no_grad():
            data = generate_rollout_data(
                model, reference, tokenizer, random.sample(rows, batch_size), num_generations, max_completion_length
            )
        for _ in range(rest["mu"]):
            loss, reward = grpo_loss(model, reference, data, rest["reward_function"], rest["beta"], rest["epsilon"])
            loss.backward()
            if (step + 1) % rest["gradient_accumulation_steps"] == 0:
                optimizer.step()
                optimizer.zero_grad()
            wandb.log({"loss": loss.item(), "average_reward": reward})


if __name__ == "__main__":
    model_name = "/nowhere/model"
    output_dir = "/nowhere/output"
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32, device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    rows = prepare_dataset()
    model.train()
    model.config.use_cache = False
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    training_config = {
        "num_iterations": 1,
        "num_steps": 500,
        "batch_size": 9,
        "num_generations": 9,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 900,
        "beta": 0.04,
        "mu": 3,
        "epsilon": 0.1,
    }
    wandb.init(project="x")
    train_with_grpo(model, tokenizer, rows, reward_function=combined_reward, **training_config)
    wandb.finish()
    raise AssertionError("nothing after the last step is wanted")
"""


def page(code=CODE):
    """A page's text: prose, the column of line numbers, the code, and prose."""
    numbers = "\n".join(str(i + 1) for i in range(CODE.count("\n")))
    return f"How it works\n\n{numbers}\n{code}\nResults\n\nIt works.\n"


@pytest.fixture
def given(tiny_folder, tmp_path):
    rows = [{"question": f"{a} + {a + 1} = ?", "answer": f"That is {2 * a + 1}.\n#### {2 * a + 1}"} for a in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "page.txt").write_text(page(), encoding="utf-8")
    places = {"text": tmp_path / "page.txt", "model": tiny_folder, "data": tmp_path / "train.jsonl", "folder": tmp_path / "w"}
    numbers = {"steps": 3, "prompts": 2, "completions": 4, "tokens": 12, "settings": ["model.dtype=float32"]}
    return {name: str(place) for name, place in places.items()} | numbers


def test_code_is_cut_out_of_a_page_whole():
    assert published_script.extract(page()) == CODE
    assert published_script.extract(CODE) == CODE, "a file of code alone"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Only prose.", "no line that begins with import"),
        (page(CODE.partition("if __name__")[0]), "no block if __name__"),
        (page(CODE.replace("random.seed(3)\n", "")), f"numbers {CODE.count(chr(10))} lines of code, but the text has"),
        (page(CODE.replace("    return [float", "    return float")), "is no Python"),
        (page(CODE.replace("def grpo_loss", "def other_loss")), "defines no grpo_loss"),
    ],
    ids=["prose", "no main", "a line lost", "no python", "no loss"],
)
def test_a_page_whose_code_is_not_whole_is_refused(text, reason):
    with pytest.raises(SystemExit, match=reason):
        published_script.extract(text)


def test_what_a_script_inherits_from_the_models_file_is_told(tmp_path):
    assert published_script.inherited(tmp_path) == {"top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}, (
        "transformers' defaults"
    )
    own = {"top_p": 0.8, "repetition_penalty": 1.1, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(own), encoding="utf-8")
    assert published_script.inherited(tmp_path) == {"top_k": 50, "top_p": 0.8, "repetition_penalty": 1.1}


def test_a_script_that_sets_no_such_number_is_refused(given):
    Path(given["text"]).write_text(page().replace('"num_steps": 500', '"steps_made": 500'), encoding="utf-8")
    with pytest.raises(SystemExit, match="the script sets no num_steps"):
        published_script.run_script(given)


def test_both_sides_run_on_the_same_problems_and_are_kept(given, tmp_path, monkeypatch):
    sides = []

    def here(side, its):
        sides.append(side)
        published_script.carry_out(side, its)

    monkeypatch.setattr(published_script, "_process", here)
    numbers = published_script.compare_sides(given)
    assert sides == ["script", "ours"]
    script, ours = numbers["curves"]["script"], numbers["curves"]["ours"]
    assert {len(curve) for curves in (script, ours) for curve in curves.values()} == {3}, "a number for each step, and no more"
    assert script["our loss"] == pytest.approx(script["loss"], abs=1e-5), "one formula"
    assert abs(script["loss"][-1]) > 1e-4, "the KL of a policy that has moved"
    assert all(1 <= tokens <= given["tokens"] for tokens in (*script["tokens"], *ours["tokens"]))
    assert all(0 <= share <= 1 for share in script["stopped"])

    drawn = json.loads((tmp_path / "w" / "script.json").read_text(encoding="utf-8"))["drawn"]
    rows = Path(given["data"]).read_text(encoding="utf-8").splitlines()
    assert len(drawn) == given["steps"] * given["prompts"]
    assert (tmp_path / "w" / "drawn.jsonl").read_text(encoding="utf-8").splitlines() == [rows[place] for place in drawn]

    assert published_script.compare_sides(given) == numbers
    assert sides == ["script", "ours"], "what is kept is not run again"
    published_script.compare_sides({**given, "settings": [*given["settings"], "optimizer.weight_decay=0"]})
    assert sides == ["script", "ours", "ours"], "settings are of ours alone"

    published_script.draw(numbers, tmp_path / "curves.svg")
    assert "our formula" in (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "3 steps of 2 x 4 completions of up to 12 tokens" in published_script.report(numbers)
    assert "top-k of 50 and top-p of 1." in published_script.report(numbers)
    numbers["sampling"]["repetition_penalty"] = 1.1
    assert "repetition penalty of 1.1, which ours does not know." in published_script.report(numbers)
    assert read_block(PAGE, "published_script") is not None


def test_the_scripts_completions_are_those_of_its_model(given, tmp_path, monkeypatch):
    import torch

    likeliest = []

    class Watch(published_script._Watch):
        def generate_completions(self, real):
            sampling = super().generate_completions(real)

            def generate(model, *rest):
                ids, mask, new, new_mask = sampling(model, *rest)
                whole, whole_mask = torch.cat([ids, new], 1), torch.cat([mask, new_mask], 1)
                with torch.no_grad():
                    logits = model(input_ids=whole, attention_mask=whole_mask).logits[:, ids.shape[1] - 1 : -1]
                likeliest.append(float((logits.argmax(-1) == new)[new_mask.bool()].double().mean()))
                return ids, mask, new, new_mask

            return generate

    text = page().replace("do_sample=True, top_k=0", "do_sample=False   ")
    Path(given["text"]).write_text(text, encoding="utf-8")
    model = write_tiny_llama(
        tmp_path / "wide", initializer_range=0.3, tie_word_embeddings=False
    )  # one that minds more than the last token
    monkeypatch.setattr(published_script, "_Watch", Watch)
    published_script.run_script({**given, "model": str(model), "steps": 1, "prompts": 1})
    assert likeliest == [1.0], "greedy tokens are the likeliest of the whole text"


def test_the_write_ups_own_page_is_whole_and_has_all_that_is_changed():
    folder = SHARED_DATA.parent / "write-ups"
    pages = [path for path in sorted(folder.glob("*.txt")) if "train_with_grpo(" in path.read_text(encoding="utf-8")]
    if not pages:
        pytest.skip(f"no write-up with code in {folder}")
    import ast

    code = published_script.extract(pages[0].read_text(encoding="utf-8"))
    numbers = (
        "num_steps",
        "batch_size",
        "num_generations",
        "max_completion_length",
        "gradient_accumulation_steps",
        "num_iterations",
        "mu",
    )
    patch = published_script._Patch({"model_name": "m", "output_dir": "o"}, dict.fromkeys(numbers, 1))
    changed = ast.unparse(patch.visit(ast.parse(code)))
    assert not patch.left
    assert "import wandb" not in changed
    assert "from datasets" not in changed
