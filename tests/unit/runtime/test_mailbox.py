"""What a task receives, keeps and sends: on the device where the next task runs there, else through host memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded_runs import NUM_MICROBATCH, Recorder, batch, held_call, train
from torch import Tensor

from roundpipe import RoundPipe
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.runtime.mailbox import Losses, StageMail
from roundpipe.runtime.run import Place, Run
from roundpipe.runtime.transfer import Bundle, Transfer

MakeModel = Callable[..., RoundPipe]
F0, FB1, B2 = 0, 1, 2


def mail_of(run: Run, task: int) -> StageMail:
    return StageMail(run, run.tasks[task], Transfer(VirtualDevice(task)), Place(run, run.tasks[task], "cpu:0"))


def value(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def test_the_first_task_receives_the_microbatches_of_the_call(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail = mail_of(run, F0)
        for microbatch, expected in enumerate(batch()[0].tensor_split(NUM_MICROBATCH)):
            bundle, flags = mail.receive(microbatch)
            args, kwargs = bundle.unpack()
            assert torch.equal(args[0], expected)
            assert (kwargs, flags) == ({}, (False,))
    recorder.assert_order(
        *["copy activations up", "record activations up 0", "compute waits for activations up 0", "lend to compute"]
    )


def test_labels_are_those_of_the_microbatch(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        labels = [mail_of(run, FB1).label(microbatch) for microbatch in range(NUM_MICROBATCH)]
    assert torch.equal(torch.cat(labels), batch()[1])


def test_a_value_for_the_same_device_stays_there(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sent = make_model(num_devices=1), value()
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail_of(run, F0).send(1, Bundle.pack(sent), (True,))
        bundle, flags = mail_of(run, FB1).receive(1)
    assert bundle.unpack() is sent
    assert flags == (True,)
    assert recorder.starting("copy") == []


def test_a_value_for_another_device_is_uploaded_after_its_download_has_ended(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sent = make_model(num_devices=2), value()
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail_of(run, F0).send(1, Bundle.pack((sent, "a word")), (True,))
        bundle, flags = mail_of(run, FB1).receive(1)
    received, word = bundle.unpack()
    assert torch.equal(received, sent)
    assert received is not sent
    assert (word, flags) == ("a word", (True,))
    recorder.assert_order(
        *["record compute 0", "activations down waits for compute 0", "copy activations down"],
        *["record activations down 0", "activations up waits for activations down 0", "copy activations up"],
        *["record activations up 0", "compute waits for activations up 0"],
    )


@pytest.mark.parametrize("num_devices", [1, 2], ids=["same-device", "other-device"])
def test_gradients_keep_their_places_where_some_are_missing(
    num_devices: int, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, gradients = make_model(num_devices=num_devices), [None, value(1), None, value(2)]
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail_of(run, FB1).send_gradients(2, gradients)
        received = mail_of(run, B2).receive_gradients(2)
    assert [gradient is None for gradient in received] == [True, False, True, False]
    assert torch.equal(received[1], gradients[1])
    assert torch.equal(received[3], gradients[3])


def test_the_last_task_hands_the_gradients_of_the_inputs_to_the_caller(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail_of(run, B2).send_gradients(1, [value(1), None])
        parcel = run.input_gradients[1]
        for event in parcel.events:
            event.wait()
        assert torch.equal(parcel.gradients[0], value(1))
        assert parcel.gradients[1] is None


def test_a_saved_input_comes_back_once_as_it_was(
    recorder: Recorder, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, saved = make_model(), value()
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail = mail_of(run, F0)
        mail.save_input(0, 1, Bundle.pack(saved), (False,))
        mail.save_input(0, 2, Bundle.pack(value(9)), (True,))
        bundle, flags = mail_of(run, B2).recalled_input(0, 1)
        assert torch.equal(bundle.unpack(), saved)
        assert flags == (False,)
        with pytest.raises(KeyError):
            mail_of(run, B2).recalled_input(0, 1)
        mail_of(run, B2).pass_no_gradient_on(2)
        assert run.recall.inputs == {}
    recorder.assert_order(
        "copy activations down", "record activations down 0", "activations up waits for activations down 0"
    )


def test_data_saved_by_a_layer_belongs_to_that_layer_and_microbatch(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail_of(run, F0).save_layer_data(1, 2, Bundle.pack((value(), 3)))
        assert mail_of(run, B2).recalled_data(0, 2) is None
        assert mail_of(run, B2).recalled_data(1, 1) is None
        tensor, number = mail_of(run, B2).recalled_data(1, 2) or ()
        assert torch.equal(tensor, value())
        assert number == 3


def test_losses_and_outputs_are_filed_by_microbatch(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with held_call(monkeypatch, lambda: train(model)) as run:
        mail = mail_of(run, FB1)
        for microbatch in (2, 0):
            mail.send_losses(microbatch, Losses([torch.tensor(float(microbatch))], is_sequence=True))
            mail.send_outputs(microbatch, Bundle.pack(value(microbatch)), (True,))
        for microbatch in (2, 0):
            is_sequence, losses = run.losses[microbatch]
            losses.event.wait()
            assert (is_sequence, losses.tensors[0].item()) == (True, float(microbatch))
            run.outputs[microbatch].events[0].wait()
            assert torch.equal(run.outputs[microbatch].bundle.unpack(), value(microbatch))
        assert sorted(run.losses) == sorted(run.outputs) == [0, 2]
