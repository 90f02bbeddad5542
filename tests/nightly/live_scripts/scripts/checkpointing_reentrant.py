"""Activations are computed again in the backward, re-entrant."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples


class Checkpointed(nn.Module):
    """A network that keeps no activations."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, inputs):
        return checkpoint(self.net, inputs.requires_grad_(), use_reentrant=True)


elastic.init_process_group()
model = DistributedDataParallel(Checkpointed())
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
