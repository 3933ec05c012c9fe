"""What `roundpipe doctor` finds on a real GPU."""

from __future__ import annotations

import torch

from roundpipe.cli.machine import examine
from roundpipe.devices import cuda


def test_every_gpu_is_described_and_measured() -> None:
    machine = examine()
    assert len(machine.gpus) == torch.cuda.device_count()
    assert machine.cuda_error is None
    for index, gpu in enumerate(machine.gpus):
        assert gpu.error is None
        assert gpu.facts is not None
        assert gpu.facts.name == torch.cuda.get_device_name(index)
        assert gpu.facts.memory_bytes == torch.cuda.mem_get_info(index)[1]
        assert gpu.facts.capability == "{}.{}".format(*torch.cuda.get_device_capability(index))
        assert gpu.can_pin is True
        assert gpu.upload_bytes_per_s is not None
        assert gpu.download_bytes_per_s is not None
        assert min(gpu.upload_bytes_per_s, gpu.download_bytes_per_s) > 1e8, "no link is slower than PCIe 1.0 x1"


def test_a_gpu_that_works_gives_no_reason_against_cuda() -> None:
    assert cuda.why_cuda_fails() is None
    assert cuda.cuda_release() == torch.version.cuda
