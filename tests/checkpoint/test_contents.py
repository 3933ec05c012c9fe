"""What the folder of a checkpoint holds: plain transformers and peft load it, and nothing in it is a pickle."""

from __future__ import annotations

import copy
import importlib
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers_checkpoint import (
    MANIFEST,
    WIDTH,
    MakeOptimizer,
    Training,
    assert_same_bits,
    momentum,
    network,
    rewrite_file,
    rewrite_manifest,
)
from helpers_faults import run_script
from helpers_tiny_hf import VOCAB_SIZE, tiny_model, tiny_tokenizer
from roundpipe import AutoRoundPipe, ModelExecutePlan, RoundPipeRunConfig, checkpoint, optim, wrap_model_to_roundpipe
from roundpipe.checkpoint.format import read_manifest

SAVING = importlib.import_module("roundpipe.checkpoint.save")  # the package's attribute `save` is the function
CONTENTS = importlib.import_module("roundpipe.checkpoint.contents")


class TextTraining:
    """A wrapped language model and its optimizer."""

    def __init__(self, network: nn.Module, num_devices: int = 2) -> None:
        self.model = wrap_model_to_roundpipe(
            network,
            devices=["cpu"] * num_devices,
            optim_dtype=torch.float32,
            model_run_config=RoundPipeRunConfig(num_microbatch=2),
        )
        self.optimizer = optim.AdamW(self.model.optim_parameters(), lr=0.01)

    def train(self, num_steps: int, seed: int = 0) -> list[float]:
        losses = []
        for step in range(num_steps):
            ids = torch.randint(VOCAB_SIZE, (4, 8), generator=torch.Generator().manual_seed(seed + step))
            losses.append(float(self.model.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})))
            self.model.step(self._step_fn, is_async=False)
        return losses

    def _step_fn(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, **options: Any) -> Path:
        return checkpoint.save(folder, self.model, self.optimizer, **options).wait()

    def weights(self) -> dict[str, torch.Tensor]:
        self.model.synchronize()
        return copy.deepcopy(dict(self.model.state_dict()))


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Trainings that are closed at the end."""
    made: list[Any] = []
    yield made
    for training in made:
        training.model.close()


# Models of transformers.


@pytest.mark.parametrize("limit_bytes", [None, 2000], ids=["one file", "sharded"])
def test_transformers_loads_the_folder(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if limit_bytes is not None:
        monkeypatch.setattr(CONTENTS, "_SHARD_BYTES", limit_bytes)
    opened.append(training := TextTraining(tiny_model("qwen3").bfloat16()))
    training.train(2)
    folder = training.save(tmp_path / "one", tokenizer=tiny_tokenizer())
    assert (folder / "model.safetensors.index.json").exists() == (limit_bytes is not None)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert loaded.dtype is torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_bits(dict(loaded.state_dict()), training.weights())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w1 w2")["input_ids"] == tiny_tokenizer()("w1 w2")["input_ids"]
    assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_a_tied_weight_is_written_once(opened: list[Any], tmp_path: Path) -> None:
    from safetensors import safe_open

    opened.append(training := TextTraining(tiny_model("qwen3")))
    folder = training.save(tmp_path / "one")
    assert read_manifest(folder).aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118


def test_a_model_of_transformers_resumes(opened: list[Any], tmp_path: Path) -> None:
    opened += [
        whole := TextTraining(tiny_model("llama").bfloat16()),
        other := TextTraining(tiny_model("llama", seed=5).bfloat16(), 1),
    ]
    whole.train(2)
    whole.save(tmp_path / "one")
    losses = whole.train(2, seed=9)
    checkpoint.load(tmp_path / "one", other.model, other.optimizer)
    assert other.train(2, seed=9) == losses
    assert_same_bits(other.weights(), whole.weights())


# Adapters of peft.


def adapted(seed: int = 0, names: tuple[str, ...] = ("default",)) -> Any:
    """A language model with adapters, of which the last one trains."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama")
    torch.manual_seed(seed)

    def config(rank: int) -> LoraConfig:
        return LoraConfig(
            r=rank, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )

    model = get_peft_model(base, config(2), adapter_name=names[0])
    for rank, name in enumerate(names[1:], 3):
        model.add_adapter(name, config(rank))
        model.set_adapter(name)
    return model


def test_peft_loads_the_folder(opened: list[Any], tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    opened.append(training := TextTraining(adapted()))
    training.train(2)
    folder = training.save(tmp_path / "one")
    assert {path.name for path in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not list(folder.glob("model*"))
    loaded = PeftModel.from_pretrained(tiny_model("llama"), str(folder))
    training.model.synchronize()
    ours = get_peft_model_state_dict(training.model.original_model)
    assert_same_bits(dict(get_peft_model_state_dict(loaded)), dict(ours))
    assert len(ours) == 8
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = loaded(input_ids=ids).logits
    training.model.close()
    with torch.no_grad():
        assert_same_bits(training.model.original_model.eval()(input_ids=ids).logits, expected)


def test_several_adapters(opened: list[Any], tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    names = ("default", "other")
    opened.append(training := TextTraining(adapted(names=names)))
    training.train(2)
    folder = training.save(tmp_path / "one")
    training.model.synchronize()
    for name in names:
        found = PeftModel.from_pretrained(tiny_model("llama"), str(folder if name == "default" else folder / name))
        ours = get_peft_model_state_dict(training.model.original_model, adapter_name=name)
        assert_same_bits(dict(get_peft_model_state_dict(found)), dict(ours))
    losses = training.train(2, seed=9)
    opened.append(other := TextTraining(adapted(seed=4, names=names)))
    checkpoint.load(folder, other.model, other.optimizer)
    assert other.train(2, seed=9) == losses


def test_buffers_of_a_module_that_trains_beside_an_adapter(opened: list[Any], tmp_path: Path) -> None:
    """peft saves such a module in full, under other keys than those of the model's state dict."""
    from peft import LoraConfig, get_peft_model

    def with_adapter(seed: int) -> nn.Module:
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["0.0"], modules_to_save=["1"])
        model: nn.Module = get_peft_model(network(seed=1), config)
        torch.manual_seed(seed)
        return model

    opened += [whole := Training(with_adapter(1)), other := Training(with_adapter(2), seed=2)]
    whole.train(2)
    whole.save(tmp_path / "one").wait()
    assert "base_model.model.1.3.running_mean" in read_manifest(tmp_path / "one").tensors["weights"]
    other.load(tmp_path / "one")
    assert_same_bits(other.bits(), whole.bits())


# Other models and optimizers.


def check_resumes(whole: Training, other: Training, folder: Path) -> None:
    """`other` continues from a save of `whole` as `whole` itself does, which trains while it is saved."""
    whole.train(2)
    pending = whole.save(folder)
    losses = whole.train(2)
    pending.wait()
    other.load(folder)
    assert other.train(2) == losses
    assert_same_bits(other.bits(), whole.bits())


class HostAndDevices(nn.Module):
    """Parameters in blocks that run on devices, and in the model itself, which run on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x * self.scale)
        return self.norm(x)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "stale"])
def test_a_model_in_parts_resumes(tmp_path: Path, is_async: bool) -> None:
    def opened(num_devices: int, seed: int) -> tuple[AutoRoundPipe, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = wrap_model_to_roundpipe(
            HostAndDevices(),
            use_sequential_preset=False,
            lower_threshold=100,  # more than the parameter of the model itself
            upper_threshold=2000,
            devices=["cpu"] * num_devices,
            model_run_config=RoundPipeRunConfig(num_microbatch=1),
        )
        assert isinstance(model, AutoRoundPipe)
        return model, optim.AdamW(model.optim_parameters(), lr=0.02)

    def train(model: AutoRoundPipe, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(3):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            losses.append(loss.item())
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        return losses

    whole = opened(2, seed=0)
    train(*whole)
    pending = checkpoint.save(tmp_path / "one", *whole)
    losses = train(*whole)
    pending.wait()
    other = opened(1, seed=3)
    checkpoint.load(tmp_path / "one", *other)
    assert train(*other) == losses
    for model, _ in (whole, other):
        model.synchronize()
    assert_same_bits(dict(other[0].state_dict()), dict(whole[0].state_dict()))
    for model, _ in (whole, other):
        model.close()


def test_frozen_parameters(opened: list[Any], tmp_path: Path) -> None:
    def frozen(seed: int) -> nn.Module:
        model = network(seed=seed)
        model[1].requires_grad_(False)
        model[2][0].bias.requires_grad_(False)
        return model

    opened += [whole := Training(frozen(1)), other := Training(frozen(2), num_devices=1)]
    check_resumes(whole, other, tmp_path / "one")
    names = read_manifest(tmp_path / "one").tensors
    assert "1.0.weight" in names["weights"]
    assert not any("1.0" in name or "2.0.bias" in name for name in names["optimizer"])


def test_parameters_that_layers_share(opened: list[Any], tmp_path: Path) -> None:
    def shared(seed: int) -> nn.Module:
        model = network(seed=seed)
        model[2][0].weight = model[0][0].weight
        return model

    opened += [whole := Training(shared(1)), other := Training(shared(2), num_devices=3)]
    check_resumes(whole, other, tmp_path / "one")
    assert read_manifest(tmp_path / "one").aliases == {"2.0.weight": "0.0.weight"}
    assert other.model.original_model[2][0].weight is other.model.original_model[0][0].weight


def amsgrad(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, amsgrad=True)


@pytest.mark.parametrize("make_optimizer", [momentum, amsgrad, torch.optim.Adagrad, torch.optim.RMSprop])
def test_states_of_other_optimizers(opened: list[Any], tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    opened += [
        whole := Training(make_optimizer=make_optimizer),
        other := Training(seed=2, make_optimizer=make_optimizer),
    ]
    check_resumes(whole, other, tmp_path / "one")


def test_weights_alone_load_into_a_model_without_an_optimizer(opened: list[Any], tmp_path: Path) -> None:
    opened += [whole := Training(), other := Training(seed=2)]
    whole.train(2)
    whole.save(tmp_path / "one").wait()
    assert checkpoint.load(tmp_path / "one", other.model) == {"step": 2}
    for model in (whole.model, other.model):
        model.synchronize()
    assert_same_bits(dict(other.model.state_dict()), dict(whole.model.state_dict()))


# New processes.


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True], ids=["exact", "stale"])
def test_a_new_process_with_other_devices_and_another_plan_resumes(tmp_path: Path, is_async: bool) -> None:
    """The checkpoint comes from the other process, and so do the expected losses."""
    done = run_script(
        f"""
import json
from pathlib import Path
from helpers_checkpoint import Training
from roundpipe import ModelExecutePlan
training = Training(num_devices=3, is_async={is_async}, scaled=True, plan=ModelExecutePlan([], [range(0, 4)]))
losses = training.train(6, save_in=Path({str(tmp_path)!r}), save_every=3)
training.close()
print(json.dumps(losses))
"""
    )
    assert done.returncode == 0, done.stderr
    plan = ModelExecutePlan([range(0, 1), range(1, 2)], [range(2, 4), range(0, 2)])
    training = Training(num_devices=2, is_async=is_async, scaled=True, plan=plan, seed=8)
    training.load(tmp_path / "step-3")
    assert training.train(3) == json.loads(done.stdout)[3:]
    training.close()


# Never a pickle.


def refuse_pickles(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a pickle was written or read")

    for module, names in {
        pickle: ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"),
        torch: ("save", "load"),
    }.items():
        for name in names:
            patch.setattr(module, name, refuse)


def is_pickle(content: bytes) -> bool:
    """Whether Python's unpickler gets beyond the first instruction of a file, or a zip archive could hold one."""
    if content.startswith((b"PK", b"\x80")):
        return True
    try:
        pickle.Unpickler(io.BytesIO(content)).load()
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    "make", [lambda: TextTraining(tiny_model()), lambda: TextTraining(adapted())], ids=["full", "peft"]
)
def test_nothing_is_pickled(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], TextTraining]
) -> None:
    assert is_pickle(pickle.dumps([1]))
    opened.append(training := make())
    training.train(1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 9)
    tokenizer = tiny_tokenizer()
    extra = {"position": (1, {2: torch.ones(3)}), "bytes": b"\x80"}
    with monkeypatch.context() as patch:
        refuse_pickles(patch)
        folder = training.save(tmp_path / "one", scheduler=scheduler, tokenizer=tokenizer, extra=extra)
        found = checkpoint.load(folder, training.model, training.optimizer, scheduler=scheduler)
        checkpoint.load_rng(folder)
    assert_same_bits(found, extra)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja"}
    assert not any(is_pickle(path.read_bytes()) for path in files)


def test_the_manifest_says_where_every_tensor_lies(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader needs the manifest alone to read the bytes of a tensor."""
    monkeypatch.setattr(CONTENTS, "_SHARD_BYTES", 1000)
    opened.append(training := Training())
    training.train(1)
    training.save(tmp_path / "one").wait()
    manifest = json.loads((tmp_path / "one" / MANIFEST).read_text())
    weights = dict(training.model.state_dict())
    assert manifest["tensors"]["weights"].keys() == weights.keys()
    for name, entry in manifest["tensors"]["weights"].items():
        content = b"".join(
            (tmp_path / "one" / piece["file"]).read_bytes()[piece["offset"] : piece["offset"] + piece["num_bytes"]]
            for piece in sorted(entry["pieces"], key=lambda piece: piece["start"])
        )
        assert content == weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert entry["shape"] == list(weights[name].shape)


def test_a_tensor_in_pieces_of_several_files_is_read(opened: list[Any], tmp_path: Path) -> None:
    """Several writers may each have written a part of a tensor."""
    opened += [training := Training(), other := Training(seed=2)]
    training.train(1)
    training.save(tmp_path / "one").wait()
    folder, name = tmp_path / "one", "0.0.weight"
    entry = json.loads((folder / MANIFEST).read_text())["tensors"]["weights"][name]
    (piece,) = entry["pieces"]
    content = (folder / piece["file"]).read_bytes()[piece["offset"] :][: piece["num_bytes"]]
    rewrite_file(folder, "part", content[100:])
    pieces = [
        {"file": "part", "offset": 0, "num_bytes": len(content) - 100, "start": 100},
        {**piece, "num_bytes": 100},
    ]
    rewrite_manifest(folder, lambda data: data["tensors"]["weights"][name].update(pieces=pieces))
    other.load(folder)
    assert_same_bits(other.bits(), training.bits())
