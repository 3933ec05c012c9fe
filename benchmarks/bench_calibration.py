"""Claim: the time of making a split plan hardly grows with the number of layers, because trials fold wide products.

    python benchmarks/bench_calibration.py [--hidden 2048] [--layers 2 6]

Makes the plan of a Qwen3 model in bfloat16 twice: with whole products, and folded as in every run. Seconds are those of
the processor, of one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import time

import torch
from measuring import Table, options_parser
from transformers import AutoModelForCausalLM, Qwen3Config

from roundpipe.split import folded
from roundpipe.split.splitter import ModelSplitter


def seconds_of_plan(model: torch.nn.Module, least: int) -> float:
    """Processor seconds of a plan if inputs at least `least` times as wide as a folded one are folded."""
    folded._LEAST, before = least, folded._LEAST
    start = time.thread_time()
    try:
        assert ModelSplitter(model).learn_by_guess()
    finally:
        folded._LEAST = before
    return time.thread_time() - start


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6])
    options = parser.parse_args()
    print(f"split plan of Qwen3, hidden size {options.hidden}, torch {torch.__version__}")
    torch.set_num_threads(1)
    table = Table("whole s", "folded s", "folded / whole")
    for num_layers in options.layers:
        config = Qwen3Config(
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=num_layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=options.hidden // 16,
            vocab_size=16384,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        seconds_of_plan(model, folded._LEAST)  # the first plan of a process imports and compiles
        whole, narrow = seconds_of_plan(model, 10**9), seconds_of_plan(model, folded._LEAST)
        table.add(f"{num_layers} layers", f"{whole:.2f}", f"{narrow:.2f}", f"{narrow / whole:.2f}")


if __name__ == "__main__":
    main()
