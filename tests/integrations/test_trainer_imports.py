"""The Trainer classes need transformers and accelerate; those of TRL need trl and datasets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
sys.path.insert(0, SOURCE)
"""


def run_without(hidden: set[str], code: str) -> str:
    """Run code in a new process in which some packages cannot be imported; returns what it prints."""
    script = f"HIDDEN = {hidden!r}\nSOURCE = {str(SOURCE)!r}\n{HIDE}\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_package_imports_nothing_but_torch() -> None:
    heavy = {"transformers", "accelerate", "trl", "datasets", "peft", "rich", "matplotlib", "safetensors"}
    code = "import roundpipe.integrations as found; print(sorted(found.__all__))"
    assert "RoundPipeTrainer" in run_without(heavy, code)


def test_trainer_trains_without_trl_datasets_and_peft() -> None:
    code = """
import tempfile, torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from roundpipe.integrations import RoundPipeMixin, RoundPipeOptions, RoundPipeTrainer

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, max_steps=2, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True)
    options = RoundPipeOptions(devices=["cpu"], view=False)
    trainer = RoundPipeTrainer(model, args, train_dataset=rows, roundpipe=options)
    print("steps", trainer.train().global_step)
"""
    assert run_without({"trl", "datasets", "peft"}, code).endswith("steps 2")


def test_missing_trl_is_named() -> None:
    code = """
import roundpipe.integrations
try:
    roundpipe.integrations.RoundPipeSFTTrainer
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run_without({"trl", "datasets"}, code) == "trl"
