"""The record of a step: columns that views share, that survive another cut and a checkpoint, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from slow_grpo import config_of, learner_of, make_groups

from groupwise.batch import Batch
from groupwise.errors import TrainingError
from groupwise.training.microbatches import cut

REWARDS = [[2.8, 0.2, 1.7], [1.0, 0.0], [0.0, 0.4, 0.0, 2.0]]


@pytest.fixture
def groups(tiny_llama):
    return make_groups(tiny_llama(), REWARDS)


@pytest.fixture
def batch(groups):
    everyone = [(g, m) for g, group in enumerate(groups) for m in range(len(group.completions))]
    return Batch.of(groups, everyone, torch.device("cpu"))


def test_it_holds_every_token_with_its_provenance(groups, batch):
    completions = [c for group in groups for c in group.completions]
    assert batch.token_ids_S.tolist() == [t for c in completions for t in c.token_ids]
    assert batch.sampler_logprobs_T.tolist() == pytest.approx([x for c in completions for x in c.logprobs])
    assert batch.sampled_S.all()
    assert batch.lengths_N.tolist() == [len(c.token_ids) for c in completions]
    assert batch.packing() == [(g.prompt.token_ids, [list(c.token_ids) for c in g.completions]) for g in groups]


def test_a_view_is_a_window_onto_the_columns(batch):
    rows = range(2, 6)
    batch.write(rows, old_logprobs_T=torch.ones(batch.tokens(rows).stop - batch.tokens(rows).start))
    view = batch.view(rows)
    assert view.members == batch.members[2:6]
    view.old_logprobs_T[0] = 5.0
    start = batch.tokens(rows).start
    assert batch.old_logprobs_T[start] == 5.0
    assert float(batch.old_logprobs_T.sum()) == 4 + len(view.weights_T)
    assert view.packing() == [(batch.prompts[g], ids) for g, ids in _by_group(view)]


def _by_group(view):
    ids = [piece.tolist() for piece in view.token_ids_S.split(view.span_N.tolist())]
    groups = view.group_N.tolist()
    return [(g, [x for x, other in zip(ids, groups, strict=True) if other == g]) for g in dict.fromkeys(groups)]


@pytest.mark.parametrize("budget", [1, 17, 40, 10_000])
def test_micro_batches_are_ranges_in_order_whatever_the_budget(tiny_llama, batch, budget):
    learner, _ = learner_of(tiny_llama(), config_of())
    parts = cut(batch, learner.scorer, budget)
    assert [n for part in parts for n in part.rows] == list(range(len(batch)))
    assert torch.equal(torch.cat([part.packed.targets_T for part in parts]), batch.token_ids_S)
    assert all(part.tokens <= budget or len(part.rows) == 1 for part in parts)


def test_notes_come_back_and_belong_to_one_batch(groups, batch):
    batch.write(range(len(batch)), old_logprobs_T=torch.randn(len(batch.weights_T)), mask_T=torch.ones(len(batch.weights_T)))
    again = Batch.of(groups, batch.members, torch.device("cpu"))
    again.restore(batch.computed())
    assert torch.equal(again.old_logprobs_T, batch.old_logprobs_T)
    assert again.values_T is None
    with pytest.raises(ValueError, match="no column old_logprobs_T"):
        Batch.of(groups, batch.members[:3], torch.device("cpu")).restore(batch.computed())
    with pytest.raises(ValueError, match="no column weights_T"):
        again.restore({"weights_T": batch.weights_T})


def test_two_temperatures_cannot_be_scored_in_one_batch(groups):
    warm = replace(groups[0].completions[0], temperature=0.7)
    mixed = [replace(groups[0], completions=(warm, *groups[0].completions[1:])), *groups[1:]]
    with pytest.raises(TrainingError, match=r"temperatures 0.7, 1, but .* one rollout.temperature"):
        Batch.of(mixed, [(0, 0), (1, 0)], torch.device("cpu"))


def test_the_temperature_of_the_samples_is_the_one_that_is_scored(tiny_llama):
    """Whatever the config says by now."""
    learner, before = learner_of(tiny_llama(), config_of(rollout={"temperature": 1.0}))
    metrics = learner.learn(make_groups(before, REWARDS, temperature=0.6)).metrics
    assert metrics["policy/sampler_mismatch"].value < 1e-5


def test_the_place_of_a_completion_among_all_tokens(groups):
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    first, second = [range(sum(lengths[:n]), sum(lengths[: n + 1])) for n in (3, 6)]
    batch = Batch.of(groups, [(1, 0), (2, 1)], torch.device("cpu"))
    assert batch.place_N.tolist() == [3, 6]
    assert batch.place_T.tolist() == [*first, *second]
    assert batch.view(range(1, 2)).place_T.tolist() == [*second]
    assert Batch.of(groups, [], torch.device("cpu")).place_T.tolist() == []
