"""tensorboard's writer, which has a thread, beside DDP."""

import sys

import report
import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
with SummaryWriter(f"{sys.argv[1]}/board{dist.get_rank()}") as writer:
    for step in range(report.STEPS):
        loss = net(torch.randn(8, 4)).square().mean()
        loss.backward()
        writer.add_scalar("loss", loss.item(), step)
        report.step(step)
report.done()
del net
dist.destroy_process_group()
