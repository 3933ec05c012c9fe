"""bf16 weights with a float32 optimizer, gradient accumulation, a checkpoint, and a resumed run with equal losses."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe import RoundPipe, RoundPipeRunConfig, optim

NUM_MICROBATCH = 4
CALLS_PER_STEP = 2  # calls whose gradients add up before one update
CHECKPOINT_STEP = 6
NUM_STEP = 12


def build() -> tuple[RoundPipe, optim.AdamW]:
    """The model to fine-tune (here a small random one) and its optimizer. The first two layers are frozen."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    network = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 1)).to(torch.bfloat16)
    network[:2].requires_grad_(False)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, loss_reduction="mean")
    model = RoundPipe(network, optim_dtype=torch.float32, model_run_config=config)
    return model, optim.AdamW(model.optim_parameters(), lr=1e-3)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(outputs.float(), labels) / CALLS_PER_STEP  # all calls have the same number of rows


def train(model: RoundPipe, optimizer: optim.AdamW, steps: range) -> list[float]:
    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = 0.0
        for _ in range(CALLS_PER_STEP):
            points = torch.randn(32, 16, generator=generator)
            label = points.sum(dim=1, keepdim=True).tanh()
            inputs = (points.to(torch.bfloat16),)
            loss += model.forward_backward(input_args=inputs, label=label, loss_fn=loss_fn).item()
        model.step(step_fn, is_async=False)
        losses.append(loss)
    model.synchronize()
    return losses


def save(path: Path, model: RoundPipe, optimizer: optim.AdamW) -> None:
    """Save weights, the optimizer's float32 copies and its moments: a resumed run needs all three to be exact."""
    copies = {name: copy.detach() for name, copy in model.optim_named_parameters()}
    torch.save({"model": model.state_dict(), "copies": copies, "optimizer": optimizer.state_dict()}, path)


def load(path: Path, model: RoundPipe, optimizer: optim.AdamW) -> None:
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    with torch.no_grad():
        for name, copy in model.optim_named_parameters():
            copy.copy_(checkpoint["copies"][name])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        model, optimizer = build()
        with model:
            train(model, optimizer, range(CHECKPOINT_STEP))
            save(path, model, optimizer)
            straight = train(model, optimizer, range(CHECKPOINT_STEP, NUM_STEP))
        model, optimizer = build()
        with model:
            load(path, model, optimizer)
            resumed = train(model, optimizer, range(CHECKPOINT_STEP, NUM_STEP))
    for step, (loss, again) in enumerate(zip(straight, resumed, strict=True), start=CHECKPOINT_STEP):
        print(f"step {step:3}  loss {loss:.6f}  resumed {again:.6f}")
    if straight != resumed:
        raise SystemExit("the losses of the resumed run differ")


if __name__ == "__main__":
    main()
