"""Weights that are still on a device are not uploaded again, and change no bit.

Devices have a memory limit here: without one nothing stays. A seed decides when copies run, and memory that nothing has
written is NaN.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import Boom
from helpers_parity import assert_same, batch, mlp, mse, seeded
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices.interface import MemoryUse
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.plan import RunType, build_schedule
from roundpipe.plan.cost import LayerCost, ModelProfile
from roundpipe.plan.forecast import staying_layers, weight_room_bytes
from roundpipe.plan.overlap import Overlap
from roundpipe.runtime.replica import LayerImages
from roundpipe.runtime.run import weights_stay

WIDTH, NUM_LAYERS, NUM_CALLS = 64, 6, 4
IMAGE = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer's weights and of its image: both parameters are aligned
TWO_STAGES = ModelExecutePlan([range(0, 3), range(3, 6)])
# F0: layers 0 to 2, FB1: layers 3 to 5, B2: layers 0 to 2. All on one device if there is one.
RECOMPUTING = ModelExecutePlan([range(0, 3)], [range(3, 6), range(0, 3)])


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets the memory of every virtual device; it is large at first."""

    def set_limit(num_bytes: int | None) -> None:
        monkeypatch.setattr(VirtualDevice, "memory_limit_bytes", lambda self: num_bytes)

    set_limit(10**9)
    monkeypatch.setattr(VirtualDevice, "memory_use", lambda self: MemoryUse(0, 0))  # for activations
    return set_limit


@pytest.fixture
def wrapped() -> Iterator[Callable[..., RoundPipe]]:
    models: list[RoundPipe] = []

    def wrap(module: nn.Module, num_devices: int = 1, plan: ModelExecutePlan = TWO_STAGES) -> RoundPipe:
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
        models.append(RoundPipe(module, devices=["cpu"] * num_devices, model_run_config=config))
        return models[-1]

    yield wrap
    for model in models:
        model.close()


def inputs(seed: int) -> Tensor:
    return batch(6, WIDTH, seed=seed)


def evaluated(model: nn.Module, calls: Sequence[int] = range(NUM_CALLS)) -> list[Tensor]:
    with torch.no_grad():
        return [model(inputs(call)) for call in calls]


def expected(module: nn.Module, calls: Sequence[int] = range(NUM_CALLS)) -> list[Tensor]:
    with torch.no_grad():
        return [torch.cat([module(part) for part in inputs(call).tensor_split(3)]) for call in calls]


def up_and_kept(model: RoundPipe) -> tuple[int, int]:
    model.synchronize()
    stats = model.stats()
    return stats.weights_up_bytes, stats.weights_kept_bytes


def staying(model: RoundPipe) -> list[int]:
    """The layers that stay now, on all devices."""
    workers = model._engine._pool._opened().workers
    return sorted(layer_id for worker in workers for layer_id in worker._images._staying.images)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_forward_passes_of_one_scope_upload_each_layer_once(
    num_devices: int, seed: int, wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_VIRTUAL_SEED", str(seed))
    module = seeded(lambda: mlp(NUM_LAYERS, WIDTH))
    model = wrapped(copy.deepcopy(module), num_devices)
    with weights_stay(model._engine.group):
        assert_same(evaluated(model), expected(module))
        assert staying(model) == list(range(NUM_LAYERS))
    assert up_and_kept(model) == (NUM_LAYERS * IMAGE, (NUM_CALLS - 1) * NUM_LAYERS * IMAGE)
    assert not staying(model), "memory is given back when the scope ends"
    assert_same(evaluated(model, [7]), expected(module, [7]))
    assert up_and_kept(model)[0] == 2 * NUM_LAYERS * IMAGE, "calls outside of a scope upload"


def test_without_a_memory_limit_nothing_stays(
    wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualDevice, "memory_limit_bytes", lambda self: None)
    model = wrapped(mlp(NUM_LAYERS, WIDTH))
    with weights_stay(model._engine.group):
        evaluated(model)
    assert up_and_kept(model) == (NUM_CALLS * NUM_LAYERS * IMAGE, 0)


def by_hand(model: RoundPipe) -> None:
    with torch.no_grad():
        model.get_parameter("2.0.weight").mul_(2)


def by_state_dict(model: RoundPipe) -> None:
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})


def by_step(model: RoundPipe, *, is_async: bool = False) -> None:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.5)
    config = RoundPipeRunConfig(execute_plan=RECOMPUTING)
    model.forward_backward((inputs(50),), label=inputs(51), loss_fn=mse, run_config=config)
    model.step(optimizer.step, is_async=is_async)
    model.synchronize()


def by_stale_step(model: RoundPipe) -> None:
    by_step(model, is_async=True)


def by_plain_optimizer(model: RoundPipe) -> None:
    """Whose fused kernel leaves no trace in version counters."""
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.SGD(params, lr=0.1, fused=True).step()
    for param in params:
        param.grad = None


def by_writing_a_master(model: RoundPipe) -> None:
    with torch.no_grad():
        next(iter(model.optim_parameters())).neg_()


@pytest.mark.parametrize(
    "write", [by_hand, by_state_dict, by_step, by_stale_step, by_plain_optimizer, by_writing_a_master]
)
def test_weights_written_between_two_calls_count(
    write: Callable[[RoundPipe], None], wrapped: Callable[..., RoundPipe]
) -> None:
    model = wrapped(seeded(lambda: mlp(NUM_LAYERS, WIDTH)), 2)
    plain = copy.deepcopy(model.model)
    with weights_stay(model._engine.group):
        before = evaluated(model)
        write(model)
        after = evaluated(model)
        model.synchronize()
        plain.load_state_dict(model.state_dict())
        assert_same(after, expected(plain))
        assert not torch.equal(before[0], after[0])


def test_writes_through_data_count_from_the_next_scope_on(wrapped: Callable[..., RoundPipe]) -> None:
    """Which is how peft merges adapters, between an evaluation and the next call."""
    module = seeded(lambda: mlp(NUM_LAYERS, WIDTH))
    model = wrapped(copy.deepcopy(module))
    with weights_stay(model._engine.group):
        evaluated(model)
    for each in (module, model):
        each.get_parameter("2.0.weight").data += 0.5
    with weights_stay(model._engine.group):
        assert_same(evaluated(model), expected(module))


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_recomputation_on_the_device_of_the_forward_uploads_nothing(
    num_devices: int, grain: str, seed: int, limit: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two devices B2 runs on the device of F0, too."""
    monkeypatch.setenv("ROUNDPIPE_VIRTUAL_SEED", str(seed))

    def trained() -> tuple[Any, tuple[int, int]]:
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=RECOMPUTING, recompute_grain=grain)
        module = seeded(lambda: mlp(NUM_LAYERS, WIDTH))
        with RoundPipe(module, devices=["cpu"] * num_devices, model_run_config=config) as model:
            optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
            seen = []
            for call in range(3):
                seen.append(model.forward_backward((inputs(call),), label=inputs(call + 9), loss_fn=mse))
                model.step(optimizer.step, is_async=False)
            last_step = up_and_kept(model)
            return (seen, {name: value.clone() for name, value in model.state_dict().items()}), last_step

    kept, bytes_kept = trained()
    limit(None)
    uploaded, bytes_uploaded = trained()
    assert_same(kept, uploaded)
    assert bytes_kept == (NUM_LAYERS * IMAGE, 3 * IMAGE)
    assert bytes_uploaded == ((NUM_LAYERS + 3) * IMAGE, 0)


class Writing(nn.Linear):
    """Writes into its weight in every forward, which a later upload undoes."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def test_an_image_into_which_its_layer_has_written_does_not_stay(wrapped: Callable[..., RoundPipe]) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model = wrapped(module, plan=ModelExecutePlan([range(0, 3)]))
    with weights_stay(model._engine.group):
        first, second = evaluated(model, [0, 0])
        assert staying(model) == [0, 2]
    assert_same(first, second)


def test_only_what_fits_stays(limit: Callable[[int | None], None], wrapped: Callable[..., RoundPipe]) -> None:
    limit(6 * IMAGE)  # the buffers of the plan take two
    model = wrapped(seeded(lambda: mlp(NUM_LAYERS, WIDTH)), plan=ModelExecutePlan([range(i, i + 1) for i in range(6)]))
    plain = copy.deepcopy(model.model)
    with weights_stay(model._engine.group):
        assert_same(evaluated(model), expected(plain))
        stays = staying(model)
        assert 0 < len(stays) < NUM_LAYERS
        images = model._engine._pool._opened().workers[0]._images
        in_use = images._buffers._total_bytes + len(stays) * IMAGE
        assert in_use <= 6 * IMAGE
    kept = up_and_kept(model)[1]
    assert kept == (NUM_CALLS - 1) * len(stays) * IMAGE


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("limit_bytes", [100, 600, 1000, 2500])
@pytest.mark.parametrize("plan", [TWO_STAGES, ModelExecutePlan([range(i, i + 1) for i in range(6)])])
def test_staying_layers_and_the_buffers_of_the_others_keep_within_the_budget(
    num_devices: int, limit_bytes: int, plan: ModelExecutePlan
) -> None:
    layers = tuple(LayerCost(1.0, 1.0, 2.0, weight_bytes=50 * (i % 3 + 1)) for i in range(NUM_LAYERS))
    profile = ModelProfile(layers, num_devices, 3, limit_bytes)
    tasks = build_schedule(plan, RunType.INFER)
    given = tasks, profile, Overlap(), "stage"
    stay = staying_layers(*given, between_calls=True)
    budget = weight_room_bytes(*given)
    for place in range(num_devices):
        on_device = {layer_id for task in tasks[place::num_devices] for layer_id in task.layers}
        longest = max((task.layers for task in tasks), key=len)
        others = sum(layers[i].weight_bytes for i in longest if i not in stay)
        assert sum(layers[i].weight_bytes for i in stay & on_device) + others <= budget
    if limit_bytes == 2500:
        assert stay == frozenset(range(NUM_LAYERS))
    assert not staying_layers(tasks, ModelProfile(layers, num_devices, 3), Overlap(), "stage", between_calls=True)
    assert not staying_layers(*given, between_calls=False), "no layer runs twice in a call"


class Failing(nn.Linear):
    fails: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Failing.fails is not None:
            error, Failing.fails = Failing.fails, None
            raise error
        return super().forward(x)


def failing() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Failing(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("error", [Boom("here"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_call_drops_what_stays(error: BaseException, wrapped: Callable[..., RoundPipe]) -> None:
    model = wrapped(seeded(failing), 2, ModelExecutePlan([range(0, 2), range(2, 3)]))
    plain = copy.deepcopy(model.model)
    with weights_stay(model._engine.group):
        evaluated(model, [0])
        Failing.fails = error
        with pytest.raises(type(error)):
            evaluated(model, [1])
        assert 0 not in staying(model), "the device that failed keeps nothing"
        assert_same(evaluated(model), expected(plain))


def test_out_of_memory_repeats_the_call_with_what_stays_dropped(
    wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(seeded(failing), plan=None)
    plain = copy.deepcopy(model.model)
    dropped = []
    real = LayerImages.release_unused
    monkeypatch.setattr(
        LayerImages,
        "release_unused",
        lambda self: (dropped.append(len(self._staying.images)), real(self), dropped.append(len(self._staying.images))),
    )
    with weights_stay(model._engine.group):
        evaluated(model, [0])
        Failing.fails = torch.OutOfMemoryError("device memory is full")
        assert_same(evaluated(model, [1]), expected(plain, [1]))
        assert dropped
        assert dropped[1] == 0


def test_an_upload_that_finds_no_memory_takes_that_of_images_that_stay(
    wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = wrapped(seeded(lambda: mlp(NUM_LAYERS, WIDTH))), wrapped(seeded(lambda: mlp(2, 9)), plan=None)
    plain = copy.deepcopy(model.model)
    with weights_stay(model._engine.group):
        evaluated(model, [0])
        assert len(staying(model)) == NUM_LAYERS
        with torch.no_grad():
            other(batch(6, 9))
        assert not staying(model), "another model on the pool takes their place"
        assert_same(evaluated(model), expected(plain))


def test_closing_inside_a_scope_gives_the_memory_back(wrapped: Callable[..., RoundPipe]) -> None:
    model, keeps_the_pool_open = wrapped(mlp(NUM_LAYERS, WIDTH)), wrapped(mlp(2, WIDTH), plan=None)
    evaluated(keeps_the_pool_open, [0])
    with weights_stay(model._engine.group):
        evaluated(model, [0])
        images = model._engine._pool._opened().workers[0]._images
        buffers = [weakref.ref(image.buffer) for image in images._staying.images.values()]
        assert len(buffers) == NUM_LAYERS
        model.close()
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)
