"""A complete training loop: half-precision weights, GradScaler, clipping and a learning-rate schedule."""

import torch
from torch import nn
from torch.nn import functional

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, optim

NUM_MICROBATCH = 4
NUM_STEP = 60

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(6)]
network = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 4)).to(torch.bfloat16)

model = RoundPipe(
    network,
    optim_dtype=torch.float32,  # the optimizer keeps a float32 copy of every weight
    # Means over the rows of microbatches become the mean over the batch, even if microbatches differ in size.
    model_run_config=RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, loss_reduction="mean"),
)
optimizer = optim.AdamW(model.optim_parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEP)
scaler = GradScaler(init_scale=2.0**10)


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return scaler.scale(functional.cross_entropy(outputs.float(), labels))


def step_fn() -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm=1.0)
    scaler.step(optimizer)
    schedule.step()
    optimizer.zero_grad()


for step in range(NUM_STEP):
    points = torch.randn(64, 16)
    labels = points[:, :4].argmax(dim=1)  # index of the largest of the first four numbers
    scale = scaler.get_scale()
    loss = model.forward_backward(input_args=(points.to(torch.bfloat16),), label=labels, loss_fn=loss_fn)
    model.step(step_fn)  # returns at once; the update runs during the next iteration
    scaler.update()
    if step % 10 == 0 or step == NUM_STEP - 1:
        print(f"step {step:3}  loss {loss.item() / scale:.4f}")

model.synchronize()
model.close()
