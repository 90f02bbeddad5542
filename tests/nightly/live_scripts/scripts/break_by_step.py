"""The loop ends in the middle of an epoch by the number of steps."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while run.step < 190:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
        if run.step + 1 == 190:
            break
run.save()
end(run, model)
