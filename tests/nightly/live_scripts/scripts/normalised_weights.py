"""Something else than the optimizer changes the weights after each step."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.div_(param.norm().clamp(min=1.0))
        pace(run)
run.save()
end(run, model)
