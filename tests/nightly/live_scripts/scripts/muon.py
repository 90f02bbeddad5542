"""Muon for the matrices, which rounds to bfloat16, and Adam for the rest."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

TOLERANCE = 2e-2

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Muon([param for param in model.parameters() if param.ndim == 2], lr=1e-3)
other = torch.optim.Adam([param for param in model.parameters() if param.ndim != 2], lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, other=other))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        model.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        other.step()
        pace(run)
run.save()
end(run, model)
