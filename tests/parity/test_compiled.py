"""Compiled layers compute what eager layers compute to rounding, and the same bits on any devices, plan and grain."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    Models,
    assert_same,
    batch,
    call_reference,
    grads_of,
    microbatches,
    seeded,
    total,
)
from roundpipe import (
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from roundpipe.compiled import CompileOptions, PartsToCompile, compilations
from roundpipe.errors import ArgumentTypeError, ConfigError

WIDTH = 6
PLANS = [
    ModelExecutePlan([], [range(4)]),
    ModelExecutePlan([range(3)], [range(3, 4), range(3)]),
    ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(1, 3), range(1)]),
]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)).tanh())


def blocks(num: int = 4, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*[Block(dropout) for _ in range(num)])


class Counted:
    """A backend that runs what it is given, and counts."""

    def __init__(self) -> None:
        self.num_graphs = self.num_runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*args)

        return run


def trained(model: RoundPipe, num_calls: int = 2, rows: int = 7) -> list[Any]:
    """Losses and outputs of calls with steps between them, and the gradients and weights at the end."""
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    results: list[Any] = []

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(num_calls):
        x = batch(rows, WIDTH, seed=seed)
        results.append(model.forward_backward((x,), loss_fn=total, return_outputs=True, run_config=microbatches(3)))
        model.step(update, is_async=False)
    model.forward_backward((batch(rows, WIDTH),), loss_fn=total, run_config=microbatches(3))
    model.synchronize()
    return [*results, grads_of(model.model), dict(model.model.state_dict())]


def assert_near(ours: Any, reference: Any) -> None:
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_one_kind_of_layer_is_compiled_once_and_agrees_with_eager(models: Models, backend: str, dropout: float) -> None:
    plain = seeded(lambda: blocks(6, dropout))
    expected = trained(models.wrap_copy(plain, 2))
    before = compilations().graphs
    compiled = trained(models.wrap_copy(plain, 2, compile={"backend": backend}))
    assert_near(compiled, expected)
    # Microbatches of 3 and of 2 rows. The first layer has its own graph: its input needs no gradient.
    assert 0 < compilations().graphs - before <= 4


def test_the_number_of_graphs_does_not_grow_with_layers(models: Models) -> None:
    counts = []
    for num_layers in (3, 12):
        backend = Counted()
        trained(models.wrap(blocks(num_layers), 2, compile={"backend": backend}), rows=6)
        assert backend.num_runs > num_layers
        counts.append(backend.num_graphs)
    assert counts[0] == counts[1] <= 2


def test_models_of_one_process_share_the_code_of_a_kind(models: Models) -> None:
    backend = Counted()
    trained(models.wrap(blocks(), 1, compile={"backend": backend}))
    before = backend.num_graphs
    trained(models.wrap(blocks(), 2, compile={"backend": backend}))
    assert backend.num_graphs == before


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_devices_plans_and_grains_give_the_same_bits(models: Models, dropout: float) -> None:
    plain = seeded(lambda: blocks(4, dropout))

    def results(num_devices: int, config: RoundPipeRunConfig = RoundPipeRunConfig()) -> list[Any]:
        return trained(models.wrap_copy(plain, num_devices, model_run_config=config, compile={"backend": "aot_eager"}))

    first = results(1)
    for num_devices in (2, 3):
        assert_same(results(num_devices), first, f"{num_devices} devices")
    for plan in PLANS:
        for grain in ("stage", "layer"):
            config = RoundPipeRunConfig(execute_plan=plan, recompute_grain=grain)
            assert_same(results(2, config), first, f"{plan}, {grain}")


def test_a_compiled_layer_runs_none_of_its_python_code_in_a_step(models: Models) -> None:
    runs: list[int] = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                runs.append(len(x))
            return super().forward(x)

    model = models.wrap(nn.Sequential(*[Counting() for _ in range(3)]), 2, compile={"backend": "eager"})
    trained(model, num_calls=1, rows=6)
    rehearsed = len(runs)
    trained(model, rows=6)
    assert 0 < rehearsed == len(runs)


def test_a_rehearsal_leaves_random_numbers_buffers_and_gradients_alone(models: Models) -> None:
    plain = seeded(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in "ab"])
    )
    results = []
    for options in ({}, {"compile": {"backend": "eager"}}):
        model = models.wrap_copy(plain, 2, **options)
        torch.manual_seed(5)
        loss = model.forward_backward((batch(6, WIDTH),), loss_fn=total, run_config=microbatches(3))
        model.synchronize()
        results.append([loss, torch.rand(3), grads_of(model.model), dict(model.model.state_dict())])
    assert_near(results[1], results[0])
    assert_same(results[1][1], results[0][1], "random numbers")
    assert results[0][3]["0.1.num_batches_tracked"] == 3


class Remembering(Block):
    """Counts the rows that are not zero, on the host, and saves the number for recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        saved = get_recompute_data() if doing_recompute() else None
        count = saved[0] if saved else float((x != 0).any(1).sum())
        save_for_recompute(count)
        return super().forward(x) / count


def test_data_for_recomputation(models: Models) -> None:
    plain = seeded(lambda: nn.Sequential(Block(), Remembering(), Block(), Block()))
    expected = trained(models.wrap_copy(plain, 1))
    for plan in PLANS:
        config = RoundPipeRunConfig(execute_plan=plan)
        found = trained(models.wrap_copy(plain, 2, model_run_config=config, compile={"backend": "eager"}))
        assert_near(found, expected)


def test_frozen_layers_and_weights_that_layers_share(models: Models) -> None:
    def build() -> nn.Module:
        model = blocks(5)
        model[3].linear.weight = model[0].linear.weight
        model[1].requires_grad_(False)
        model[2].norm.requires_grad_(False)
        return model

    plain = seeded(build)
    expected = trained(models.wrap_copy(plain, 2))
    first = trained(models.wrap_copy(plain, 1, compile={"backend": "aot_eager"}))
    assert_near(first, expected)
    assert_same(trained(models.wrap_copy(plain, 3, compile={"backend": "aot_eager"})), first)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_then_backward_and_evaluation(models: Models, backend: str) -> None:
    plain = seeded(lambda: blocks(4, 0.3))
    results = []
    for options in ({}, {"compile": {"backend": backend}}):
        model = models.wrap_copy(plain, 2, **options)
        torch.manual_seed(5)
        output = model(batch(6, WIDTH), roundpipe_run_config=microbatches(3))
        total(output, None).backward()
        model.synchronize()
        model.eval()
        with torch.no_grad():
            results.append([output.detach(), grads_of(model.model), model(batch(6, WIDTH))])
    assert_near(results[1], results[0])


def test_autocast(models: Models) -> None:
    plain = seeded(blocks)
    results = []
    for options in ({}, {"compile": {"backend": "aot_eager"}}):
        model = models.wrap_copy(plain, 2, **options)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch(6, WIDTH), roundpipe_run_config=microbatches(3))
            found = model.forward_backward((batch(6, WIDTH),), loss_fn=total, run_config=microbatches(3))
        results.append([output.detach(), found, grads_of(model.model)])
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


def test_hooks_run_in_compiled_layers(models: Models) -> None:
    def add_hooks(model: nn.Module) -> None:
        for layer in model:
            layer.linear.register_forward_hook(lambda module, args, output: output * 2)
            layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    plain = seeded(blocks)
    add_hooks(plain)
    expected = trained(models.wrap_copy(plain, 2))
    assert_near(trained(models.wrap_copy(plain, 2, compile={"backend": "eager"})), expected)


def test_hooks_that_collect_values_run_eagerly_instead_of_compiling_in_each_step(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    plain = seeded(blocks)
    means: list[Tensor] = []
    found = []
    for num_devices, options in ((2, {}), (3, {"compile": {"backend": "eager"}})):
        model = models.wrap_copy(plain, num_devices, **options)
        model.model[1].register_forward_hook(lambda module, args, output: means.append(output.detach().mean()))
        found.append(trained(model, 1))
        graphs = compilations().graphs
        found[-1] += trained(model)
        assert compilations().graphs == graphs
    assert_near(found[1], found[0])
    assert caplog.text.count("Block runs eagerly, because it cannot be compiled: CompiledAnew: each call") == 1


def test_hooks_that_come_and_go_change_what_compiled_layers_compute(models: Models) -> None:
    plain = seeded(blocks)
    results = []
    for options in ({}, {"compile": {"backend": "eager"}}):
        model = models.wrap_copy(plain, 2, **options)
        outputs = [model(batch(6, WIDTH)).detach()]
        handle = model.model[1].register_forward_hook(lambda module, args, output: output * 2)
        outputs.append(model(batch(6, WIDTH)).detach())
        handle.remove()
        outputs.append(model(batch(6, WIDTH)).detach())
        results.append(outputs)
    assert_near(results[1], results[0])
    assert torch.equal(results[1][0], results[1][2])
    assert not torch.equal(results[1][0], results[1][1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for the CPU: g++")
def test_inductor(models: Models) -> None:
    plain = seeded(lambda: blocks(3, 0.3))
    expected = trained(models.wrap_copy(plain, 2), rows=6)
    before = compilations().graphs
    first = trained(models.wrap_copy(plain, 1, compile=True), rows=6)
    assert_near(first, expected)
    assert compilations().graphs > before
    config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(2)], [range(2, 3), range(2)]))
    assert_same(trained(models.wrap_copy(plain, 3, compile=True, model_run_config=config), rows=6), first)


# Sizes of inputs.


def test_sizes_that_vary_are_compiled_a_few_times_and_then_run_eagerly(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    plain = seeded(lambda: blocks(3))
    backend = Counted()
    model = models.wrap_copy(plain, 2, compile={"backend": backend})
    reference = copy.deepcopy(plain)
    graphs = []
    for rows in (2, 3, 4, 5, 6, 7, 8, 9):
        x = batch(3, rows, WIDTH, seed=rows)
        loss, outputs = model.forward_backward((x,), loss_fn=total, return_outputs=True, run_config=microbatches(1))
        expected = call_reference(reference, (x,), loss_fn=total, num_microbatch=1)
        assert_near([loss, outputs.detach()], [expected.loss, expected.outputs])
        graphs.append(backend.num_graphs)
    model.synchronize()
    assert_near(grads_of(model.model), grads_of(reference))
    assert graphs[-1] <= 4  # one size as a constant, and variable sizes; each for the first layer and for the others
    assert graphs[-1] == graphs[2]
    lines = [record.getMessage() for record in caplog.records if "further sizes" in record.getMessage()]
    assert not lines


def test_one_code_with_variable_sizes_serves_all_later_ones(models: Models) -> None:
    backend = Counted()
    model = models.wrap(blocks(3), 1, compile={"backend": backend, "dynamic": True})
    for rows in (2, 3, 4, 5):
        model.forward_backward((batch(3, rows, WIDTH),), loss_fn=total, run_config=microbatches(1))
    assert backend.num_graphs <= 2


# Layers that cannot be compiled.


class Unfit(Block):
    """Decides by a value of its input, which torch.compile cannot trace in one graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > -1e9 else x


def test_a_layer_that_cannot_be_compiled_runs_eagerly_and_is_named_once(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    plain = seeded(lambda: nn.Sequential(Block(), Unfit(), Unfit(), Block()))
    expected = trained(models.wrap_copy(plain, 2))
    backend = Counted()
    found = trained(models.wrap_copy(plain, 2, compile={"backend": backend}))
    assert_near(found, expected)
    assert backend.num_runs
    lines = [record.getMessage() for record in caplog.records if "runs eagerly" in record.getMessage()]
    assert len(lines) == 1
    assert "Unfit runs eagerly, because it cannot be compiled" in lines[0]


class Numbered(Block):
    """Computes with a number that differs from layer to layer, which is a constant in compiled code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number)


def test_layers_of_a_kind_that_need_too_many_variants_run_eagerly(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    plain = seeded(lambda: nn.Sequential(*[Numbered(number) for number in range(10)]))
    expected = trained(models.wrap_copy(plain, 2))
    assert_same(trained(models.wrap_copy(plain, 3, compile={"backend": "eager"})), expected)
    reason = "values that differ from layer to layer, such as numbers in attributes, are constants in compiled code"
    assert f"Numbered runs eagerly, because it cannot be compiled: FailOnRecompileLimitHit: {reason}" in caplog.text


def test_fullgraph_demands_that_layers_can_be_compiled(models: Models) -> None:
    model = models.wrap(nn.Sequential(Block(), Unfit()), 2, compile={"backend": "eager", "fullgraph": True})
    with pytest.raises(ConfigError, match="Unfit cannot be compiled in one graph, which compile=dict"):
        model.forward_backward((batch(6, WIDTH),), loss_fn=total)


def test_a_compiler_that_computes_something_else_is_not_used(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(graph: Any, inputs: Any) -> Callable[..., Any]:
        return lambda *args: [each * 1.5 for each in graph.forward(*args)]

    plain = seeded(blocks)
    assert_same(trained(models.wrap_copy(plain, 2, compile={"backend": wrong})), trained(models.wrap_copy(plain, 2)))
    assert "Block runs eagerly, because it cannot be compiled: CompiledOtherwise: compiled code computes" in caplog.text


def test_a_compiler_that_fails_is_not_used(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    def failing(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no such instruction")

    plain = seeded(blocks)
    assert_same(trained(models.wrap_copy(plain, 2, compile={"backend": failing})), trained(models.wrap_copy(plain, 2)))
    assert caplog.text.count("runs eagerly") == 1
    assert "no such instruction" in caplog.text


def test_errors_of_a_layer_reach_the_caller_with_their_place(models: Models) -> None:
    model = models.wrap(blocks(3), 2, compile={"backend": "eager"})
    trained(model, num_calls=1)
    with pytest.raises(RuntimeError, match="normalized_shape") as error:
        model.forward_backward((batch(6, WIDTH + 1),), loss_fn=total)
    assert "layer 0" in "".join(error.value.__notes__)
    trained(model, num_calls=1)


# Modules that the user compiled.


@pytest.mark.parametrize("how", ["torch.compile(module)", "module.compile()"])
def test_modules_that_the_user_compiled_are_compiled_once_for_their_kind(models: Models, how: str) -> None:
    plain = seeded(blocks)
    expected = trained(models.wrap_copy(plain, 2), rows=6)
    backend = Counted()
    if how == "module.compile()":
        for layer in plain:
            layer.compile(backend=backend)
        model = models.wrap(plain, 2)
    else:
        model = models.wrap(nn.Sequential(*[torch.compile(layer, backend=backend) for layer in plain]), 2)
    found = trained(model, rows=6)
    assert backend.num_graphs == 2
    assert backend.num_runs > 8
    assert_near(found[:-2], expected[:-2])
    assert_near(list(found[-1].values()), list(expected[-1].values()))


def test_only_the_modules_that_the_user_compiled_are(models: Models) -> None:
    plain = seeded(blocks)
    expected = trained(models.wrap_copy(plain, 2))
    backend = Counted()
    for layer in plain:
        layer.norm.compile(backend=backend, dynamic=True)
    assert_near(trained(models.wrap(plain, 2)), expected)
    assert backend.num_graphs == 2


def test_the_arguments_of_the_wrapper_are_used_for_modules_that_the_user_compiled(models: Models) -> None:
    of_user, backend = Counted(), Counted()
    plain = seeded(blocks)
    plain[0].linear.compile(backend=of_user)
    trained(models.wrap(plain, 2, compile={"backend": backend}))
    assert backend.num_graphs
    assert not of_user.num_graphs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, CompileOptions()),
        ({"backend": "aot_eager", "fullgraph": True}, CompileOptions("aot_eager", fullgraph=True)),
        (
            {"dynamic": False, "options": {"max_autotune": True}},
            CompileOptions(options=(("max_autotune", True),), dynamic=False),
        ),
        ({"mode": "reduce-overhead"}, CompileOptions()),
    ],
)
def test_the_arguments_that_the_user_gave_to_torch_are_found(given: Any, expected: CompileOptions) -> None:
    for module in (torch.compile(nn.Linear(2, 2), **given), nn.Linear(2, 2)):
        if not hasattr(module, "_orig_mod"):
            module.compile(**given)
        found = PartsToCompile(None, module).of(module)[0][1]
        if expected.backend != "inductor":
            expected = dataclasses.replace(expected, backend=torch._dynamo.lookup_backend(expected.backend))
        assert found == expected


# Arguments.


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("yes", ArgumentTypeError, "compile must be True, False or a dict"),
        ({"back": 1}, ConfigError, "unknown arguments back; those of torch.compile"),
        ({"options": 3}, ArgumentTypeError, "options must be a dict, got int"),
        ({"dynamic": 1}, ArgumentTypeError, "dynamic must be True or False, got 1"),
        ({"mode": "default", "options": {"a": 1}}, ConfigError, "either mode or options"),
        ({"mode": "reduce-overhead"}, ConfigError, "CUDA graphs keep the addresses of weights"),
        ({"options": {"triton.cudagraphs": True}}, ConfigError, "CUDA graphs keep the addresses of weights"),
    ],
)
def test_arguments_are_checked(models: Models, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        models.wrap(blocks(2), 1, compile=value)
