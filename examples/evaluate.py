"""Inference: eval mode, no gradients, forward() over a test set, and one batch returned as microbatches."""

import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig

torch.manual_seed(0)
network = nn.Sequential(
    nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
test_set = [(torch.randn(50, 32), torch.randint(10, (50,))) for _ in range(8)]

with RoundPipe(network, model_run_config=RoundPipeRunConfig(num_microbatch=4)) as model:
    model.eval()  # turns dropout off, as in the plain module
    num_correct = num_seen = 0
    with torch.no_grad():
        for points, labels in test_set:
            scores = model(points)  # split into microbatches, computed on the devices, merged
            num_correct += int((scores.argmax(dim=1) == labels).sum())
            num_seen += len(labels)
        unmerged = model(points, roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
        unmerged.synchronize()

print(f"accuracy of the untrained network: {num_correct / num_seen:.3f} over {num_seen} points")
print(f"unmerged, the last batch has microbatches of {[len(scores) for scores in unmerged]} points")
