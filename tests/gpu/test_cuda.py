"""The runtime on a real GPU: parity with plain PyTorch, workers that share a GPU, memory, failures."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers_plans import legal_plans
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import Event, StreamKind
from roundpipe.devices.cuda import CudaDevice
from roundpipe.plan import RunType

MICROBATCHES = 4
WORKERS = [["cuda:0"], ["cuda:0"] * 2, ["cuda:0"] * 3]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def build(dtype: torch.dtype = torch.float32, dropout: float = 0.0, width: int = 64) -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [Block(width, dropout) for _ in range(3)]
    return nn.Sequential(nn.Embedding(50, width), *blocks, nn.Linear(width, 50)).to(dtype)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randint(0, 50, (8, 16), generator=generator),
        torch.randint(0, 50, (8, 16), generator=generator),
    )


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten()) / MICROBATCHES


def train_plain(model: nn.Sequential, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The reference loop with everything on the GPU and fp32 masters on the CPU, as RoundPipe keeps them."""
    x, y = batch()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    model = model.cuda()
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for x_part, y_part in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            loss = loss_fn(model(x_part.cuda()), y_part.cuda())
            loss.backward()
            total = total + loss.detach().cpu()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.cpu().float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(total)
    return losses, [p.detach().cpu() for p in model.parameters()]


def train_roundpipe(
    model: nn.Sequential,
    steps: int,
    devices: list[str],
    *,
    is_async: bool = False,
    pin_model: str = "alloc",
    config: RoundPipeRunConfig = RoundPipeRunConfig(),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    x, y = batch()
    torch.manual_seed(11)
    pipe = RoundPipe(model, optim_dtype=torch.float32, devices=devices, pin_model=pin_model, model_run_config=config)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1, momentum=0.9)

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = []
    call = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    for _ in range(steps):
        losses.append(pipe.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=call))
        pipe.step(step_fn, is_async=is_async)
    pipe.synchronize()
    weights = [p.detach().clone() for p in pipe.parameters()]
    pipe.close()
    return losses, weights


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("devices", WORKERS, ids=len)
def test_training_equals_plain_pytorch_on_the_gpu(dtype: torch.dtype, devices: list[str]) -> None:
    expected_losses, expected_weights = train_plain(build(dtype), 4)
    losses, weights = train_roundpipe(build(dtype), 4, devices)
    assert_equal(losses, expected_losses)
    assert_equal(weights, expected_weights)


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_no_plan_changes_a_bit(grain: str) -> None:
    expected = train_roundpipe(build(dropout=0.2), 2, ["cuda:0"])
    for number, plan in enumerate(legal_plans(5, RunType.FUSED)):
        config = RoundPipeRunConfig(execute_plan=plan, recompute_grain=grain)
        got = train_roundpipe(build(dropout=0.2), 2, WORKERS[number % 3], config=config)
        assert_equal(got[0], expected[0])
        assert_equal(got[1], expected[1])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_workers_and_pin_modes_agree(is_async: bool, pin_model: str) -> None:
    expected = train_roundpipe(build(torch.bfloat16, 0.1), 5, ["cuda:0"], is_async=is_async)
    for devices in WORKERS:
        got = train_roundpipe(build(torch.bfloat16, 0.1), 5, devices, is_async=is_async, pin_model=pin_model)
        assert_equal(got[0], expected[0])
        assert_equal(got[1], expected[1])


def test_forward_and_backward_equal_plain_pytorch() -> None:
    x, y = batch()
    plain = build().cuda()
    parts = [plain(part.cuda()) for part in x.tensor_split(MICROBATCHES)]
    whole = torch.cat(parts).detach().requires_grad_()
    F.cross_entropy(whole.flatten(0, 1), y.cuda().flatten()).backward()
    for part, gradient in zip(parts, whole.grad.tensor_split(MICROBATCHES), strict=True):
        part.backward(gradient)
    pipe = RoundPipe(build(), devices=["cuda:0"] * 2, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES))
    with torch.no_grad():
        inference = pipe(x)
    outputs = pipe(x, roundpipe_run_config=RoundPipeRunConfig(output_device="cuda:0"))
    assert outputs.is_cuda
    F.cross_entropy(outputs.flatten(0, 1), y.cuda().flatten()).backward()
    pipe.synchronize()
    assert torch.equal(inference, torch.cat(parts).detach().cpu())
    assert torch.equal(outputs.detach(), torch.cat(parts).detach())
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.cpu())
    pipe.close()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("devices", WORKERS, ids=len)
def test_late_copies_and_poisoned_memory_change_nothing(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], is_async: bool
) -> None:
    """Every copy is delayed by chance and all memory is NaN until it is written: a read before its copy shows."""
    plan = ModelExecutePlan([range(0, 1), range(1, 3)], [range(3, 5), range(2, 3), range(0, 2)])
    config = RoundPipeRunConfig(execute_plan=plan)
    expected = train_roundpipe(build(), 20, ["cuda:0"], is_async=is_async)
    gc.collect()
    monkeypatch.setenv("ROUNDPIPE_STRESS", "1")
    for _ in range(2):
        got = train_roundpipe(build(), 20, devices, is_async=is_async, config=config)
        assert_equal(got[0], expected[0])
        assert_equal(got[1], expected[1])
        gc.collect()


def test_a_forgotten_wait_shows_under_stress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute that does not wait for its uploads reads NaN: the test above can fail."""
    monkeypatch.setenv("ROUNDPIPE_STRESS", "1")
    gc.collect()
    copy, record, stream_wait = CudaDevice.copy, CudaDevice.record, CudaDevice.stream_wait

    def marked_record(device: CudaDevice, stream: StreamKind) -> Event:
        event = record(device, stream)
        event.stream = stream
        return event

    def forgetful(device: CudaDevice, stream: StreamKind, event: Event) -> None:
        if stream is StreamKind.COMPUTE and getattr(event, "stream", None) is StreamKind.ACTIVATIONS_UP:
            return
        stream_wait(device, stream, event)

    def slow(device: CudaDevice, destination: torch.Tensor, source: torch.Tensor, stream: StreamKind) -> None:
        if stream is StreamKind.ACTIVATIONS_UP:
            with torch.cuda.stream(device._streams[stream]):
                torch.cuda._sleep(200_000_000)
        copy(device, destination, source, stream)

    monkeypatch.setattr(CudaDevice, "copy", slow)
    monkeypatch.setattr(CudaDevice, "record", marked_record)
    monkeypatch.setattr(CudaDevice, "stream_wait", forgetful)
    model = nn.Sequential(*list(build())[1:])
    x = torch.randn(8, 16, 64)
    pipe = RoundPipe(model, devices=["cuda:0"], model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES))
    with torch.no_grad():
        outputs = pipe(x)
    assert outputs.isnan().any()
    pipe.close()


class Greedy(nn.Module):
    """Asks for more memory than any GPU has, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.wants_everything = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants_everything:
            x = x + torch.empty(1 << 45, device=x.device)[0]
        return x * self.scale


@pytest.mark.parametrize("devices", WORKERS, ids=len)
def test_out_of_memory_is_raised_and_survived(devices: list[str]) -> None:
    x, y = batch()
    greedy = Greedy()
    model = nn.Sequential(*list(build())[:4], greedy, list(build())[4])
    pipe = RoundPipe(model, devices=devices, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES))
    before = pipe.forward_backward((x,), label=y, loss_fn=loss_fn)
    pipe.zero_grad()
    greedy.wants_everything = True
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.forward_backward((x,), label=y, loss_fn=loss_fn)
    assert any("layer 4" in note and "cuda:0" in note for note in caught.value.__notes__)
    greedy.wants_everything = False
    assert torch.equal(pipe.forward_backward((x,), label=y, loss_fn=loss_fn), before)
    pipe.close()


def test_a_real_shortage_of_memory_is_survived() -> None:
    """A batch too large for a capped GPU fails; a smaller one then trains."""
    torch.cuda.set_per_process_memory_fraction(2e9 / torch.cuda.get_device_properties(0).total_memory)
    try:
        pipe = RoundPipe(build(width=256), devices=["cuda:0"], model_run_config=RoundPipeRunConfig(num_microbatch=1))
        x = torch.zeros(4096, 512, dtype=torch.long)
        with pytest.raises(torch.OutOfMemoryError):
            pipe.forward_backward((x,), label=x, loss_fn=loss_fn, return_outputs=True)
        x, y = batch()
        assert torch.isfinite(pipe.forward_backward((x,), label=y, loss_fn=loss_fn))
        pipe.synchronize()
        pipe.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0"] * 2], ids=len)
def test_memory_does_not_grow_over_200_steps(devices: list[str]) -> None:
    x, y = batch()
    pipe = RoundPipe(
        build(width=256), devices=devices, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    )
    optimizer = torch.optim.Adam(pipe.optim_parameters())

    def train(steps: int) -> None:
        for _ in range(steps):
            pipe.forward_backward((x,), label=y, loss_fn=loss_fn)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        pipe.synchronize()
        gc.collect()
        torch.cuda.synchronize()

    train(50)
    allocated, reserved, resident = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), _resident_bytes()
    train(200)
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved
    assert _resident_bytes() <= resident + (8 << 20)
    pipe.close()


def test_the_first_call_is_probed_and_has_a_good_plan() -> None:
    x, y = batch()
    pipe = RoundPipe(build(), devices=["cuda:0"], model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES))
    for _ in range(3):
        pipe.forward_backward((x,), label=y, loss_fn=loss_fn)
        assert {span.label for span in pipe.timeline().spans} == {"FB0"}
    pipe.close()


def test_less_memory_gives_smaller_stages_and_the_same_bits() -> None:
    def gradients() -> tuple[set[str], list[torch.Tensor]]:
        torch.manual_seed(1)
        layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(8)]
        pipe = RoundPipe(torch.nn.Sequential(*layers), devices=["cuda:0"])
        x = torch.randn(32768, 1024)
        config = RoundPipeRunConfig(num_microbatch=2)
        pipe.forward_backward((x,), label=x, loss_fn=lambda out, label: (out - label).pow(2).mean(), run_config=config)
        pipe.synchronize()
        found = [param.grad.clone() for param in pipe.parameters() if param.grad is not None]
        labels = {span.label for span in pipe.timeline().spans}
        pipe.close()
        return labels, found

    labels, expected = gradients()
    assert labels == {"FB0"}
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.9e9) / total)
    try:
        labels, found = gradients()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(labels) > 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_explicit_plan_is_followed() -> None:
    x, y = batch()
    plan = ModelExecutePlan([range(0, 2)], [range(2, 5), range(1, 2), range(0, 1)])
    pipe = RoundPipe(build(), devices=["cuda:0"] * 2)
    config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=MICROBATCHES)
    pipe.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=config)
    assert {span.label for span in pipe.timeline().spans} == {"F0", "FB1", "B2", "B3"}
    pipe.close()


def test_registered_weights_and_their_neighbours_can_still_be_copied() -> None:
    """CUDA refuses a copy that begins in registered memory and ends outside: inputs next to weights must not."""
    width = 1500
    base = torch.randn(7 + width * width + 64 * width)
    layer = torch.nn.Linear(width, width, bias=False)
    layer.weight.data = base[7 : 7 + width * width].view(width, width)
    neighbour = base[7 + width * width :].view(64, width)
    expected = F.linear(neighbour.cuda(), layer.weight.detach().cuda())
    pipe = RoundPipe(torch.nn.Sequential(layer), devices=["cuda:0"], pin_model="register")
    with torch.no_grad():
        assert torch.equal(pipe(neighbour, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)), expected.cpu())
    assert torch.equal(layer.weight.detach().cuda().cpu(), layer.weight.detach())
    assert torch.equal(neighbour.cuda().cpu(), neighbour)
    pipe.close()
