"""wandb without a network, beside DDP: it starts a process of its own in each worker."""

import os
import sys

import report
import torch
import torch.distributed as dist
import wandb

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
run = wandb.init(mode="offline", project="nightly", dir=sys.argv[1], settings=wandb.Settings(console="off"))
for step in range(report.STEPS):
    loss = net(torch.randn(8, 4)).square().mean()
    loss.backward()
    run.log({"loss": loss.item(), "round": int(os.environ["ELASTIRUN_ROUND"])})
    report.step(step)
run.finish()
report.done()
del net
dist.destroy_process_group()
