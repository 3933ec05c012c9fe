"""Train a U-Net to segment images. Skip connections are no obstacle: the module's own forward is split at its blocks.

python examples/unet.py --data scenes.pt      # torch.save({"images": float[N, 1, H, W], "masks": float[N, 1, H, W]})
python examples/unet.py --tiny
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, interpolate

from roundpipe import RoundPipeRunConfig, optim, wrap_model_to_roundpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="file with images and masks; H and W are multiples of 8")
parser.add_argument("--width", type=int, default=128, help="channels of the first block")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", default="unet.pt", help="file for the trained weights")
parser.add_argument("--tiny", action="store_true", help="train a tiny network on toy scenes")
args = parser.parse_args()
if not args.tiny and not args.data:
    parser.error("give --data or --tiny")

torch.manual_seed(0)
if args.tiny:  # find the bright square in noise
    parser.set_defaults(width=4, batch=16, epochs=4)
    args = parser.parse_args()
    masks = torch.zeros(64, 1, 16, 16)
    for mask, (top, left) in zip(masks, torch.randint(10, (64, 2)), strict=True):
        mask[:, top : top + 6, left : left + 6] = 1
    images = masks + 0.5 * torch.randn_like(masks)
else:
    loaded = torch.load(args.data)
    images, masks = loaded["images"], loaded["masks"]


class Block(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels_out)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(self.conv(image)).relu()


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(1, width), Block(width, 2 * width), Block(2 * width, 4 * width)])
        self.middle = Block(4 * width, 4 * width)
        self.up = nn.ModuleList([Block(8 * width, 2 * width), Block(4 * width, width), Block(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            skipped.append(block(image))
            image = avg_pool2d(skipped[-1], 2)
        image = self.middle(image)
        for block in self.up:
            image = block(torch.cat([interpolate(image, scale_factor=2.0), skipped.pop()], dim=1))
        return self.head(image)


# With example inputs RoundPipe runs the forward once, finds the blocks and makes layers of them.
network, config = UNet(args.width), RoundPipeRunConfig(num_microbatch=4, loss_reduction="mean")
losses, generator = [], torch.Generator().manual_seed(0)
with wrap_model_to_roundpipe(network, example_inputs={"image": images[:2]}, model_run_config=config) as model:
    optimizer = optim.AdamW(model.optim_parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        for rows in torch.randperm(len(images), generator=generator).split(args.batch):
            loss = model.forward_backward((images[rows],), {}, masks[rows], binary_cross_entropy_with_logits)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            losses.append(loss.item())
        print(f"epoch {epoch + 1:3}  loss {losses[-1]:.4f}")
    torch.save(model.state_dict(), args.out)  # the keys of the plain network
