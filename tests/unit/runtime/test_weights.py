"""Uploads of layer weights to one device: order, waits, and the device memory they use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded_runs import Recorder, held_call, train

from roundpipe import RoundPipe
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.runtime.replica import LayerImages
from roundpipe.runtime.run import Place, Run, RunCancelled
from roundpipe.runtime.transfer import views_of

MakeModel = Callable[..., RoundPipe]
F0, FB1, B2 = 0, 1, 2  # F0: layers 0 and 1, FB1: layer 2, B2: layers 0 and 1


@pytest.fixture
def images() -> LayerImages:
    return LayerImages(VirtualDevice(0))


def ready(images: LayerImages, run: Run, task: int, layer_id: int) -> list[torch.Tensor]:
    """The layer's weights on the device, by parameter."""
    return images.ready(run, run.tasks[task], images.replica(run.store, layer_id), Place(run, run.tasks[0], "cpu:0"))


def uploaded_layers(recorder: Recorder, run: Run) -> list[int]:
    """The layers whose host memory copies have read so far, in this order."""
    layer_of = {layer.flat.tensor.data_ptr(): layer.layer_id for layer in run.store.layers if layer.flat is not None}
    return [layer_of[source.data_ptr()] for _, source, _ in recorder.copies]


@pytest.mark.parametrize(
    ("grain", "task", "expected"),
    [("stage", F0, [0, 1]), ("stage", B2, [0, 1]), ("layer", F0, [0, 1]), ("layer", B2, [1, 0])],
)
def test_prefetch_uploads_the_layers_of_a_task_in_the_order_of_use(
    grain: str,
    task: int,
    expected: list[int],
    images: LayerImages,
    recorder: Recorder,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(grain=grain)
    with held_call(monkeypatch, lambda: train(model)) as run:
        images.prefetch(run, run.tasks[task], Place(run, run.tasks[0], "cpu:0"))
        assert uploaded_layers(recorder, run) == expected
        images.prefetch(run, run.tasks[task], Place(run, run.tasks[0], "cpu:0"))
        assert uploaded_layers(recorder, run) == expected, "a second prefetch uploads nothing again"
        images.finish(run, run.tasks[task])


def test_compute_waits_for_the_upload_of_the_layer_it_needs_and_for_no_other(
    images: LayerImages, recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        images.prefetch(run, run.tasks[F0], Place(run, run.tasks[0], "cpu:0"))
        ready(images, run, F0, 0)
        assert recorder.starting("compute waits") == ["compute waits for weights up 0"]
        ready(images, run, F0, 1)
        assert recorder.starting("compute waits")[1:] == ["compute waits for weights up 1"]
        images.finish(run, run.tasks[F0])


def test_ready_uploads_what_was_not_prefetched_and_returns_the_weights(
    images: LayerImages, recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        weights = ready(images, run, FB1, 2)
        assert uploaded_layers(recorder, run) == [2]
        for weight, parameter in zip(weights, model.model[2].parameters(), strict=True):
            assert torch.equal(weight, parameter.detach())
        images.finish(run, run.tasks[FB1])


def test_the_memory_of_an_image_is_lent_to_compute_when_it_is_allocated(
    images: LayerImages, recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        images.prefetch(run, run.tasks[FB1], Place(run, run.tasks[0], "cpu:0"))
        recorder.assert_order("lend to compute", "copy weights up")
        images.finish(run, run.tasks[FB1])


def test_an_image_is_written_again_only_after_compute_and_its_upload_have_passed(
    images: LayerImages, recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        first = ready(images, run, F0, 0)
        images.finish(run, run.tasks[F0])
        recorder.clear()
        second = ready(images, run, FB1, 2)
        assert second[0].data_ptr() == first[0].data_ptr()
        recorder.assert_order(
            "weights up waits for compute 0",
            "weights up waits for weights up 0",
            "poison weights up",
            "copy weights up",
        )
        images.finish(run, run.tasks[FB1])


def test_views_are_those_of_their_buffer_where_its_id_was_used_before(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer is lost when its upload fails, and a later one often gets its id."""
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        layout = run.store.layers[0].image
        for _ in range(20):
            buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
            views = views_of(buffer, layout)
            assert views[0].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert views is views_of(buffer, layout)
            del buffer, views


def test_prefetch_within_room_stops_where_there_is_no_memory_to_spare(
    images: LayerImages, recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        one_image = run.store.layers[0].image.total_bytes
        run.weight_room_bytes = one_image
        images.prefetch(run, run.tasks[F0], Place(run, run.tasks[0], "cpu:0"), within_room=True)
        assert uploaded_layers(recorder, run) == [0]
        run.weight_room_bytes = 2 * one_image
        images.prefetch(run, run.tasks[F0], Place(run, run.tasks[0], "cpu:0"), within_room=True)
        assert uploaded_layers(recorder, run) == [0, 1]
        images.finish(run, run.tasks[F0])


def test_prefetch_uploads_nothing_before_the_optimizer_has_written_the_version(
    images: LayerImages, recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        run.version += 1
        images.prefetch(run, run.tasks[F0], Place(run, run.tasks[0], "cpu:0"))
        assert recorder.starting("copy") == []
        run.version -= 1


def test_a_failed_run_uploads_nothing(
    images: LayerImages, recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        run.fail(KeyError("elsewhere"))
        images.prefetch(run, run.tasks[F0], Place(run, run.tasks[0], "cpu:0"))
        with pytest.raises(RunCancelled):
            ready(images, run, F0, 0)
        assert recorder.starting("copy") == []


def test_a_layer_has_one_replica_per_device(
    images: LayerImages, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        replica = images.replica(run.store, 0)
        assert replica is images.replica(run.store, 0)
        assert replica is not images.replica(run.store, 1)
        assert replica is not LayerImages(VirtualDevice(1)).replica(run.store, 0)
