"""One machine has other settings than the others: all raise MachineError with names, values and ranks."""

from __future__ import annotations

import socket

import pytest
import torch
from differing_settings import (
    BAD_RANK,
    count_descriptions,
    differ,
    list_of_a_set,
    may_differ,
    two_models,
    warnings_of_hosts,
    wrap_other_models,
)

from helpers_machines import MachinePool, values

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 40.0

# What the message says of a difference on rank 1 of three.
MESSAGES = {
    "order": "parameter 0 is 0.0.weight on ranks 0, 2 and 3.0.weight on rank 1",
    "groups": "the sizes of parameter groups is [4, 4] on ranks 0, 2 and [5, 3] on rank 1",
    "class": "roundpipe.optim.adam.AdamW on ranks 0, 2 and roundpipe.optim.adam.Adam on rank 1",
    "lr": "lr of parameter group 1 is 0.02 on ranks 0, 2 and 0.03 on rank 1",
    "lr in its last bit": "lr of parameter group 1 is 0.02 on ranks 0, 2 and 0.020000000000000004 on rank 1",
    "lr as a tensor": "lr of parameter group 1 is 0.02 on ranks 0, 2 and a tensor of 0.25 on rank 1",
    "weight_decay": "weight_decay of parameter group 1 is 0.1 on ranks 0, 2 and 0.2 on rank 1",
    "betas": "betas of parameter group 1 is [0.9, 0.999] on ranks 0, 2 and [0.9, 0.98] on rank 1",
    "requires_grad": "requires_grad of 0.0.weight is True on ranks 0, 2 and False on rank 1",
    "mode": "the training mode of the model is True on ranks 0, 2 and False on rank 1",
    "loss_reduction": "loss_reduction is sum on ranks 0, 2 and mean on rank 1",
    "whole_batch_loss": "whole_batch_loss is False on ranks 0, 2 and True on rank 1",
    "scale": "1 / scale of the losses is 0.25 on ranks 0, 2 and 0.125 on rank 1",
    "max_norm": "max_norm is 1.0 on ranks 0, 2 and 2.0 on rank 1",
}
OTHER_LOOPS = [
    *((kind, "stale", "AdamW") for kind in ("order", "lr", "requires_grad", "scale")),
    *((kind, "plain", "AdamW") for kind in ("order", "class", "lr", "requires_grad", "max_norm", "scale")),
    *((kind, loop, "torch.AdamW") for kind in ("order", "lr") for loop in ("exact", "plain")),
    *((kind, "auto", "AdamW") for kind in ("lr", "weight_decay", "scale", "requires_grad")),
]
CASES = [
    *((kind, "exact", "AdamW") for kind in MESSAGES),
    *OTHER_LOOPS[::3],
    *(pytest.param(*case, marks=pytest.mark.slow) for at, case in enumerate(OTHER_LOOPS) if at % 3),
]


@pytest.mark.parametrize(("kind", "loop", "optimizer"), CASES)
def test_a_setting_that_differs_on_one_machine_is_named_on_all(
    pool: MachinePool, kind: str, loop: str, optimizer: str
) -> None:
    results = values(pool.run(3, differ, kind, loop, optimizer, limit_s=LIMIT_S))
    for rank, result in enumerate(results):
        assert result["error"] is not None, f"rank {rank} trains on"
        error, message, named = result["error"]
        assert (error, named) == ("MachineError", BAD_RANK), message
        expected = MESSAGES[kind]
        if loop == "auto":  # the first parameter is that of the model itself
            expected = expected.replace("of 0.0.weight", "of scale")
        assert expected in message
        for when in ("before", "failed", "after"):
            assert torch.equal(result[when], results[0][when]), f"the weights differ {when}"
    assert torch.equal(results[0]["before"], results[0]["failed"]), "nothing is updated"
    assert not torch.equal(results[0]["after"], results[0]["failed"]), "training goes on"


def test_parameters_in_another_order_on_every_machine(pool: MachinePool) -> None:
    for outcome in pool.run(3, list_of_a_set, limit_s=LIMIT_S):
        assert outcome.error == "MachineError"
        assert "parameter 0 is 0.0.weight (torch.float32, shape (12, 12), requires_grad=True) on" in outcome.message
        assert "on rank 0 and 0.0.bias (torch.float32, shape (12,), requires_grad=True) on rank 1" in outcome.message
        assert "more differ" in outcome.message


def test_what_changes_no_number_may_differ(pool: MachinePool) -> None:
    (losses, weights), *others = values(pool.run(3, may_differ, limit_s=LIMIT_S))
    assert losses[2] < losses[0]
    for other_losses, other_weights in others:
        assert other_losses == losses
        assert torch.equal(other_weights, weights)


def test_another_model_on_one_machine_is_named_by_its_parameters(pool: MachinePool) -> None:
    for outcome in pool.run(3, wrap_other_models, limit_s=LIMIT_S):
        assert (outcome.error, outcome.lost_rank) == ("MachineError", BAD_RANK)
        assert "weight (parameter 0 of net, model 0) is (4, 4) torch.float32" in outcome.message
        assert "on ranks 0, 2 and (5, 4) torch.float32" in outcome.message


def test_an_optimizer_of_two_models_in_another_order_does_not_hang(pool: MachinePool) -> None:
    for outcome in pool.run(2, two_models, limit_s=LIMIT_S):
        assert outcome.error == "MachineError"
        assert "parameter 0 is" in outcome.message


def test_parameters_are_described_once(pool: MachinePool) -> None:
    assert values(pool.run(2, count_descriptions, limit_s=LIMIT_S)) == [1, 1]


def test_ranks_that_share_a_host_are_told_once(pool: MachinePool) -> None:
    (first,), second = values(pool.run(2, warnings_of_hosts, None, limit_s=LIMIT_S))
    assert f"ranks 0, 1 run on the same host {socket.gethostname()} as separate machines" in first
    assert "one process per host (torchrun --nproc-per-node 1): it drives all GPUs" in first
    assert second == []


def test_ranks_on_different_hosts_are_told_nothing(pool: MachinePool) -> None:
    for hosts in (["a x", "b x"], ["a x", "a y"]):  # containers of one host; hosts of one name
        assert values(pool.run(2, warnings_of_hosts, hosts, limit_s=LIMIT_S)) == [[], []]
    first, second, third = values(pool.run(3, warnings_of_hosts, ["a x", "b x", "b x"], limit_s=LIMIT_S))
    assert (first, third) == ([], [])
    assert "ranks 1, 2 run on the same host b" in second[0]
