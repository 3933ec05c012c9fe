"""Your own network in bfloat16: frozen layers, gradient accumulation, and a resumed run with exactly equal losses.

python examples/finetune_bf16.py --width 4096 --depth 32
python examples/finetune_bf16.py --tiny
"""

import argparse
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe import RoundPipe, RoundPipeRunConfig, checkpoint, optim

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--depth", type=int, default=16)
parser.add_argument("--calls-per-step", type=int, default=2, help="calls whose gradients add up before one update")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--tiny", action="store_true", help="train a tiny network")
args = parser.parse_args()
if args.tiny:
    args.width, args.depth = 64, 6


def build() -> tuple[RoundPipe, optim.AdamW]:
    """Return the network, wrapped, and its optimizer. The first two layers are frozen."""
    torch.manual_seed(0)
    width = args.width
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(args.depth)]
    network = nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 1)).to(torch.bfloat16)
    network[:2].requires_grad_(False)
    config = RoundPipeRunConfig(num_microbatch=4, loss_reduction="mean")
    model = RoundPipe(network, optim_dtype=torch.float32, model_run_config=config)
    return model, optim.AdamW(model.optim_parameters(), lr=2e-3)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(outputs.float(), labels) / args.calls_per_step  # all calls have as many rows


def train(model: RoundPipe, optimizer: optim.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)  # the data of a step depend on its number alone
        loss = 0.0
        for _ in range(args.calls_per_step):
            points = torch.randn(32, 16, generator=generator)
            label = points.sum(dim=1, keepdim=True).tanh()
            loss += model.forward_backward((points.bfloat16(),), label=label, loss_fn=loss_fn).item()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        losses.append(loss)
    return losses


with tempfile.TemporaryDirectory() as folder:
    half = args.steps // 2
    model, optimizer = build()
    with model:
        losses = train(model, optimizer, range(half))
        checkpoint.save(f"{folder}/step-{half}", model, optimizer).wait()
        losses += train(model, optimizer, range(half, args.steps))
    model, optimizer = build()  # in practice a new process
    with model:
        checkpoint.load(checkpoint.latest(folder), model, optimizer)
        resumed = train(model, optimizer, range(half, args.steps))
for step, (loss, again) in enumerate(zip(losses[half:], resumed, strict=True), start=half + 1):
    print(f"step {step:3}  loss {loss:.6f}  resumed {again:.6f}")
if losses[half:] != resumed:
    raise SystemExit("the losses of the resumed run differ")
