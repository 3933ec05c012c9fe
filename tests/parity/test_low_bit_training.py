"""Training with low-bit moments equals a plain loop whose float32 moments are rounded after every step, bit for bit.

The reference computes Adam in numpy and Lion in torch, and rounds by the torch code of the forms. Other trainings must
have the same bits on any number of devices, with steps of every kind, and when they are resumed.
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
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, checkpoint, clip_grad_norm_
from roundpipe.optim import AdamW, Lion, one_pass
from roundpipe.optim.lion import PlainLion
from roundpipe.store.forms import form_of, seed_of

WIDTH, ROWS, NUM_MICROBATCH = 66, 6, 3  # weights of 4,356 elements: large enough for low bits, with an incomplete block
MIXED = [False, True, True, False]
BF16 = torch.bfloat16
SLOW = pytest.mark.slow
every_form = pytest.mark.parametrize("moments", ["bfloat16", "8bit"])
KINDS: dict[str, tuple[Any, Any]] = {"AdamW": (AdamW, NumpyAdamW), "Lion": (Lion, PlainLion)}


def network() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*layers).to(BF16)


def data(seed: int) -> tuple[Tensor, Tensor]:
    return batch(ROWS, WIDTH, seed=2 * seed).to(BF16), batch(ROWS, WIDTH, seed=2 * seed + 1).to(BF16)


def float_mse(output: Tensor, label: Tensor) -> Tensor:
    return mse(output.float(), label.float())


class Rounding:
    """A plain optimizer whose large moments are stored in a form and expanded again after every step."""

    def __init__(self, optimizer: torch.optim.Optimizer, moments: str) -> None:
        self._optimizer, self._moments, self._steps = optimizer, moments, 0
        self.stored: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self) -> None:
        self._optimizer.step()
        self._steps += 1
        for param, state in self._optimizer.state.items():
            names = [name for name in ("exp_avg", "exp_avg_sq") if name in state]
            for index, name in enumerate(names if param.numel() >= 4096 else ()):
                form = form_of(self._moments, is_square=name == "exp_avg_sq")
                counts, dtypes = form.counts(param.numel()), form.dtypes(torch.float32)
                parts = [torch.zeros(count, dtype=dtype) for count, dtype in zip(counts, dtypes, strict=True)]
                form.pack(state[name].flatten(), parts, seed_of(self._steps, index))
                state[name].copy_(form.expanded(parts).view(param.shape))
                self.stored.setdefault(param, {}).update(zip(form.part_names(name), parts, strict=True))

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


@every_form
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=SLOW), 3])
def test_low_moments_are_float32_moments_that_are_rounded_after_each_step(
    models: Models, kind: str, moments: str, num_devices: int
) -> None:
    ours, plain = KINDS[kind]
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).to(BF16)
    model = models.wrap_copy(module, num_devices, optim_dtype=torch.float32)
    reference = StalenessReference(module, lambda params: plain(params, lr=0.01, weight_decay=0.1), torch.float32)
    rounding = reference.optimizer = Rounding(reference.optimizer, moments)
    copies = list(model.optim_parameters())
    optimizer = ours(copies, lr=0.01, weight_decay=0.1, moments=moments)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
    for seed, is_async in enumerate(MIXED):
        x, y = data(seed)
        expected = call_reference(reference.module, (x,), {}, y, float_mse, NUM_MICROBATCH).loss
        assert_same(model.forward_backward((x,), label=y, loss_fn=float_mse, run_config=config), expected)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
        reference.step(is_async)
    model.synchronize()
    assert_same([p.detach() for p in copies], [p.detach() for p in reference.masters], "masters")
    assert len(rounding.stored) == 3
    for mine, master in zip(copies, reference.masters, strict=True):
        for part, expected in rounding.stored.get(master, {}).items():
            assert_same(optimizer.state[mine][part].flatten(), expected, part)


# The same bits in every way to train.


def everything(
    models: Models,
    moments: str,
    num_devices: int = 2,
    *,
    is_async: bool = False,
    staleness: int = 1,
    scaled: bool = False,
    kind: str = "AdamW",
) -> list[Any]:
    """Losses, norms, weights and the optimizer's state of a training that clips."""
    torch.manual_seed(5)
    model = models.wrap_copy(
        seeded(network),
        num_devices,
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH),
        staleness=staleness,
    )
    params = list(model.optim_parameters())
    optimizer = KINDS[kind][0](params, lr=0.01, moments=moments)
    scaler = GradScaler(init_scale=8.0, growth_interval=2, enabled=scaled)
    seen: list[Any] = []

    def step_fn() -> None:
        scaler.unscale_(optimizer)
        seen.append(float(clip_grad_norm_(params, 0.1)))
        scaler.step(optimizer)
        optimizer.zero_grad()

    def loss_fn(output: Tensor, label: Tensor) -> Tensor:
        return scaler.scale(float_mse(output, label))

    losses = []
    for step in range(4):
        x, y = data(step)
        losses.append(model.forward_backward((x,), label=y, loss_fn=loss_fn))
        model.step(step_fn, is_async)
        scaler.update(is_async=is_async)
    weights = copy.deepcopy(dict(model.state_dict()))
    return [*losses, *seen, weights, optimizer.state_dict()["state"]]


@every_form
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Lion", marks=SLOW)])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_every_number_of_devices_and_steps_that_overlap(models: Models, moments: str, kind: str, scaled: bool) -> None:
    expected = everything(models, moments, 1, scaled=scaled, kind=kind)
    assert_same(everything(models, moments, 3, scaled=scaled, kind=kind), expected)
    if not scaled:
        assert_same(everything(models, moments, 2, is_async=True, staleness=0, kind=kind), expected)


def test_without_a_compiler(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(models, "8bit", kind="Lion")
    monkeypatch.setattr(one_pass, "one_pass_kernel", lambda: None)
    found = everything(models, "8bit", kind="Lion")
    assert_same(found[:4], expected[:4])
    assert_same(found[-2:], expected[-2:])


# Checkpoints.


class Run:
    """A training whose batch depends on the step alone."""

    def __init__(self, num_devices: int, make: Callable[..., torch.optim.Optimizer]) -> None:
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
        self.model = RoundPipe(
            seeded(network), devices=["cpu"] * num_devices, optim_dtype=torch.float32, model_run_config=config
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

    def bits(self) -> list[Any]:
        weights = dict(self.model.state_dict())
        masters = [p.detach() for p in self.model.optim_parameters()]
        return copy.deepcopy([weights, masters, self.optimizer.state_dict()["state"]])


@every_form
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_parts_and_a_resumed_run_their_bits(tmp_path: Path, kind: str, moments: str) -> None:
    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return KINDS[kind][0](params, lr=lr, moments=moments)

    whole = Run(2, make)
    losses = whole.train(2)
    checkpoint.save(tmp_path / "two", whole.model, whole.optimizer).wait()
    size = sum(file.stat().st_size for file in (tmp_path / "two").glob("optimizer*.safetensors"))
    num_states, elements = (2 if kind == "AdamW" else 1), 3 * WIDTH * WIDTH
    assert size < elements * (2 + num_states * (1.1 if moments == "8bit" else 2)) + 10_000, "and low halves"
    losses += whole.train(2)
    resumed = Run(3, make)
    resumed.train(1)
    resumed.step = 2
    checkpoint.load(tmp_path / "two", resumed.model, resumed.optimizer)
    assert resumed.train(2) == losses[2:]
    assert_same(resumed.bits(), whole.bits())
    for run in (whole, resumed):
        run.model.close()


def our_adamw(moments: str) -> Callable[..., torch.optim.Optimizer]:
    return lambda params, lr: AdamW(params, lr=lr, moments=moments)


@pytest.mark.parametrize(
    ("old", "new"), [("float32", "8bit"), ("8bit", "float32"), ("bfloat16", "8bit"), ("8bit", "torch")]
)
def test_loading_into_another_form_converts_and_says_so(
    tmp_path: Path, old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = Run(2, our_adamw(old))
    source.train(2)
    checkpoint.save(tmp_path / "two", source.model, source.optimizer).wait()
    other = Run(2, torch.optim.AdamW if new == "torch" else our_adamw(new))
    with caplog.at_level(logging.WARNING, "roundpipe"):
        checkpoint.load(tmp_path / "two", other.model, other.optimizer)
    said = [text for text in caplog.messages if "were converted" in text]
    assert len(said) == 1
    assert f"6 loaded states were converted from {old} to {new.replace('torch', 'float32')} moments" in said[0]
    assert "moments" not in other.optimizer.param_groups[0] or new != "torch"
    # The conversion is that of load_state_dict.
    loaded = Run(2, torch.optim.AdamW if new == "torch" else our_adamw(new))
    if new != "torch":
        loaded.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        assert_same(other.optimizer.state_dict()["state"], loaded.optimizer.state_dict()["state"])
    assert all(torch.tensor(other.train(2)).isfinite())
    for run in (source, other, loaded):
        run.model.close()
