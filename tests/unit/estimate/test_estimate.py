"""An estimate: the runtime's plan and refusal, parts that add up, the choice of microbatches, what bounds a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers_tiny_hf import tiny_model
from roundpipe import HostMemoryError, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.estimate.estimate import SAVED_INPUTS, Bound, Estimate, Machine, Work, estimate
from roundpipe.estimate.figures import GPUS, gpu_named, gpu_with, parse_gpus
from roundpipe.estimate.layer_costs import PaperModel, causal_lm_on_paper, layer_costs, sequential_on_paper
from roundpipe.plan import RunType, TaskKind, build_schedule
from roundpipe.plan.forecast import Network
from roundpipe.plan.predict import StageMemory
from roundpipe.store import host_memory
from roundpipe.store.training_memory import PaperOptimizer

WORDS, WIDTH = 1024, 512
MACHINE = Machine(GPUS["RTX4090"], 1, 10**12, 4e9)


def paper_model(num_blocks: int = 6, dtype: torch.dtype = torch.bfloat16) -> PaperModel:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    with torch.device("meta"):
        blocks = [block() for _ in range(num_blocks)]
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    return sequential_on_paper(model.to(dtype), loss_of)


def with_memory(gigabytes: float, **changes: object) -> Machine:
    gpu = dataclasses.replace(MACHINE.gpu, memory_bytes=int(gigabytes * 1e9))
    return dataclasses.replace(MACHINE, gpu=gpu, **changes)  # type: ignore[arg-type]


def test_with_enough_memory_all_layers_are_one_fused_stage() -> None:
    found = estimate(paper_model(), Work(16, 512, is_exact=False, num_microbatch=4), MACHINE)
    (task,) = found.forecast.tasks
    assert task.kind is TaskKind.FUSED
    assert found.fits
    assert SAVED_INPUTS not in found.host


def test_with_little_memory_the_plan_recomputes_and_stays_within_it() -> None:
    work, paper = Work(16, 512, num_microbatch=4), paper_model()
    large = estimate(paper, work, MACHINE)
    small = estimate(paper, work, with_memory(0.745))  # 0.6 GB of it is the driver's
    assert len(small.forecast.tasks) > 1
    assert small.forecast.fits
    assert small.device_bytes <= small.forecast.peak_bytes <= with_memory(0.745).plan_bytes
    assert small.host[SAVED_INPUTS] > 0
    assert small.compute_s > large.compute_s


def test_device_parts_add_up_to_the_peak_without_the_fresh_gradient() -> None:
    found = estimate(paper_model(), Work(16, 512, num_microbatch=4), MACHINE)
    fresh = max(2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH), 2 * (WORDS * WIDTH + WORDS))
    assert found.device_bytes == found.forecast.peak_bytes - fresh


def test_stale_steps_take_the_next_weights_and_a_second_buffer_in_addition() -> None:
    paper, work = paper_model(), Work(16, 512, num_microbatch=4)
    exact, stale = (estimate(paper, dataclasses.replace(work, is_exact=kind), MACHINE) for kind in (True, False))
    weights = sum(param.nbytes for param in paper.model.parameters())
    assert "weights of the next call" not in exact.device
    assert stale.device["weights of the next call"] == weights
    assert sum(stale.host.values()) - sum(exact.host.values()) == weights


def test_host_memory_is_that_of_the_table_of_bytes_per_parameter() -> None:
    paper = paper_model()
    count = sum(param.numel() for param in paper.model.parameters())
    assert sum(estimate(paper, Work(4, 64), MACHINE).host.values()) == 14 * count
    assert sum(estimate(paper, Work(4, 64, is_exact=False), MACHINE).host.values()) == 16 * count
    single = paper_model(dtype=torch.float32)
    assert sum(estimate(single, Work(4, 64), MACHINE).host.values()) == 20 * count


@pytest.mark.parametrize("missing", [0, 1])
def test_the_refusal_is_that_of_wrapping_to_the_letter(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        network = tiny_model("llama", num_layers=2).to(torch.bfloat16)
    paper = causal_lm_on_paper(network)
    ram = sum(estimate(paper, Work(4, 16), MACHINE).host.values()) - missing
    found = estimate(paper, Work(4, 16), dataclasses.replace(MACHINE, ram_bytes=ram))
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: ram)
    refusal = None
    try:
        wrap_model_to_roundpipe(network, optim_dtype=torch.float32, devices=["cpu"], pin_model="register").close()
    except HostMemoryError as error:
        refusal = str(error)
    assert found.refusal == refusal
    assert found.fits == (refusal is None) == (missing == 0)


def test_inputs_saved_for_recomputation_can_exceed_host_memory() -> None:
    paper, work = paper_model(), Work(16, 512, num_microbatch=4)
    needed = sum(estimate(paper, work, with_memory(0.745)).host.values())
    enough = estimate(paper, work, with_memory(0.745, ram_bytes=needed))
    short = estimate(paper, work, with_memory(0.745, ram_bytes=needed - 1))
    assert enough.fits
    assert not short.fits
    assert short.refusal is not None
    assert "inputs saved for recomputation do not" in short.refusal


def test_the_number_of_microbatches_is_the_fastest_that_fits() -> None:
    paper = paper_model()
    machine = with_memory(0.8)
    chosen = estimate(paper, Work(16, 2048), machine)
    every: dict[int, Estimate] = {
        count: estimate(paper, Work(16, 2048, num_microbatch=count), machine) for count in (1, 2, 4, 8, 16)
    }
    fitting = [each for each in every.values() if each.forecast.fits]
    assert not every[1].forecast.fits
    assert chosen.forecast.fits
    assert chosen.step_s <= 1.02 * min(each.step_s for each in fitting)


def test_a_layer_that_does_not_fit_is_reported() -> None:
    found = estimate(paper_model(), Work(16, 65536), with_memory(0.7))
    assert not found.forecast.fits
    assert not found.fits
    assert found.num_microbatch == 16  # the smallest microbatches


def test_what_takes_longest_bounds_the_step() -> None:
    paper, work = paper_model(), Work(16, 512, is_exact=False, num_microbatch=4)
    gpu = MACHINE.gpu
    bounds = {
        Bound.COMPUTE: dataclasses.replace(MACHINE, gpu=dataclasses.replace(gpu, half_flops=1e9)),
        Bound.LINK: dataclasses.replace(MACHINE, gpu=dataclasses.replace(gpu, link_bytes_per_s=1e6)),
        Bound.OPTIMIZER: dataclasses.replace(MACHINE, parameters_per_s=1e6),
    }
    for bound, machine in bounds.items():
        found = estimate(paper, work, machine)
        assert found.bound is bound
        assert found.step_s >= max(found.link_s, found.optimizer_s)


def test_an_exact_step_is_as_long_as_its_update_at_least_on_any_number_of_devices() -> None:
    paper = paper_model()
    for num_devices in (1, 2, 4):
        machine = dataclasses.replace(MACHINE, num_devices=num_devices, parameters_per_s=1e7)
        exact = estimate(paper, Work(16, 512, num_microbatch=8), machine)
        assert exact.step_s >= exact.optimizer_s
        assert exact.step_s >= exact.compute_s
        free = dataclasses.replace(machine, parameters_per_s=1e15)
        assert estimate(paper, Work(16, 512, num_microbatch=8), free).step_s < exact.step_s


def test_several_machines_divide_the_optimizer_and_exchange_four_bytes_per_parameter() -> None:
    paper, work = paper_model(), Work(16, 512, num_microbatch=4)
    count = sum(param.numel() for param in paper.model.parameters())
    alone = estimate(paper, work, MACHINE)
    for number in (2, 4, 8):
        found = estimate(paper, work, dataclasses.replace(MACHINE, network=Network(number, 1e9)))
        assert sum(found.host.values()) == pytest.approx((2 + 2 + 10 / number) * count, rel=1e-6)
        assert found.network_bytes == pytest.approx(4 * (number - 1) / number * count, rel=1e-6)
        assert found.optimizer_s == pytest.approx(alone.optimizer_s / number)
        assert found.exposed_s == found.step_s - max(found.forecast.step_s, found.link_s)
    assert alone.network_bytes == alone.network_s == alone.exposed_s == 0


def test_a_tied_head_is_updated_and_exchanged_once() -> None:
    with torch.device("meta"):
        network = tiny_model("qwen3", num_layers=2).to(torch.bfloat16)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    count = sum(param.numel() for param in network.parameters())
    found = estimate(
        causal_lm_on_paper(network), Work(4, 16), dataclasses.replace(MACHINE, network=Network(2, 1e9, 0.0, 0.0))
    )
    assert found.optimizer_s == pytest.approx(count / 2 / MACHINE.parameters_per_s)
    assert found.network_bytes == 2 * count
    assert found.network_s == pytest.approx(2 * count / 1e9)


def test_stale_steps_hide_the_exchange_that_is_no_longer_than_the_call() -> None:
    paper, work = paper_model(), Work(16, 512, is_exact=False, num_microbatch=4)
    alone = estimate(paper, work, MACHINE)
    total = 2 * sum(param.nbytes for param in paper.model.parameters()) / 2  # two exchanges, half of the bytes each
    fast = dataclasses.replace(MACHINE, network=Network(2, 1.001 * total / alone.step_s, 0.0, 0.0))
    slow = dataclasses.replace(MACHINE, network=Network(2, total / alone.step_s / 3, 0.0, 0.0))
    assert estimate(paper, work, fast).exposed_s == 0
    found = estimate(paper, work, slow)
    assert found.step_s == pytest.approx(3 * alone.step_s)
    assert found.bound is Bound.NETWORK


def test_the_plan_is_a_legal_plan_and_its_memory_that_of_the_planner() -> None:
    paper, work = paper_model(), Work(16, 512, num_microbatch=4)
    found = estimate(paper, work, with_memory(0.745))
    found.forecast.plan.check_valid(len(paper.layers), RunType.FUSED)
    assert build_schedule(found.forecast.plan, RunType.FUSED) == found.forecast.tasks
    assert found.forecast.overlap.tail >= 1
    profile_bytes = StageMemory(layer_costs(paper, MACHINE.gpu, 4, 512), "stage", 4).peak_bytes(found.forecast.tasks, 1)
    assert found.forecast.peak_bytes >= profile_bytes


def test_descriptions_of_gpus() -> None:
    assert parse_gpus("2xRTX4090") == (GPUS["RTX4090"], 2)
    assert parse_gpus("NVIDIA GeForce RTX 4090") == (GPUS["RTX4090"], 1)
    limited, count = parse_gpus("1xH200:24GB")
    assert (limited.name, limited.memory_bytes, count) == ("H200", 24 * 10**9, 1)
    sized, count = parse_gpus("4x24GB")
    assert (sized.name, sized.memory_bytes, count) == ("RTX4090", 24 * 10**9, 4)
    sized, _ = parse_gpus("1x24GiB")
    assert sized.memory_bytes == GPUS["RTX4090"].memory_bytes
    larger, _ = parse_gpus("1x192GB")
    assert (larger.name, larger.memory_bytes) == ("H200", 192 * 10**9)  # never less than what was asked for
    assert parse_gpus("RTX4090:48GB")[0].memory_bytes == 48 * 10**9
    assert gpu_with(80 * 2**30).name == "H100"
    assert gpu_named("NVIDIA H200", 149 * 10**9).memory_bytes == 149 * 10**9
    assert gpu_named("Unheard-of GPU", 24 * 2**30).name == "RTX4090"
    for wrong in ("24TB", "0xRTX4090", "2xGTX", "2xGTX:24GB", "H200:much", ""):
        with pytest.raises(ConfigError, match="--devices"):
            parse_gpus(wrong)


@pytest.mark.parametrize(("moments", "num_bytes"), [("float32", 8), ("bfloat16", 4)])
def test_state_on_disk_leaves_host_memory_and_bounds_the_step(moments: str, num_bytes: int) -> None:
    paper = paper_model()
    kept = PaperOptimizer("Adam", 2, moments)
    on_disk = dataclasses.replace(kept, is_on_disk=True)
    memory = estimate(paper, Work(16, 512, num_microbatch=4, optimizer=kept), MACHINE)
    slow, fast = (
        estimate(
            paper,
            Work(16, 512, num_microbatch=4, optimizer=on_disk),
            dataclasses.replace(MACHINE, disk_bytes_per_s=rate),
        )
        for rate in (1e8, 1e15)
    )
    count = sum(param.numel() for param in paper.model.parameters())
    row = kept.row
    assert memory.host[row] == memory.state_bytes == slow.state_bytes
    assert slow.state_bytes == pytest.approx(num_bytes * count, rel=0.01)
    assert memory.host == {**slow.host, row: memory.host[row]}
    assert slow.disk_s == pytest.approx(2 * slow.state_bytes / 1e8)
    assert slow.bound is Bound.DISK
    assert slow.step_s > slow.disk_s * 0.9
    assert slow.optimizer_s == memory.optimizer_s == fast.optimizer_s
    assert fast.step_s == memory.step_s
