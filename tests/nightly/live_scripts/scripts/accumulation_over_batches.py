"""Gradients of two batches make one step."""

import contextlib

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "no reduction was made for the batch"

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for at, (inputs, targets) in enumerate(run.batches()):
        with contextlib.nullcontext() if at % 2 else model.no_sync():
            loss_of(model(inputs), targets).backward()
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()
        pace(run)
run.save()
end(run, model)
