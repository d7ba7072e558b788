"""Many GPUs, against the formulas of docs/explanation/scale.md worked by hand."""

import dataclasses
import math
import re

import pytest

from groupwise.planner import HARDWARE, KNOWN_SHAPES
from scripts.write_scale_docs import GPUS, PAGE, SIZES, Work, scaled

H100 = HARDWARE["h100"]
SEVEN, LARGE = KNOWN_SHAPES["Qwen/Qwen2.5-7B"], KNOWN_SHAPES["Qwen/Qwen2.5-72B"]


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("size", SIZES)
def test_the_page_s_formulas_and_figures_come_to_the_planner_s(size, gpus):
    page = PAGE.read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {size} \| ([\d.]+) \| ([\d.]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    P, Q, layers, A, K = (float(cell.replace(",", "")) for cell in row)
    P, Q, B, G, p, c, m = 1e9 * P, 1e9 * Q, 512 * 16, 16, 256, 1024, 4096
    R, W, X = 0.4 * 989e12, 0.6 * 3.35e12, 450e9 if gpus == 8 else 50e9

    def cache(r, length):
        return K * (r * length + p * max(1, r / G))

    def work(length):
        return 2 * Q + 4 * layers * A * (p + length)

    def step(r, length, t):
        return max((2 * Q + cache(r, length)) / W, r * work(length) / R) / t + 4e-6 * (10 * layers + 66)

    found = scaled(KNOWN_SHAPES[f"Qwen/Qwen2.5-{size}"], gpus, H100)
    passes = math.ceil(B / (15 * gpus))
    assert found.state_bytes == pytest.approx(18 * P / gpus, rel=0.01)
    assert found.learning_s == pytest.approx(5 * work(c / 2) * (B * c + p * B / G) / (gpus * R), rel=0.01)
    assert found.traffic_s == pytest.approx((gpus - 1) / gpus * (passes * 10 * P + 2 * P) / X, rel=0.01)
    free = 0.8 * 79.6 * 2**30 - 18 * P / gpus
    fits = [t for t in (1, 2, 4, 8) if 2 * P + cache(min(256, B * t / gpus), c) <= t * free]
    assert found.copy_gpus == (fits[0] if fits else None)
    if fits:
        t, rows = fits[0], min(256, B * fits[0] / gpus)
        prompts = 2 * Q * p * B / (G * gpus * R)
        sampling = prompts + math.ceil(B * t / (gpus * rows)) * c * step(rows, c / 2, t)
        assert found.sampling_s == pytest.approx(sampling, rel=0.01)
        assert found.longest_s == pytest.approx(m * step(1, m / 2, t), rel=0.01)
        assert found.handover_s == pytest.approx(2 * P / X if t > 1 else 0, rel=0.01)


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
