"""Training with masters of 24 bits equals a plain loop that rounds its float32 masters after every step, bit for bit.

The same bits follow on any number of devices, with every kind of step, without the kernel and in resumed runs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_adam import NumpyAdamW
from helpers_parity import Models, StalenessReference, assert_same, batch, call_reference, mse, seeded
from roundpipe import AutoRoundPipe, GradScaler, RoundPipe, RoundPipeRunConfig, checkpoint, clip_grad_norm_
from roundpipe import wrap_model_to_roundpipe as wrap
from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.optim import SGD, AdamW, Lion, one_pass
from roundpipe.optim.lion import PlainLion
from roundpipe.optim.native.kernel import one_pass_kernel
from roundpipe.store import training_memory
from roundpipe.store.values import Rounding, ShortMaster, flat

WIDTH, ROWS, NUM_MICROBATCH = 66, 6, 3  # weights of 4,356 elements: large enough for moments in 8 bits
BF16, F32 = torch.bfloat16, torch.float32
CONFIG = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)


def momentum_sgd(params: Any, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return SGD(params, lr=lr, momentum=0.9, weight_decay=weight_decay)


def plain_sgd(params: Any, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=weight_decay, foreach=False)


# Ours, what computes the same in plain torch or numpy, and one of torch that is given to the model itself.
KINDS: dict[str, tuple[Any, Any]] = {
    "AdamW": (AdamW, NumpyAdamW),
    "Lion": (Lion, PlainLion),
    "SGD": (momentum_sgd, plain_sgd),
    "torch": (plain_sgd, plain_sgd),
}
KERNELS = list(KINDS)[:3]


def network() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*layers).to(BF16)


def data(seed: int) -> tuple[Tensor, Tensor]:
    return batch(ROWS, WIDTH, seed=2 * seed).to(BF16), batch(ROWS, WIDTH, seed=2 * seed + 1).to(BF16)


def float_mse(output: Tensor, label: Tensor) -> Tensor:
    return mse(output.float(), label.float())


class Rounded:
    """A plain optimizer whose parameters are rounded to 24 bits after every step."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        self._optimizer, self._params, self._rounding = optimizer, params, Rounding()

    def step(self) -> None:
        self._optimizer.step()
        for param in self._params:
            self._rounding.round(flat(param.detach()))
        self._rounding.count += 1

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_float32_masters_that_are_rounded_after_each_step(models: Models, kind: str) -> None:
    ours, plain = KINDS[kind]
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).to(BF16)
    model = models.wrap_copy(module, 3, optim_dtype=F32, master_bits=24)
    reference = StalenessReference(module, lambda params: plain(params, lr=0.01, weight_decay=0.1), F32)
    reference.optimizer = Rounded(reference.optimizer, reference.masters)  # type: ignore[assignment]
    copies = list(model.optim_parameters())
    optimizer = ours(copies, lr=0.01, weight_decay=0.1)
    for seed, is_async in enumerate([False, True, True, False]):
        x, y = data(seed)
        expected = call_reference(reference.module, (x,), {}, y, float_mse, NUM_MICROBATCH).loss
        assert_same(model.forward_backward((x,), label=y, loss_fn=float_mse, run_config=CONFIG), expected)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
        reference.step(is_async)
    model.synchronize()
    for master, expected, weight in zip(copies, reference.masters, model.model.parameters(), strict=True):
        assert isinstance(master.halves, ShortMaster) == (kind != "torch"), "masters are stored as weights and bytes"
        values = master.detach().clone()
        assert_same(values, expected.detach())
        assert not (values.view(torch.int32) & 0xFF).any()
        assert_same(values.to(BF16), weight.detach())


# The same bits in every way to train.


def everything(
    models: Models,
    num_devices: int = 2,
    *,
    kind: str = "AdamW",
    moments: str = "float32",
    is_async: bool = False,
    staleness: int = 1,
    scaled: bool = False,
    num_calls: int = 1,
    looks: bool = False,
) -> list[Any]:
    """Losses, norms, weights, masters and the optimizer's state of a training that clips.

    num_calls: calls whose gradients a step gathers. looks: whether to read the masters between steps.
    """
    torch.manual_seed(5)
    options = {"optim_dtype": F32, "model_run_config": CONFIG, "staleness": staleness, "master_bits": 24}
    model = models.wrap_copy(seeded(network), num_devices, **options)
    params = list(model.optim_parameters())
    optimizer = KINDS[kind][0](params, lr=0.01, **({"moments": moments} if moments != "float32" else {}))
    scaler = GradScaler(init_scale=8.0, growth_interval=2, enabled=scaled)
    seen: list[Any] = []

    def step_fn() -> None:
        scaler.unscale_(optimizer)
        seen.append(float(clip_grad_norm_(params, 0.1)))
        optimizer.param_groups[0]["lr"] = 0.01 if len(seen) > 1 else 0.0  # an update that changes nothing counts, too
        scaler.step(optimizer)
        optimizer.zero_grad()

    def loss_fn(output: Tensor, label: Tensor) -> Tensor:
        return scaler.scale(float_mse(output, label))

    losses = []
    for step in range(4):
        for call in range(num_calls):
            x, y = data(step + 10 * call)
            losses.append(model.forward_backward((x,), label=y, loss_fn=loss_fn))
        model.step(step_fn, is_async)
        scaler.update(is_async=is_async)
        if looks:
            model.synchronize()
            assert all(param.isfinite().all() for param in params)
    weights = copy.deepcopy(dict(model.state_dict()))
    return [*losses, *seen, weights, [p.detach().clone() for p in params], optimizer.state_dict()["state"]]


@pytest.mark.parametrize("options", [{}, {"moments": "8bit"}, {"kind": "Lion"}, {"scaled": True, "num_calls": 2}])
def test_every_number_of_devices_and_steps_that_overlap(models: Models, options: dict[str, Any]) -> None:
    expected = everything(models, 1, **options)
    assert_same(everything(models, 4, **options), expected)
    if "scaled" not in options:
        assert_same(everything(models, 2, is_async=True, staleness=0, **options), expected)
    assert_same(everything(models, 2, looks=True, **options), expected)


@pytest.mark.parametrize("options", [{"kind": "SGD"}, {"kind": "Lion", "moments": "8bit"}], ids=["SGD", "Lion"])
def test_without_a_compiler(models: Models, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    expected = everything(models, **options)
    monkeypatch.setattr(one_pass, "one_pass_kernel", lambda: None)
    found = everything(models, **options)
    assert_same(found[:4], expected[:4])
    assert_same(found[-3:], expected[-3:])


def test_every_instruction_set(models: Models) -> None:
    kernel = one_pass_kernel()
    assert kernel is not None, "the tests need a C compiler"
    try:
        found = []
        for most in range(3):
            kernel._use_processor(most)
            found.append(everything(models, moments="8bit"))
    finally:
        kernel.instruction_set()
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_parts_of_a_model_whose_own_forward_runs_on_the_host(models: Models) -> None:
    """Asynchronous steps of such a model publish weights late, and the kernel then works on masters in float32."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)))

    def weights(num_devices: int, is_async: bool) -> list[Tensor]:
        options = {"optim_dtype": F32, "master_bits": 24, "use_sequential_preset": False, "model_run_config": CONFIG}
        module = seeded(Own).to(BF16)
        model = wrap(
            module,
            devices=["cpu"] * num_devices,
            skip_modules=[module.last],
            upper_threshold=1,
            lower_threshold=1,
            **options,
        )
        assert isinstance(model, AutoRoundPipe)
        params = list(model.optim_parameters())
        optimizer = AdamW(params, lr=0.01)
        for step in range(4):
            x, y = data(step)
            float_mse(model(x), y).backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
        model.synchronize()
        masters = [param.detach().clone() for param in params]
        assert all(not (each.view(torch.int32) & 0xFF).any() for each in masters)
        found = [weight.detach().clone() for weight in module.parameters()]
        assert_same([each.to(BF16) for each in masters], found)
        model.close()
        return [*found, *masters]

    for is_async in (False, True):
        assert_same(weights(1, is_async), weights(3, is_async))


@pytest.mark.parametrize("kind", ["AdamW", "torch"])
def test_the_plain_loop_has_the_bits_of_exact_steps(models: Models, kind: str) -> None:
    def bits(*, is_plain: bool) -> list[Any]:
        model = models.wrap_copy(seeded(network), 2, optim_dtype=F32, model_run_config=CONFIG, master_bits=24)
        params = list(model.optim_parameters())
        optimizer = KINDS[kind][0](params, lr=0.01)
        torch.manual_seed(2)

        def update() -> None:
            clip_grad_norm_(params, 0.1)
            optimizer.step()
            optimizer.zero_grad()

        for step in range(12):  # an optimizer of torch keeps masters expanded after some steps
            x, y = data(step)
            float_mse(model(x), y).backward()
            if is_plain:
                update()
            else:
                model.step(update, is_async=False)
        model.synchronize()
        assert all(not (param.detach().view(torch.int32) & 0xFF).any() for param in params)
        return [copy.deepcopy(dict(model.state_dict())), [param.detach().clone() for param in params]]

    assert_same(bits(is_plain=True), bits(is_plain=False))


def test_what_user_code_writes_into_masters_is_rounded_when_it_is_published(models: Models) -> None:
    model = models.wrap_copy(seeded(network), 2, optim_dtype=F32, model_run_config=CONFIG, master_bits=24)
    params = list(model.optim_parameters())
    optimizer = AdamW(params, lr=0.01)

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.data.mul_(1 / 3)

    x, y = data(0)
    model.forward_backward((x,), label=y, loss_fn=float_mse)
    model.step(step_fn, is_async=False)
    for param, weight in zip(params, model.model.parameters(), strict=True):
        assert not (param.detach().view(torch.int32) & 0xFF).any()
        assert_same(param.detach().to(BF16), weight.detach())


@pytest.mark.parametrize("is_async", [False, True])
def test_bits_are_those_of_a_run_in_which_nothing_has_failed(models: Models, is_async: bool) -> None:
    def bits(*, fails: bool) -> list[Any]:
        options = {"optim_dtype": F32, "model_run_config": CONFIG, "staleness": 0, "master_bits": 24}
        model = models.wrap_copy(seeded(network), 2, **options)
        params = list(model.optim_parameters())
        optimizer = AdamW(params, lr=0.01, moments="8bit")

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def fail(*_: Any) -> Tensor:
            raise ValueError("on purpose")

        for step in range(4):
            x, y = data(step)
            if fails and step:
                with pytest.raises(ValueError, match="on purpose"):
                    model.forward_backward((x,), label=y, loss_fn=fail)
                model.forward_backward((x,), label=y, loss_fn=float_mse)
                with pytest.raises(ValueError, match="on purpose"):
                    _ = model.step(fail, is_async), model.synchronize()
            torch.manual_seed(step)
            model.forward_backward((x,), label=y, loss_fn=float_mse)
            model.step(step_fn, is_async)
        weights = copy.deepcopy(dict(model.state_dict()))
        return [weights, [param.detach().clone() for param in params], optimizer.state_dict()["state"]]

    assert_same(bits(fails=True), bits(fails=False))


# Why 24 bits: what a bfloat16 weight alone would lose.


def curve(master_dtype: torch.dtype | None, master_bits: int) -> float:
    """The last of many small steps towards a linear map."""
    module = seeded(lambda: nn.Sequential(nn.Linear(32, 32, bias=False))).to(BF16)
    model = RoundPipe(module, devices=["cpu"], optim_dtype=master_dtype, master_bits=master_bits)
    optimizer = AdamW(model.optim_parameters(), lr=2e-4)
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(32, 32, generator=generator) / 6
    loss = torch.zeros(())
    for _ in range(150):
        x = torch.randn(64, 32, generator=generator)
        loss = model.forward_backward((x.to(BF16),), label=x @ target, loss_fn=lambda out, y: mse(out.float(), y))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    model.close()
    return float(loss)


def test_a_training_in_24_bits_follows_that_in_32_bits_and_one_in_bfloat16_does_not() -> None:
    full, short, low = curve(F32, 32), curve(F32, 24), curve(None, 32)
    assert abs(short / full - 1) < abs(low / full - 1) / 10, (full, short, low)


# Checkpoints.


class Run:
    """A training whose batch depends on the step alone."""

    def __init__(
        self, num_devices: int, make: Callable[..., torch.optim.Optimizer] = AdamW, master_bits: Any = 24
    ) -> None:
        self.model = RoundPipe(
            seeded(network),
            devices=["cpu"] * num_devices,
            optim_dtype=F32,
            model_run_config=CONFIG,
            master_bits=master_bits,
        )
        self.optimizer, self.step = make(self.model.optim_parameters(), lr=0.02), 0
        torch.manual_seed(3)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            x, y = data(self.step)
            losses.append(float(self.model.forward_backward((x,), label=y, loss_fn=float_mse)))
            self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), is_async=False)
            self.step += 1
        return losses

    def masters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.optim_parameters()]

    def bits(self) -> list[Any]:
        weights = dict(self.model.state_dict())
        return copy.deepcopy([weights, self.masters(), self.optimizer.state_dict()["state"]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_a_byte_per_value_and_a_resumed_run_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole = Run(2, KINDS[kind][0])
    losses = whole.train(2)
    checkpoint.save(tmp_path / "two", whole.model, whole.optimizer).wait()
    size = sum(file.stat().st_size for file in (tmp_path / "two").glob("optimizer*.safetensors"))
    num_states, elements = (2 if kind == "AdamW" else 1), 3 * (WIDTH + 1) * WIDTH
    # An optimizer of torch keeps masters expanded.
    assert size < elements * ((4 if kind == "torch" else 1) + 4 * num_states) + 5_000
    losses += whole.train(2)
    resumed = Run(3, KINDS[kind][0])
    resumed.train(1)
    resumed.step = 2
    checkpoint.load(tmp_path / "two", resumed.model, resumed.optimizer)
    assert resumed.train(2) == losses[2:]
    assert_same(resumed.bits(), whole.bits())
    for run in (whole, resumed):
        run.model.close()


@pytest.mark.parametrize(("old", "new"), [(32, 24), (24, 32)])
def test_loading_into_masters_of_other_bits_converts_and_says_so(
    tmp_path: Path, old: int, new: int, caplog: pytest.LogCaptureFixture
) -> None:
    source, other = Run(2, master_bits=old), Run(3, master_bits=new)
    source.train(3)
    checkpoint.save(tmp_path / "three", source.model, source.optimizer).wait()
    with caplog.at_level(logging.WARNING, "roundpipe"):
        checkpoint.load(tmp_path / "three", other.model, other.optimizer)
    said = [text for text in caplog.messages if "were converted" in text]
    assert len(said) == 1
    assert f"6 masters were converted from {old} to {new} bits" in said[0]
    assert_same(dict(other.model.state_dict()), dict(source.model.state_dict()))
    for mine, saved in zip(other.masters(), source.masters(), strict=True):
        # To the nearest value of 24 bits, which around half way points is half of 2^-15 of a value away.
        assert torch.equal(mine, saved) if new == 32 else bool(((mine - saved).abs() <= saved.abs() * 2**-15).all())
        assert new == 32 or not (mine.view(torch.int32) & 0xFF).any()
    for run in (source, other):
        run.train(1)
        run.model.close()


# Bytes.


@pytest.mark.parametrize(("master_bits", "expected"), [(32, 2 + 2 + 2 + 2.03125), (24, 2 + 1 + 2 + 2.03125)])
def test_bytes_per_parameter_while_it_trains(models: Models, master_bits: int, expected: float) -> None:
    """All storages of a parameter: weight, gradient, the rest of its master, and moments in 8 bits."""
    width = 256
    module = nn.Sequential(nn.Linear(width, width, bias=False)).to(BF16)
    model = models.wrap(module, 1, optim_dtype=F32, master_bits=master_bits)
    (master,) = model.optim_parameters()
    optimizer = AdamW([master], moments="8bit")
    found: list[int] = []

    def step_fn() -> None:
        optimizer.step()
        state = [part for part in optimizer.state[master].values() if part.dim()]
        (low,) = master.gradient_sources(whole=True) or [None]
        assert low is not None
        parts = [module[0].weight, low, *master.memory_of_step(), *state]
        found.append(sum(part.untyped_storage().nbytes() for part in parts))
        optimizer.zero_grad()

    x = batch(4, width).to(BF16)
    for _ in range(2):
        model.forward_backward((x,), label=x, loss_fn=float_mse)
        model.step(step_fn, is_async=False)
    assert set(found) == {expected * width * width}
    assert optimizer.state[master]["step"] == 2


@pytest.mark.parametrize("make", [RoundPipe, wrap], ids=["RoundPipe", "wrap"])
def test_the_check_at_wrapping_counts_a_byte(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[dict[str, int]] = []
    monkeypatch.setattr(training_memory, "require_host_memory", lambda rows, *args, **more: needs.append(rows))
    with make(network(), devices=["cpu"], optim_dtype=F32, master_bits=24):
        assert needs[0]["master weights"] == 3 * (WIDTH + 1) * WIDTH


# Options that cannot hold.


@pytest.mark.parametrize("make", [RoundPipe, wrap], ids=["RoundPipe", "wrap"])
def test_what_cannot_hold_is_refused(make: Callable[..., Any]) -> None:
    low = network()
    for options, error, text in (
        ({"master_bits": 16, "optim_dtype": F32}, ConfigError, "must be 32 .* or 24 .*got 16"),
        ({"master_bits": True}, ArgumentTypeError, "got True of type bool"),
        ({"master_bits": 24}, ConfigError, "optim_dtype is None; give optim_dtype=torch.float32"),
        ({"master_bits": 24, "optim_dtype": torch.float64}, ConfigError, "optim_dtype is torch.float64"),
    ):
        with pytest.raises(error, match=text):
            make(low, devices=["cpu"], **options)
    for dtype in (F32, torch.float16):
        with pytest.raises(ConfigError, match=f"'0.0.weight', which trains, is {dtype}"):
            make(network().to(dtype), devices=["cpu"], optim_dtype=F32, master_bits=24)


def test_masters_of_float32_weights_stay_whole(models: Models) -> None:
    module = network()
    module[1].float()
    model = models.wrap(nn.Sequential(module[0]), 1, optim_dtype=F32, master_bits=24)
    assert all(isinstance(master.halves, ShortMaster) for master in model.optim_parameters())
    both = models.wrap(nn.Sequential(module[1], module[2]), 1, optim_dtype=F32, master_bits=24)
    kinds = [isinstance(master.halves, ShortMaster) for master in both.optim_parameters()]
    assert kinds == [False, False, True, True]
