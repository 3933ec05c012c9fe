"""Trainers such as that of sentence-transformers: losses over pairs of calls, groups of parameters, models that save.

The package is not needed for these tests. The classes have the interfaces that its classes have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_resume import assert_same, crash, trained
from torch import Tensor, nn
from transformers import Trainer

from helpers_tiny_hf import tiny_model
from helpers_trainers import NUM_STEPS, arguments, no_report, options, outcome_of, token_rows  # noqa: F401
from roundpipe.errors import UsageError
from roundpipe.integrations import RoundPipeMixin


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.auto_model = tiny_model().model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {**features, "token_embeddings": found.last_hidden_state}


class Pooling(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = features["attention_mask"].unsqueeze(-1).float()
        summed = (features["token_embeddings"] * weights).sum(1)
        return {**features, "sentence_embedding": summed / weights.sum(1)}


class Encoder(nn.Sequential):
    """A model whose save_pretrained() takes a path alone."""

    def __init__(self) -> None:
        super().__init__(Transformer(), Pooling())

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        for module in self:
            features = module(features)
        return features

    def save_pretrained(self, path: str) -> None:
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path, "encoder.pt"))


class RankingLoss(nn.Module):
    """Each anchor is nearer to its positive than to those of all other rows of the batch."""

    def __init__(self, model: nn.Module, *, has_weight: bool) -> None:
        super().__init__()
        self.model = model
        if has_weight:
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: list[dict[str, Tensor]]) -> Tensor:
        anchors, positives = (self.model(each)["sentence_embedding"] for each in features)
        scores = nn.functional.normalize(anchors) @ nn.functional.normalize(positives).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pairs of a row and its reverse."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    return {"anchor": ids, "positive": ids.flip(1), "mask": mask, "flipped": mask.flip(1)}


class PairTrainer(Trainer):
    def __init__(self, model: nn.Module, *args: Any, has_weight: bool = False, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.loss = RankingLoss(model, has_weight=has_weight)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.loss.model = model
        pairs = (("anchor", "mask"), ("positive", "flipped"))
        loss = self.loss([{"input_ids": inputs[ids], "attention_mask": inputs[mask]} for ids, mask in pairs])
        return (loss, {}) if return_outputs else loss

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        kind, options = super().get_optimizer_cls_and_kwargs(args, model)
        named = [(name, param) for name, param in self.loss.named_parameters() if param.requires_grad]
        groups = [
            {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.3},
            {"params": [p for name, p in named if "norm" in name], "lr": args.learning_rate / 10},
        ]
        return kind, {**options, "optimizer_dict": groups}


class RoundPipePairTrainer(RoundPipeMixin, PairTrainer):
    pass


SAVES: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}


def new_trainer(kind: Any, folder: Path, changes: dict[str, Any], **more: Any) -> Any:
    ours = {"roundpipe": options(2)} if kind is RoundPipePairTrainer else {}
    args = arguments(folder, remove_unused_columns=False, **changes)
    return kind(Encoder(), args, train_dataset=token_rows(), data_collator=collate, **ours, **more)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_loss_over_all_rows_and_its_groups_train_as_with_the_plain_trainer(optim: str, tmp_path: Path) -> None:
    """The loss gets the outputs of a batch of three microbatches; groups keep their rates."""
    plain = outcome_of(new_trainer(PairTrainer, tmp_path / "a", {"optim": optim}))
    found = outcome_of(new_trainer(RoundPipePairTrainer, tmp_path / "b", {"optim": optim}))
    assert len(plain.losses) == len(set(plain.losses)) == NUM_STEPS
    assert found.losses == pytest.approx(plain.losses, abs=1e-5, rel=0)
    for name, value in plain.weights.items():
        assert torch.allclose(found.weights[name], value, atol=1e-5, rtol=0), name


def test_it_resumes_exactly_and_saves_as_its_model_does(tmp_path: Path) -> None:
    whole = trained(new_trainer(RoundPipePairTrainer, tmp_path / "whole", SAVES))
    crash(new_trainer(RoundPipePairTrainer, tmp_path / "torn", SAVES), step=4)
    trainer = new_trainer(RoundPipePairTrainer, tmp_path / "torn", SAVES)
    trainer.save_model(str(tmp_path / "saved"))
    saved = torch.load(tmp_path / "saved" / "encoder.pt")
    assert saved.keys() == whole[1].keys()
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())
    assert_same(trained(trainer, resume=True), whole)


def test_a_loss_with_weights_beside_the_model_is_refused(tmp_path: Path) -> None:
    trainer = new_trainer(RoundPipePairTrainer, tmp_path, {}, has_weight=True)
    with pytest.raises(UsageError, match="a parameter of shape \\(\\) that is none of the model's"):
        trainer.train()
    trainer.model.close()
