"""DataLoader workers of one start method (the second argument) beside DDP."""

import sys

import report
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    data = DataLoader(TensorDataset(torch.randn(report.STEPS * 8, 4)), batch_size=8, num_workers=2, multiprocessing_context=sys.argv[2])
    for number, (batch,) in enumerate(data):
        net(batch).square().mean().backward()
        report.step(number)
    report.done()
    del net
    dist.destroy_process_group()
