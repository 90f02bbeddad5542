"""Micro-batches by ``run.steps()``."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH, micro_batch_size=3)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for step in run.steps():
        optimizer.zero_grad()
        for inputs, targets in step:
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
