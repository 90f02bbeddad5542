"""The statistics of a batch are those of all ranks, which torch computes on GPUs alone."""

import torch
from torch import nn

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "SyncBatchNorm expected input tensor to be on"

elastic.init_process_group()
model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(net(), nn.BatchNorm1d(1))))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
