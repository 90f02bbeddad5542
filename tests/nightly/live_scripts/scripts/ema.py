"""A moving average of the weights."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, average=average))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        if not model.failed:
            average.update_parameters(model.module)
        pace(run)
run.save()
end(run, model, average)
