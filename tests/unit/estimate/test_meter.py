"""The meter: seconds by the roofline, launches, and device memory of operations on the meta device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe.estimate.figures import DeviceFigures
from roundpipe.estimate.meter import GpuKernels, Meter

FIGURES = DeviceFigures("round numbers", 10**10, 1e12, 1e11, 1e9, 1e8, attention_efficiency=0.5, launch_s=1e-6)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_a_large_product_takes_the_time_of_its_flops_in_the_rate_of_its_dtype() -> None:
    for dtype, rate in ((torch.bfloat16, 1e12), (torch.float32, 1e11)):
        first, second = empty(4000, 5000, dtype=dtype), empty(5000, 6000, dtype=dtype)
        with Meter(FIGURES) as meter:
            first @ second
        assert meter.device_s == 2 * 4000 * 5000 * 6000 / rate
        assert meter.launch_s == 1e-6


def test_a_thin_product_and_an_elementwise_operation_take_the_time_of_their_bytes() -> None:
    vector, matrix = empty(1, 1000), empty(1000, 1000)
    with Meter(FIGURES) as meter:
        vector @ matrix
    assert meter.device_s == 2 * (1000 + 1000 * 1000 + 1000) / 1e9
    with Meter(FIGURES) as meter:
        matrix * matrix
    assert meter.device_s == 3 * matrix.nbytes / 1e9


def test_an_expanded_tensor_is_read_from_the_memory_that_it_has() -> None:
    row, matrix = empty(1, 1000), empty(1000, 1000)
    with Meter(FIGURES) as meter:
        matrix + row.expand(1000, 1000)
    assert meter.device_s == pytest.approx((2 * matrix.nbytes + row.nbytes) / 1e9, rel=1e-12)


def test_views_and_allocations_take_launches_but_no_device_time() -> None:
    matrix = empty(100, 100)
    with Meter(FIGURES) as meter:
        matrix.view(-1)[5:].detach()
        matrix.new_empty(5)
    assert meter.device_s == 0.0
    assert meter.launch_s > 0


def test_a_lookup_reads_only_the_rows_that_it_returns() -> None:
    table, ids = empty(100_000, 64), torch.empty(7, dtype=torch.int64, device="meta")
    with Meter(FIGURES) as meter:
        F.embedding(ids, table)
    assert meter.device_s == 2 * 7 * 64 * 2 / 1e9


def test_memory_counts_storages_once_and_until_they_are_freed() -> None:
    matrix = empty(100, 100)
    with Meter(FIGURES) as meter:
        first = matrix * 2
        view = first.view(-1)
        assert meter.live_bytes == matrix.nbytes
        second = first + 1
        assert meter.live_bytes == meter.peak_bytes == 2 * matrix.nbytes
        del first, view
        assert meter.live_bytes == matrix.nbytes
        second.add_(1)
        assert meter.peak_bytes == 2 * matrix.nbytes
        del second
    assert meter.live_bytes == 0


def test_attention_saves_no_scores_and_a_causal_mask_halves_its_time() -> None:
    shape = (2, 4, 512, 64)
    flops = 2 * 2 * 2 * 4 * 512 * 512 * 64
    figures = dataclasses.replace(FIGURES, memory_bytes_per_s=1e15)
    for is_causal, share in ((False, 1.0), (True, 0.5)):
        query, key, value = (empty(*shape).requires_grad_() for _ in range(3))
        with Meter(figures) as meter, GpuKernels(meter):
            output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            sums_bytes = 4 * 2 * 4 * 512
            assert meter.live_bytes == output.nbytes + sums_bytes
            assert meter.device_s == pytest.approx(share * flops / 1e12 / 0.5, rel=1e-12)
            forward_s = meter.device_s
            output.sum().backward()
        assert meter.device_s - forward_s == pytest.approx(2.5 * forward_s, rel=1e-3)  # and the sum, which is short
        assert query.grad is not None
        assert query.grad.shape == query.shape


def test_rms_norm_is_one_kernel() -> None:
    norm, values = nn.RMSNorm(256, device="meta", dtype=torch.bfloat16), empty(64, 256).requires_grad_()
    with Meter(FIGURES) as meter, GpuKernels(meter):
        output = norm(values)
        assert meter.device_s == 2 * values.nbytes / 1e9
        output.sum().backward()
    assert norm.weight.grad is not None


def test_grouped_products_count_each_row_once() -> None:
    rows, experts = empty(96, 32), empty(4, 32, 48)
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    with Meter(FIGURES) as meter:
        torch._grouped_mm(rows, experts, offs=offsets)
    bytes_moved = rows.nbytes + experts.nbytes + offsets.nbytes + 96 * 48 * 2
    assert meter.device_s == max(2 * 96 * 32 * 48 / 1e12, bytes_moved / 1e9)
    # The gradient of the experts' weights: the 96 rows are divided among the experts.
    rate = DeviceFigures("slow products", 10**10, 1e6, 1e6, 1e12, 1e8)
    with Meter(rate) as meter:
        result = torch._grouped_mm(rows.t(), empty(96, 48), offs=offsets)
    assert result.shape == (4, 32, 48)
    assert meter.device_s == 2 * 96 * 32 * 48 / 1e6


def test_questions_about_values_get_the_answers_of_ordinary_data() -> None:
    mask = torch.empty(3, 5, dtype=torch.bool, device="meta")
    with Meter(FIGURES):
        assert bool(mask.all())
        assert mask.nonzero().shape == (15, 2)
    with Meter(FIGURES), pytest.raises(RuntimeError, match="item"):
        empty(1).item()
