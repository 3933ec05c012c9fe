"""The order of operations in which a device executes the tasks of a call, on a recording virtual device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from recorded_runs import NUM_MICROBATCH, Recorder, TaskRunner, batch, held_call, squares, train

from helpers_parity import assert_same, call_reference
from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.plan.overlap import Overlap
from roundpipe.runtime.run import RunCancelled

MakeModel = Callable[..., RoundPipe]
ALL_FUSED = ModelExecutePlan([], [range(0, 3)])


def execute(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, model: RoundPipe) -> TaskRunner:
    """One training call, all tasks on one device, on this thread."""
    runner = TaskRunner()
    with held_call(monkeypatch, lambda: train(model)) as run:
        recorder.clear()
        for task in run.tasks:
            recorder.note(f"begin {task}")
            runner.run(run, task)
        losses = [run.losses[microbatch][1] for microbatch in range(NUM_MICROBATCH)]
        for values in losses:
            values.event.wait()
            assert torch.isfinite(values.tensors[0]).all()
    return runner


def layer_calls(recorder: Recorder) -> list[str]:
    return [line for line in recorder.lines if line.startswith(("begin", "forward", "backward"))]


def test_microbatches_run_in_order_and_backward_recomputes_stage_by_stage(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(recorder, monkeypatch, make_model())
    forward = ["forward 0", "forward 1"]
    assert layer_calls(recorder) == [
        *["begin F0", *forward * NUM_MICROBATCH],
        *["begin FB1", *["forward 2", "backward 2"] * NUM_MICROBATCH],
        *["begin B2", *[*forward, "backward 1", "backward 0"] * NUM_MICROBATCH],
    ]


def test_layer_grain_recomputes_one_layer_at_a_time(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(recorder, monkeypatch, make_model(grain="layer"))
    calls = layer_calls(recorder)
    assert calls[calls.index("begin B2") + 1 :] == ["forward 1", "backward 1", "forward 0", "backward 0"] * 3


def test_the_tail_goes_backward_layer_by_layer(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runner = make_model(plan=ALL_FUSED), TaskRunner()
    with held_call(monkeypatch, lambda: train(model)) as run:
        run.overlap = Overlap(tail=2)
        (task,) = run.tasks
        recorder.clear()
        runner.run(run, task)
    forward = ["forward 0", "forward 1", "forward 2"]
    assert layer_calls(recorder) == [
        *[*forward, "backward 2", "backward 1", "backward 0"],  # microbatch 0
        *[*forward, "backward 2"] * 2,  # the tail: its last layer goes backward at once
        *["backward 1"] * 2,
        *["backward 0"] * 2,
    ]


def test_compute_waits_for_the_weights_of_a_layer_before_its_first_forward(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(recorder, monkeypatch, make_model())
    # All uploads of a task are queued before its first layer runs; compute waits for each of them when it is needed.
    recorder.assert_order(
        "begin F0",
        *["copy weights up", "record weights up 0", "copy weights up", "record weights up 1"],
        *["compute waits for weights up 0", "forward 0", "compute waits for weights up 1", "forward 1"],
        "begin FB1",
        *["copy weights up", "record weights up 2", "compute waits for weights up 2", "forward 2"],
    )


def test_inputs_are_uploaded_before_compute_reads_them(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(recorder, monkeypatch, make_model())
    for microbatch in range(NUM_MICROBATCH):
        record = f"record activations up {microbatch}"
        wait = f"compute waits for activations up {microbatch}"
        assert recorder.index("copy activations up", microbatch) < recorder.index(record)
        assert recorder.index(record) < recorder.index(wait) < recorder.index("forward 0", microbatch)


def test_downloads_wait_for_the_compute_that_fills_their_source(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(recorder, monkeypatch, make_model())
    for stream in ("activations down", "gradients down"):
        copies = [index for index, line in enumerate(recorder.lines) if line == f"copy {stream}"]
        assert copies
        for before, index in itertools.pairwise([0, *copies]):
            # Since the copy before it: compute recorded an event, and this stream waits for that event.
            lines = recorder.lines[before:index]
            records = [line for line in lines if line.startswith("record compute")]
            assert any(f"{stream} waits for {line.removeprefix('record ')}" in lines for line in records), lines


def test_gradients_of_a_layer_go_down_once_after_its_last_backward(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = execute(recorder, monkeypatch, make_model())
    assert recorder.lines.count("copy gradients down") == 3
    for position, layer_id in enumerate((2, 1, 0)):
        last = recorder.index(f"backward {layer_id}", NUM_MICROBATCH - 1)
        assert recorder.index("copy gradients down", position) > last
    assert [landing.layer_id for landing in runner.landings.submitted] == [2, 1, 0]


def test_the_next_task_is_prefetched_after_the_first_microbatch_and_after_each_layer_that_is_finished(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runner = make_model(), TaskRunner()
    with held_call(monkeypatch, lambda: train(model)) as run:
        for task in run.tasks:
            runner.prefetches.clear()
            runner.run(run, task)
            # False: regardless of unused memory. True: only into unused memory.
            assert runner.prefetches == [False, *[True] * len(task.layers)], str(task)


def test_a_layer_runs_before_downloads_of_its_input_end_once_it_is_known_not_to_change_it(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(recorder, monkeypatch, make_model())
    first_forward, second_forward = (recorder.index("forward 0", microbatch) for microbatch in (0, 1))
    second_layer = recorder.index("forward 1", 0)
    waits = [
        index for index, line in enumerate(recorder.lines) if line.startswith("compute waits for activations down")
    ]
    assert any(index < first_forward for index in waits)
    assert not any(second_layer < index < second_forward for index in waits)


def test_a_task_of_a_failed_run_ends_before_its_next_microbatch(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runner = make_model(), TaskRunner()
    with held_call(monkeypatch, lambda: train(model)) as run:
        run.fail(KeyError("elsewhere"))
        with pytest.raises(RunCancelled):
            runner.run(run, run.tasks[0])
    assert layer_calls(recorder) == []
    assert recorder.starting("copy weights up") == []


def test_weights_leave_the_replica_when_its_task_ends_even_in_a_failure(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runner = make_model(), TaskRunner()
    with held_call(monkeypatch, lambda: train(model)) as run:

        def fail() -> None:
            raise ValueError("in the layer")

        handle = model.model[0].register_forward_pre_hook(lambda *_: fail())
        with pytest.raises(ValueError, match="in the layer"):
            runner.run(run, run.tasks[0])
        handle.remove()
        replica = runner.images.replica(run.store, 0)
        assert [parameter.numel() for parameter in replica.parameters] == [0, 0]


def test_a_landing_holds_the_sum_over_all_microbatches(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    reference = copy.deepcopy(model.model)
    call_reference(reference, (batch()[0],), label=batch()[1], loss_fn=squares, num_microbatch=NUM_MICROBATCH)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for landing in execute(recorder, monkeypatch, model).landings.submitted:
        landing.arrived.wait()
        found = {gradient.record.name: gradient.tensor.clone() for gradient in landing.gradients}
        assert_same(found, {name: expected.pop(name) for name in found}, f"layer {landing.layer_id}")
    assert expected == {}
