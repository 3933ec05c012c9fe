"""torch.utils.checkpoint and other uses of the state of torch's generator inside layers, hooks and loss_fn.

The reference is the plain module with its own checkpoints. Before each layer, torch's generator is seeded as the stream
of the layer is.
"""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from helpers_parity import WAIT_S, Models, assert_same, assert_same_grads, batch, grads_of, microbatches, seeded, total
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.errors import UsageError
from roundpipe.runtime.rng import Phase, draw_call_seed, stream_seed

WIDTH = 6
SEED = 5
NUM_MICROBATCH = 3
RECOMPUTED = ModelExecutePlan([range(3)], [range(3, 4), range(3)])
ONE_STAGE = ModelExecutePlan([], [range(4)])
PLANS = [(1, ONE_STAGE, "stage"), (1, RECOMPUTED, "layer"), (3, RECOMPUTED, "stage"), (3, None, "stage")]
Forward = Callable[["Checkpointed", Tensor], Tensor]


class Checkpointed(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.first(x), 0.4).tanh()

    def draw(self, x: Tensor) -> Tensor:
        return self.second(x) * torch.rand(WIDTH) + torch.normal(x.detach(), 1.0)


def once(self: Checkpointed, x: Tensor, *, use_reentrant: bool = False) -> Tensor:
    noise = torch.rand(())
    y: Tensor = checkpoint(self.drop, x, use_reentrant=use_reentrant)
    return self.draw(y) + noise


def twice(self: Checkpointed, x: Tensor, *, use_reentrant: bool = False) -> Tensor:
    y = checkpoint(self.drop, x, use_reentrant=use_reentrant)
    z: Tensor = checkpoint(self.draw, nn.functional.dropout(y, 0.2), use_reentrant=use_reentrant)
    return z


def nested(self: Checkpointed, x: Tensor, *, use_reentrant: bool = False) -> Tensor:
    def inner(value: Tensor) -> Tensor:
        return nn.functional.dropout(checkpoint(self.drop, value, use_reentrant=use_reentrant), 0.3)

    def outer(value: Tensor) -> Tensor:
        made = checkpoint(inner, torch.rand(()) + value, use_reentrant=use_reentrant)
        return self.draw(made)

    y: Tensor = checkpoint(outer, x, use_reentrant=use_reentrant)
    return y


def in_sequence(self: Checkpointed, x: Tensor, *, use_reentrant: bool = False) -> Tensor:
    parts = [self.drop, self.draw, nn.functional.dropout]
    y: Tensor = checkpoint_sequential(parts, 2, x, use_reentrant=use_reentrant)
    return y


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "once": once,
    "twice": twice,
    "nested": nested,
    "in sequence": in_sequence,
}


def network(forward: Forward) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(forward), nn.Tanh(), Checkpointed(forward))


def train_plainly(module: nn.Sequential, x: Tensor) -> Tensor:
    """The loss of one call on the plain module, which gets its gradients; leaves torch's generator as the call does."""
    torch.manual_seed(SEED)
    call_seed = draw_call_seed()
    after = torch.get_rng_state()
    losses = []
    for microbatch, value in enumerate(x.tensor_split(NUM_MICROBATCH)):
        for layer_id, layer in enumerate(module):
            torch.manual_seed(stream_seed(call_seed, layer_id, microbatch, Phase.FORWARD))
            value = layer(value)
        loss = total(value, None)
        loss.backward()
        losses.append(loss.detach())
    torch.set_rng_state(after)
    return sum(losses[1:], losses[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layers_with_checkpoints_train_as_in_plain_pytorch(models: Models, name: str, use_reentrant: bool) -> None:
    def forward(self: Checkpointed, x: Tensor) -> Tensor:
        return CHECKPOINTS[name](self, x, use_reentrant=use_reentrant)

    plain = seeded(lambda: network(forward))
    x = batch(7, WIDTH)
    for num_devices, plan, grain in PLANS:
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=plan, recompute_grain=grain)
        model = models.wrap_copy(plain, num_devices, model_run_config=config)
        for _ in range(2):  # in the second call the layers of a stage share a graph
            reference = copy.deepcopy(plain)
            expected = train_plainly(reference, x), torch.rand(4)
            torch.manual_seed(SEED)
            loss = model.forward_backward((x,), loss_fn=total)
            assert_same((loss, torch.rand(4)), expected, f"{num_devices} devices, {plan}, {grain}")
            model.synchronize()
            assert_same_grads(model.model, reference)
            model.zero_grad()
        models.close()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_forward_and_backward_apart_train_as_in_plain_pytorch(models: Models, use_reentrant: bool) -> None:
    def forward(self: Checkpointed, x: Tensor) -> Tensor:
        return nested(self, x, use_reentrant=use_reentrant)

    module, x = seeded(lambda: network(forward)), batch(7, WIDTH)
    reference = copy.deepcopy(module)
    expected = train_plainly(reference, x)
    model = models.wrap(module, 3, model_run_config=microbatches(NUM_MICROBATCH))
    torch.manual_seed(SEED)
    losses = [total(part, None) for part in model(x).tensor_split(NUM_MICROBATCH)]
    sum(losses).backward()
    model.synchronize()
    assert_same(sum(losses[1:], losses[0]).detach(), expected)
    assert_same_grads(model.model, reference)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_main_thread_draws_undisturbed_while_a_checkpoint_recomputes(models: Models, use_reentrant: bool) -> None:
    """The recomputation inside the backward waits until the main thread has drawn."""
    begun, may_go_on = threading.Event(), threading.Event()

    def hold(self: Checkpointed, x: Tensor) -> Tensor:
        def run(value: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() >= 0:  # autograd is running
                begun.set()
                assert may_go_on.wait(WAIT_S)
            return self.drop(value)

        y: Tensor = checkpoint(run, x, use_reentrant=use_reentrant)
        return y

    model = models.wrap(seeded(lambda: network(hold)), 2)
    torch.manual_seed(SEED)
    output = model(batch(4, WIDTH), roundpipe_run_config=microbatches(2))
    expected = torch.Generator()
    expected.set_state(torch.get_rng_state())
    backward = threading.Thread(target=output.sum().backward)
    backward.start()
    assert begun.wait(WAIT_S)
    drawn = [torch.rand(3) for _ in range(5)]
    may_go_on.set()
    backward.join(WAIT_S)
    assert not backward.is_alive()
    drawn += [torch.rand(3) for _ in range(5)]
    assert_same(drawn, [torch.rand(3, generator=expected) for _ in range(10)])


def seeding(self: Checkpointed, x: Tensor) -> Tensor:
    torch.manual_seed(11)
    return self.draw(x)


def forking(self: Checkpointed, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        x = self.drop(x)
    return self.draw(x)


def restoring(self: Checkpointed, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = self.drop(x)
    torch.set_rng_state(state)
    return self.draw(x)


def drawing_from_the_default(self: Checkpointed, x: Tensor) -> Tensor:
    return self.second(x) * torch.rand(WIDTH, generator=torch.default_generator)


def seeding_anew(self: Checkpointed, x: Tensor) -> Tensor:
    """In plain PyTorch the seed is unpredictable, so this is compared between runs."""
    torch.seed()
    return self.draw(x)


@pytest.mark.parametrize("forward", [seeding, forking, restoring, drawing_from_the_default])
def test_layers_that_set_the_state_train_as_in_plain_pytorch(models: Models, forward: Forward) -> None:
    plain, x = seeded(lambda: network(forward)), batch(7, WIDTH)
    reference = copy.deepcopy(plain)
    expected = train_plainly(reference, x), torch.rand(4)
    for num_devices, plan, grain in PLANS:
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=plan, recompute_grain=grain)
        model = models.wrap_copy(plain, num_devices, model_run_config=config)
        torch.manual_seed(SEED)
        assert_same((model.forward_backward((x,), loss_fn=total), torch.rand(4)), expected)
        model.synchronize()
        assert_same_grads(model.model, reference)
        models.close()


def noisy_gradients(self: Checkpointed, x: Tensor) -> Tensor:
    y = self.first(x)
    y.register_hook(lambda gradient: gradient + torch.randn_like(gradient) * random.random())
    return y


def checkpointed_total(output: Tensor, label: Any) -> Tensor:
    """A loss that recomputes a part of itself in its backward."""
    loss: Tensor = checkpoint(lambda o: total(nn.functional.dropout(o, 0.5), None), output, use_reentrant=False)
    return loss


@pytest.mark.parametrize(
    ("forward", "loss_fn"),
    [(seeding_anew, total), (noisy_gradients, total), (once, checkpointed_total)],
    ids=["seed", "hooks", "loss_fn"],
)
def test_draws_are_the_same_on_any_devices_plan_and_grain(
    models: Models, forward: Forward, loss_fn: Callable[[Any, Any], Tensor]
) -> None:
    found: list[Any] = []
    for num_devices, plan, grain in PLANS:
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=plan, recompute_grain=grain)
        model = models.wrap(seeded(lambda: network(forward)), num_devices, model_run_config=config)
        torch.manual_seed(SEED)
        random.seed(SEED)
        losses = [model.forward_backward((batch(7, WIDTH),), loss_fn=loss_fn) for _ in range(2)]
        model.synchronize()
        found.append([losses, grads_of(model.model), torch.rand(4), random.random()])
        assert_same(found[-1], found[0], f"{num_devices} devices, {plan}, {grain}")
        models.close()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_pythons_random_numbers_inside_a_checkpoint_are_refused(models: Models, use_reentrant: bool) -> None:
    def forward(self: Checkpointed, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda value: self.drop(value) * random.random(), x, use_reentrant=use_reentrant)
        return y

    model = models.wrap(seeded(lambda: network(forward)), 2)
    with pytest.raises(UsageError, match=r"inside torch\.utils\.checkpoint from the functions of random"):
        model.forward_backward((batch(7, WIDTH),), loss_fn=total)


# While a thread runs Python code inside set_rng_state(), it holds the mutex of the generator. Another thread that waits
# for the mutex holds the interpreter lock: neither can go on, and no signal is handled. The child must be killed then.
HOLDING_THE_MUTEX = """
import threading
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from roundpipe import RoundPipe

class State(torch.Tensor):
    '''Torch asks a state whether it is contiguous after it has locked the generator.'''

    @staticmethod
    def __new__(cls):
        options = {"dtype": torch.uint8, "dispatch_sizes_strides_policy": "strides"}
        return torch.Tensor._make_wrapper_subclass(cls, (5056,), strides=(1,), **options)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        is_locked.set()
        finished.append(done.wait(50))
        return True

class Layer(nn.Linear):
    def forward(self, x):
        reached.set()
        assert is_locked.wait(50)
        return checkpoint(lambda y: nn.functional.dropout(super(Layer, self).forward(y)), x, use_reentrant=REENTRANT)

def train():
    model.forward_backward((torch.ones(4, 3),), loss_fn=lambda output, _: output.sum())
    model.synchronize()
    done.set()

reached, is_locked, done, finished = threading.Event(), threading.Event(), threading.Event(), []
model = RoundPipe(nn.Sequential(nn.Linear(3, 3), Layer(3, 3), Layer(3, 3)), devices=["cpu"] * 2)
thread = threading.Thread(target=train)
thread.start()
assert reached.wait(50)
try:
    torch.set_rng_state(State())
except Exception:
    pass
thread.join()
model.close()
print(finished)
"""


@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_never_waits_for_the_generator_of_the_process(use_reentrant: bool) -> None:
    script = HOLDING_THE_MUTEX.replace("REENTRANT", str(use_reentrant))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[True]", done.stderr
