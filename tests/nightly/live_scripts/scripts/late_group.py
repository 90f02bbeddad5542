"""The first layer is given to the optimizer from the second epoch on."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "had 1 param_groups"

elastic.init_process_group()
module = net()
model = DistributedDataParallel(module)
optimizer = torch.optim.Adam([param for layer in list(module)[1:] for param in layer.parameters()], lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    if loader.epoch == 1:
        optimizer.add_param_group({"params": module[0].parameters()})
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
