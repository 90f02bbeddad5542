"""A learning rate that changes after each step."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, BATCHES, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, EPOCHS * BATCHES)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, scheduler=scheduler))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        pace(run)
run.save()
end(run, model)
