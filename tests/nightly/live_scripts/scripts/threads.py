"""Threads print, and read the parameters."""

import threading
import time

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples


def look():
    """Print the sum of the parameters again and again."""
    while True:
        print("sum", sum(param.sum().item() for param in model.parameters()), flush=True)
        time.sleep(0.2)


elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
for _ in range(3):
    threading.Thread(target=look, daemon=True).start()
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
