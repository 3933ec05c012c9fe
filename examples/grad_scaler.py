"""Train float16 weights with loss scaling, clipping and a schedule; a float32 copy of the weights is optimized.

python examples/grad_scaler.py --data points.pt     # torch.save({"points": float[N, F], "labels": int64[N]})
python examples/grad_scaler.py --tiny
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, clip_grad_norm_, optim

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="file with points and labels")
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--depth", type=int, default=32)
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--growth-interval", type=int, default=2000, help="steps after which the loss scale doubles")
parser.add_argument("--tiny", action="store_true", help="train a tiny network on toy points")
args = parser.parse_args()
if not args.tiny and not args.data:
    parser.error("give --data or --tiny")

torch.manual_seed(0)
if args.tiny:  # the label says which of the first four numbers is the largest
    parser.set_defaults(width=32, depth=4, batch=64, steps=40, growth_interval=10)
    args = parser.parse_args()
    points = torch.randn(512, 8)
    labels = points[:, :4].argmax(dim=1)
else:
    loaded = torch.load(args.data)
    points, labels = loaded["points"], loaded["labels"]

blocks = [
    nn.Sequential(nn.Linear(args.width, args.width), nn.LayerNorm(args.width), nn.GELU()) for _ in range(args.depth)
]
ends = nn.Linear(points.shape[1], args.width), nn.Linear(args.width, int(labels.max()) + 1)
network = nn.Sequential(ends[0], *blocks, ends[1]).half()

config = RoundPipeRunConfig(num_microbatch=4, loss_reduction="mean")
model = RoundPipe(network, optim_dtype=torch.float32, model_run_config=config)
optimizer = optim.AdamW(model.optim_parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
scaler = GradScaler(growth_interval=args.growth_interval)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:  # runs on the device, once per microbatch
    return scaler.scale(cross_entropy(outputs.float(), labels))


def step_fn() -> None:  # runs on the optimizer thread
    scaler.unscale_(optimizer)
    clip_grad_norm_(model, max_norm=1.0)
    scaler.step(optimizer)  # skips the update if a gradient is infinite or NaN; the scale is then halved
    schedule.step()
    optimizer.zero_grad()


losses, scales = [], []
for step in range(args.steps):
    rows = torch.randint(len(points), (args.batch,))
    scales.append(scaler.get_scale())
    loss = model.forward_backward((points[rows].half(),), label=labels[rows], loss_fn=loss_fn)
    model.step(step_fn, is_async=False)
    scaler.update()  # in the loop, not in step_fn
    losses.append(loss.item() / scales[-1])
    if step % 5 == 4:
        print(f"step {step + 1:5}  loss {losses[-1]:.4f}  scale {scales[-1]:.0f}")
model.close()
