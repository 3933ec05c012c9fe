"""Train a residual network with BatchNorm. An nn.Sequential is split at its children, without further work.

python examples/image_classifier.py --data images.pt     # torch.save({"images": uint8[N, 3, H, W], "labels": int64[N]})
python examples/image_classifier.py --tiny
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundpipe import RoundPipe, RoundPipeRunConfig, optim

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="file with images and labels; one tenth is held out")
parser.add_argument("--width", type=int, default=256, help="channels")
parser.add_argument("--depth", type=int, default=32, help="residual blocks")
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--num-microbatch", type=int, default=4)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", default="classifier.pt", help="file for the trained weights")
parser.add_argument("--tiny", action="store_true", help="train a tiny network on toy images")
args = parser.parse_args()
if not args.tiny and not args.data:
    parser.error("give --data or --tiny")

torch.manual_seed(0)
if args.tiny:  # the class of an image is the channel that is brighter than the others
    parser.set_defaults(width=8, depth=3, batch=40, epochs=2)
    args = parser.parse_args()
    labels = torch.randint(3, (400,))
    images = torch.randint(100, (400, 3, 8, 8)) + 60 * nn.functional.one_hot(labels, 3)[:, :, None, None]
else:
    loaded = torch.load(args.data)
    images, labels = loaded["images"], loaded["labels"]
images = images.float() / 255
num_train = len(images) * 9 // 10


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, image: Tensor) -> Tensor:
        return image + self.norm(self.conv(image)).relu()


head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(args.width, int(labels.max()) + 1))
network = nn.Sequential(
    nn.Conv2d(3, args.width, 3, padding=1), *(Residual(args.width) for _ in range(args.depth)), head
)

# BatchNorm normalizes each microbatch alone and updates its running statistics once per microbatch, in order, as a
# plain loop over the microbatches does. So the number of microbatches is fixed here: it is part of what is computed.
config = RoundPipeRunConfig(num_microbatch=args.num_microbatch, loss_reduction="mean")
losses, generator = [], torch.Generator().manual_seed(0)
with RoundPipe(network, model_run_config=config) as model:
    optimizer = optim.AdamW(model.optim_parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        for rows in torch.randperm(num_train, generator=generator).split(args.batch):
            loss = model.forward_backward((images[rows],), label=labels[rows], loss_fn=cross_entropy)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            losses.append(loss.item())
        model.eval()  # BatchNorm now uses its running statistics
        with torch.no_grad():
            guesses = model(images[num_train:]).argmax(dim=1)
        model.train()
        accuracy = (guesses == labels[num_train:]).float().mean().item()
        print(f"epoch {epoch + 1:3}  loss {losses[-1]:.4f}  held-out accuracy {accuracy:.3f}")
    torch.save(model.state_dict(), args.out)  # the keys of the plain network
