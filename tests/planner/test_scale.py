"""Many GPUs, against the formulas of docs/explanation/scale.md worked by hand."""

import dataclasses

import pytest

from groupwise.planner import HARDWARE, KNOWN_SHAPES
from scripts.write_scale_docs import Work, scaled

H100 = HARDWARE["h100"]
SEVEN, LARGE = KNOWN_SHAPES["Qwen/Qwen2.5-7B"], KNOWN_SHAPES["Qwen/Qwen2.5-72B"]


def test_learning_divides_by_the_gpus_and_one_completion_does_not():
    few, many = scaled(SEVEN, 8, H100), scaled(SEVEN, 64, H100)
    assert few.learning_s == pytest.approx(8 * many.learning_s)
    assert few.longest_s == many.longest_s
    read = 2 * (SEVEN.layers * SEVEN.layer_matrices + SEVEN.head)
    cache = SEVEN.cached(2) * (256 + 2048)
    assert few.longest_s == pytest.approx(4096 * ((read + cache) / (0.6 * 3.35e12) + 4e-6 * (28 * 10 + 66)))


def test_state_is_18_bytes_a_weight_over_the_gpus():
    assert scaled(SEVEN, 8, H100).state_bytes == pytest.approx(18 * SEVEN.parameters / 8, rel=1e-6)


def test_a_copy_takes_more_gpus_where_one_has_no_room():
    assert scaled(SEVEN, 8, H100).copy_gpus == 1
    assert scaled(LARGE, 64, H100).copy_gpus == 8
    poor = scaled(LARGE, 8, H100)
    assert poor.copy_gpus is None
    assert poor.bottleneck == "memory"
    assert scaled(LARGE, 512, H100).longest_s < 4096 * 2 * LARGE.parameters / (0.6 * 3.35e12)


def test_traffic_between_machines_is_the_network_s():
    inside, outside = scaled(SEVEN, 8, H100), scaled(SEVEN, 16, H100)
    passes = inside.traffic_s * 450e9 / (7 / 8 * 2 * SEVEN.parameters)
    assert passes == pytest.approx(5 * round((passes - 1) / 5) + 1, rel=1e-6), "(2 + 2 + 4 + 2) P a pass, and 2 P to sample"
    slow = scaled(SEVEN, 16, H100, Work(network_bytes_per_s=5e9))
    assert slow.traffic_s == pytest.approx(10 * outside.traffic_s)
    assert slow.bottleneck == "network"


def test_what_a_step_waits_for():
    assert scaled(SEVEN, 8, H100).bottleneck == "learning"
    assert scaled(SEVEN, 512, H100).bottleneck == "sampling, longest"
    even = scaled(SEVEN, 512, H100, dataclasses.replace(Work(), most_tokens=1024))
    assert even.bottleneck == "sampling, all"
    assert even.ahead_s < even.step_s == pytest.approx(even.sampled_s + even.learnt_s + even.handover_s)
