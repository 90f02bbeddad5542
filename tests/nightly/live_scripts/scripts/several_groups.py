"""Groups of parameters with rates of their own."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

elastic.init_process_group()
model = DistributedDataParallel(net())
layers = model.module
optimizer = torch.optim.Adam([{"params": layers[0].parameters(), "lr": 5e-3}, {"params": layers[2].parameters()}], lr=2e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.99**step, lambda step: 0.97**step])
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
