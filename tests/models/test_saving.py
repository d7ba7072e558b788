"""Weights as files: what transformers and safetensors read from them, their rights, and that one tensor at a time is in memory."""

import os
import weakref
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from groupwise.models import saving
from groupwise.models.load import save_model
from groupwise.models.saving import Made, size_bytes, write_tensors


def tensors():
    torch.manual_seed(0)
    return {
        "wide": torch.randn(3, 5), "half": torch.randn(7, dtype=torch.bfloat16), "count": torch.tensor(3), "no": torch.empty(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8), "turned": torch.randn(4, 6).t(), "flag": torch.tensor([True, False, True]),
        "exact": torch.randn(2, dtype=torch.float64),
    }  # fmt: skip


def test_the_library_reads_what_was_written(tmp_path):
    wanted = tensors()
    write_tensors(tmp_path / "a.safetensors", wanted, {"format": "pt"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_tensor_that_is_made_for_the_file_lives_at_a_time(tmp_path):
    living, most = weakref.WeakSet(), []

    def make(number):
        most.append(len(living))
        tensor = torch.full((100,), float(number))
        living.add(tensor)
        return tensor

    made = {f"t{n}": Made(torch.Size((100,)), torch.float32, partial(make, n)) for n in range(5)}
    write_tensors(tmp_path / "a.safetensors", made)
    assert most == [0] * 5
    assert size_bytes(made) == 2000
    assert load_file(tmp_path / "a.safetensors")["t3"].unique().tolist() == [3.0]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_rights_of_every_weights_file_are_those_of_other_files(tiny_qwen2, tmp_path, umask, mode):
    pytest.importorskip("peft")
    from groupwise.config.schema import LoraConfig
    from groupwise.models.adapters import attach, peft_config_of
    from groupwise.models.load import Policy

    before = os.umask(umask)
    try:
        policy = Policy(attach(tiny_qwen2(), peft_config_of(LoraConfig(rank=2))), _NoTokenizer(), (2,), 64, "tiny")
        folder = save_model(policy, tmp_path / "saved")
    finally:
        os.umask(before)
    found = {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o777 for p in folder.rglob("*.safetensors")}
    assert found == {"model.safetensors": mode, "adapter/adapter_model.safetensors": mode}


def test_a_model_is_on_the_disk_before_it_has_its_name(tiny_qwen2, tmp_path, monkeypatch):
    from groupwise.models.load import Policy

    synced, real = [], saving.os.fsync
    monkeypatch.setattr(saving.os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), real(handle)))
    folder = save_model(Policy(tiny_qwen2(), _NoTokenizer(), (2,), 64, "tiny"), tmp_path / "saved")
    aside = str(tmp_path / ".saved.partial")
    assert {f"{aside}/{name}" for name in ("model.safetensors", "config.json")} | {aside, str(folder), str(tmp_path)} <= set(
        synced
    )
    assert synced.index(aside) < synced.index(str(folder))


class _NoTokenizer:
    def save_pretrained(self, folder, **_):
        pass
