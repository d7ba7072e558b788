"""The models, data and rewards of runs that are made ill on purpose, and the defects that are put into the program for some of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from groupwise import Config, load_config
from groupwise.episodes.formats import FORMATS, Asked
from groupwise.training.loop import train
from tests.tiny import TEMPLATE, lower_case_share, tiny_config, write_sums, write_tiny_llama

__all__ = ["REWARDS", "Clinic", "another_temperature", "asks", "no_end_token", "stranded_adapter", "wrong_sign"]


SCHOOL = (
    "training.steps=0", "evaluation.at_start=false", "evaluation.problems=8", "evaluation.modes=[sampled]", "training.threads=1",
)  # fmt: skip


class Clinic:
    """A folder with what runs start from; each is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def made(self, name: str, make: Callable[[Path], Any]) -> Path:
        path = self.folder / name
        if not path.exists():
            make(path)
        return path

    @cached_property
    def stranger(self) -> Path:
        """A random model: it writes noise."""
        return self.made("stranger", write_tiny_llama)

    @cached_property
    def chatty(self) -> Path:
        """A random model that ends one time in ten tokens or so."""
        return self.made("chatty", lambda path: write_tiny_llama(path, stop_weight=60.0, tie_word_embeddings=False))

    @cached_property
    def caller(self) -> Path:
        """The same with room for several turns."""
        shape = {"tie_word_embeddings": False, "max_position_embeddings": 1024}
        return self.made("caller", lambda path: write_tiny_llama(path, stop_weight=60.0, **shape))

    @cached_property
    def start(self) -> Path:
        """A random model with room to learn."""
        return self.made("start", lambda path: write_tiny_llama(path, hidden_size=64, intermediate_size=96))

    @cached_property
    def pupil(self) -> Path:
        """Knows the form and the answer (it is always 7), and gets both right about half the time."""
        return self.made("pupil", lambda path: self.teach(path, self.sevens, 84))

    @cached_property
    def beginner(self) -> Path:
        """Taught for less: it gets both right a third of the time or so, and what is wrong is often longer than what is right."""
        return self.made("beginner", lambda path: self.teach(path, self.sevens, 66))

    @cached_property
    def tutored(self) -> Path:
        """Taught for longer. How much of it a pupil knows after a number of steps differs between processors; this is the middle of a wide
        range in which it knows the answer, and not always the form."""
        return self.made("tutored", lambda path: self.teach(path, self.sevens, 120))

    @cached_property
    def endless(self) -> Path:
        """The pupil, whose tokenizer names another token as the end."""
        return self.made("endless", lambda path: other_end(shutil.copytree(self.pupil, path)))

    @cached_property
    def judge(self) -> Path:
        return self.made("judge", lambda path: write_judge(path, self.stranger))

    @cached_property
    def schooled(self) -> Path:
        """The quickstart's model after its warm start."""
        return self.made("schooled", lambda path: self.keep_model(load_config("quickstart", SCHOOL), path))

    @cached_property
    def schooled_endless(self) -> Path:
        return self.made("schooled-endless", lambda path: other_end(shutil.copytree(self.schooled, path), "<|endoftext|>"))

    @cached_property
    def schooled_a_little(self) -> Path:
        """The same after four steps: it half knows the form."""
        return self.made(
            "schooled-a-little", lambda path: self.keep_model(load_config("quickstart", [*SCHOOL, "warm_start.steps=4"]), path)
        )

    def teach(self, path: Path, data: Path, steps: int) -> None:
        config = tiny_config(
            self.start, data, warm_start={"steps": steps, "examples_per_step": 16, "learning_rate": 1e-2}, training={"steps": 0},
            rollout={"max_completion_tokens": 64}, rewards={"functions": [{"function": "correctness"}]},
        )  # fmt: skip
        self.keep_model(config, path)

    @staticmethod
    def keep_model(config: Config, path: Path) -> None:
        run = path.with_suffix(".run")
        train(config, console=Console(quiet=True), run_folder=run)
        shutil.move(run / "final_model", path)
        shutil.rmtree(run)

    @cached_property
    def sums(self) -> Path:
        return self.made("sums.jsonl", write_sums)

    @cached_property
    def sums_again(self) -> Path:
        """The same problems, each with a question mark more."""
        rows = [{"question": f"{a} + {a + 1} = ??", "answer": str(2 * a + 1)} for a in range(24)]
        return self.made("sums-again.jsonl", lambda path: write_rows(path, rows))

    @cached_property
    def sevens(self) -> Path:
        """Problems with one answer."""
        rows = [{"question": f"{a} - {a - 7} = ?", "answer": "7", "solution": "so"} for a in range(10, 99)]
        return self.made("sevens.jsonl", lambda path: write_rows(path, rows))

    @cached_property
    def muddled(self) -> Path:
        """Sums of which some stand there twice, and one with two answers."""
        rows = [{"question": f"{a} + {a + 1} = ?", "answer": str(2 * a + 1)} for a in (*range(24), 3, 4, 5)]
        return self.made("muddled.jsonl", lambda path: write_rows(path, [*rows, {"question": "7 + 8 = ?", "answer": "16"}]))

    @cached_property
    def deadly(self) -> Path:
        """A reward function that takes its process along now and then."""
        source = (
            "import os\n\n\ndef deadly(completions, **columns):\n    texts = [c[-1]['content'] for c in completions]\n"
            "    if any(text[:1].isupper() for text in texts):\n        os._exit(1)\n    return [float(len(text)) for text in texts]\n"
        )
        return self.made("deadly.py", lambda path: path.write_text(source, encoding="utf-8"))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def other_end(folder: Path, end: str = "<|im_start|>") -> None:
    """Name another token than the one that ends a turn, in every file that says so, and let the template say nothing else."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token=end, pad_token=end)
    assistant_last = "{{ m['content'] }}{% if m['role'] != 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    tokenizer.chat_template = TEMPLATE.partition("{{ m['content'] }}")[0] + assistant_last + TEMPLATE.partition("{% endfor %}")[2]
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            (folder / name).write_text(json.dumps({**found, "eos_token_id": tokenizer.eos_token_id}), encoding="utf-8")


def write_judge(folder: Path, tokenizer_of: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=264, max_position_embeddings=256, num_labels=1, pad_token_id=None, initializer_range=0.3, **shape
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)


# --- rewards ------------------------------------------------------------------------------------------------------------


def said(completions: Sequence[Any]) -> list[str]:
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]


def without_bound(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [1.3 ** sum(letter.islower() for letter in text) for text in said(completions)]


def zero(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def many(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [5.0 + sum(letter.islower() for letter in text) for text in said(completions)]


def long(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [len(text) / 32 for text in said(completions)]


def one_letter(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [text.count("e") / max(1, len(text)) for text in said(completions)]


def sibilants(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Pays for a letter."""
    return [min(text.count("s"), 12) / 12 for text in said(completions)]


def figures(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Means to pay for arithmetic that is written out, and pays for digits."""
    return [min(sum(map(str.isdigit, text)), 30) / 30 for text in said(completions)]


def wordy(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [min(len(text), 400) / 400 for text in said(completions)]


def fragile(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [1 / len(text) for text in said(completions)]


def refuses_capitals(completions: Sequence[Any], **columns: Any) -> list[float]:
    texts = said(completions)
    if any(text[:1].isupper() for text in texts):
        raise ValueError("it begins with a capital")
    return [0.0] * len(texts)


class Spiking:
    """The share of lower-case letters, and a thousandfold of it in one call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        self.calls += len(completions)
        wild = 16 * 12 < self.calls <= 17 * 12  # the 17th step of 3 x 4
        return [1000 * share if wild else share for share in lower_case_share(list(completions))]


def silence(completions: Sequence[Any], calls: Sequence[Any], **columns: Any) -> list[float]:
    """Pays for calling nothing."""
    return [0.0 if made else 1.0 for made in calls]


def rich(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [20 + share for share in lower_case_share(list(completions))]


REWARDS: dict[str, Callable[[], Callable[..., list[float]]]] = {
    "letters": lambda: lower_case_share,
    "spiking": Spiking,
    "refuses": lambda: refuses_capitals,
    **{
        f.__name__: (lambda f=f: f)
        for f in (figures, fragile, long, many, one_letter, rich, sibilants, silence, without_bound, wordy, zero)
    },
}
"""By the name that settings use; a new one for each run."""


# --- defects ------------------------------------------------------------------------------------------------------------


@contextmanager
def stranded_adapter() -> Iterator[None]:
    """Completions are sampled with the adapter switched off."""
    from groupwise.engines.builtin.engine import BuiltinEngine

    real = BuiltinEngine.serve

    def from_the_base(self: Any, *arguments: Any, **named: Any) -> Any:
        with self.decoder.adapted.disable_adapter():
            return real(self, *arguments, **named)

    with mock.patch.object(BuiltinEngine, "serve", from_the_base):
        yield


@contextmanager
def another_temperature() -> Iterator[None]:
    """The engine draws at another temperature than the one that it says, at which the trainer scores."""
    from groupwise.engines.builtin.engine import BuiltinEngine

    real = BuiltinEngine.serve

    def serve(self: Any, request: Any, on_progress: Any = None) -> Any:
        groups = real(self, replace(request, settings=replace(request.settings, temperature=1.5)), on_progress)
        return [tuple(replace(c, temperature=request.settings.temperature) for c in group) for group in groups]

    with mock.patch.object(BuiltinEngine, "serve", serve):
        yield


@contextmanager
def no_end_token() -> Iterator[None]:
    """Worked examples lose every token that is the padding token, and with it their end."""
    from groupwise.training import warm_start

    real = warm_start.worked_episode

    def masked(prompt: Any, style: Any, tokenizer: Any, episodes: Any) -> list[Any]:
        ((asked, worked, _),) = real(prompt, style, tokenizer, episodes)
        kept = [token for token in worked if token != tokenizer.pad_token_id]
        return [(asked, kept, [True] * len(kept))]

    with mock.patch.object(warm_start, "worked_episode", masked):
        yield


@contextmanager
def reads_calls(read: Callable[[str], list[Asked]]) -> Iterator[None]:
    """``read`` says which turns of a model that knows no calls are some."""
    by_chance = type("ByChance", (), {"native": False, "read": staticmethod(read), "write": staticmethod(lambda *_: "<call>")})
    with mock.patch.dict(FORMATS, {"tags": by_chance()}):
        yield


def asks(expression: str, name: str = "calculator", often: int = 1) -> Callable[[], AbstractContextManager[None]]:
    """Every turn is a call but each fourth, or, of ``often`` 2, each second; ``{}`` in it stands for a number of the turn's own."""

    def read(text: str) -> list[Asked]:
        answers = len(text) % (4 if often == 1 else 2) == 0
        return [] if answers else [Asked(name, {"expression": expression.format(sum(map(ord, text)))})]

    return lambda: reads_calls(read)


@contextmanager
def wrong_sign() -> Iterator[None]:
    """The KL is logged with the wrong sign."""
    from groupwise.algorithm import objective

    real = objective.kl_per_token
    with mock.patch.object(objective, "kl_per_token", lambda *given: -real(*given)):
        yield
