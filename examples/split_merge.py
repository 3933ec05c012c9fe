"""Custom split and merge: bags of different sizes, packed into one tensor without padding.
RoundPipe splits tensors along their first dimension. Here this would cut bags apart.

python examples/split_merge.py --data bags.pt     # torch.save([{"items": float[N, F], "label": float[]}, ...])
python examples/split_merge.py --tiny
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from roundpipe import RoundPipe, RoundPipeRunConfig, optim
from roundpipe.microbatch import Chunk, Reducer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="file with a list of bags")
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch", type=int, default=64, help="bags per step")
parser.add_argument("--tiny", action="store_true", help="train a tiny network on toy bags")
args = parser.parse_args()
if not args.tiny and not args.data:
    parser.error("give --data or --tiny")
torch.manual_seed(0)
if args.tiny:  # bags of 1 to 9 items; the label is the mean of the items' first number
    args.width, args.batch = 16, 16
    bags = [torch.randn(size, 4) for size in torch.randint(1, 10, (480,)).tolist()]
    bags = [{"items": items, "label": items[:, 0].mean()} for items in bags]
else:
    bags = torch.load(args.data)
Packed = tuple[Tensor, Tensor]  # all items, and the number of items of each bag


class ItemLayer(nn.Linear):  # a layer passes one value to the next; a tuple is one value
    def forward(self, packed: Packed) -> Packed:
        return super().forward(packed[0]).tanh(), packed[1]


class BagScore(nn.Linear):
    def forward(self, packed: Packed) -> dict[str, Tensor]:
        items, sizes = packed
        bag_of_item = torch.arange(len(sizes), device=items.device).repeat_interleave(sizes)
        sums = items.new_zeros(len(sizes), items.shape[1]).index_add(0, bag_of_item, items)
        return {"scores": super().forward(sums / sizes.unsqueeze(1)).squeeze(1), "largest_bag": sizes.max()}


def split_input(args: tuple[Packed], kwargs: dict, num_microbatch: int) -> tuple[list, list]:
    """Return the args and the kwargs of each microbatch, which has whole bags."""
    ((items, sizes),) = args
    parts = sizes.tensor_split(num_microbatch)
    packed = zip(items.split([int(part.sum()) for part in parts]), parts, strict=True)
    return [(part,) for part in packed], [{} for _ in parts]


def loss_fn(outputs: dict[str, Tensor], label: Tensor) -> Tensor:
    return mse_loss(outputs["scores"], label)


config = RoundPipeRunConfig(
    num_microbatch=4,
    loss_reduction="mean",  # over bags
    split_input=split_input,
    split_label=lambda label, num_microbatch: label.tensor_split(num_microbatch),  # at the same bags
    merge_output={"scores": Chunk(0), "largest_bag": Reducer(torch.tensor(0), torch.maximum)},
)
widths = [bags[0]["items"].shape[1], args.width, args.width]
network = nn.Sequential(*(ItemLayer(width, args.width) for width in widths), BagScore(args.width, 1))
losses = []
with RoundPipe(network, model_run_config=config) as model:
    optimizer = optim.AdamW(model.optim_parameters(), lr=1e-2)
    for step in range(len(bags) // args.batch):
        batch = bags[step * args.batch : (step + 1) * args.batch]
        packed = torch.cat([bag["items"] for bag in batch]), torch.tensor([len(bag["items"]) for bag in batch])
        label = torch.stack([bag["label"] for bag in batch])
        loss, outputs = model.forward_backward((packed,), {}, label, loss_fn, return_outputs=True)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        losses.append(loss.item())
        print(f"step {step + 1:5}  loss {losses[-1]:.4f}  largest bag {outputs['largest_bag']}")
