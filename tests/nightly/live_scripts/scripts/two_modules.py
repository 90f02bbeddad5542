"""Two modules that reduce."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "one DistributedDataParallel"

elastic.init_process_group()
model, second = DistributedDataParallel(net()), DistributedDataParallel(net())
optimizer = torch.optim.Adam([*model.parameters(), *second.parameters()], lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, second=second))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs) + second(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
