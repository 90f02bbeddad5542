"""The last batch of an epoch has one sample, and ranks have shares of several sizes."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, BATCHES, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(BATCHES * BATCH - 4), global_batch_size=7)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for batch in run.batches():
        optimizer.zero_grad()
        if batch is None:
            model.skip()
        else:
            loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
