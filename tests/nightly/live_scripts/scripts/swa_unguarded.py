"""Averages that are updated in a dropped step, too."""

import torch
from torch.optim.swa_utils import SWALR, AveragedModel

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

WARNED = "state.s average changed in step"

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
average = AveragedModel(model.module)
scheduler = SWALR(optimizer, swa_lr=5e-3, anneal_epochs=20)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, scheduler=scheduler, average=average))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        if loader.epoch >= 1:
            average.update_parameters(model.module)
            scheduler.step()
        pace(run)
run.save()
end(run, model)
