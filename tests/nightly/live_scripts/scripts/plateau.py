"""A learning rate that falls when the loss over all data does not."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
whole = samples().tensors
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, scheduler=scheduler))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
    with torch.no_grad():
        scheduler.step(loss_of(model.module(whole[0]), whole[1]).item())
run.save()
end(run, model)
