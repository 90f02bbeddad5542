"""torch.compile beside DDP, from an empty cache: inductor compiles in processes of its own."""

import os
import sys

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1] + "/cache" + os.environ["RANK"] + os.environ["ELASTIRUN_ROUND"]

import report  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._inductor import config  # noqa: E402

if __name__ == "__main__":
    config.compile_threads = 2
    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    net = torch.compile(torch.nn.parallel.DistributedDataParallel(layers))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(report.STEPS):
        loss = net(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report.step(step)
    report.done()
    del net
    dist.destroy_process_group()
