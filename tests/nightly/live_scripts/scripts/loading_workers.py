"""The loader has a process of its own."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH, num_workers=1)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
