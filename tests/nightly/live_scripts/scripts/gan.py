"""Two networks in one module, which step one after the other in each batch."""

import torch
from torch import nn

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, WIDTH, end, net, pace, samples

REFUSED = "2 reductions were made for the batch"


class Both(nn.Module):
    """A generator and a critic."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH), net()

    def forward(self, inputs, generates):
        return self.critic(self.generator(inputs) if generates else inputs)


elastic.init_process_group()
both = Both()
model = DistributedDataParallel(both)
optimizer = torch.optim.Adam(both.generator.parameters(), lr=1e-2)
second = torch.optim.Adam(both.critic.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, second=second))
while loader.epoch < EPOCHS:
    for inputs, _ in run.batches():
        model.zero_grad()
        (model(inputs, False) - model(inputs, True)).mean().backward()
        second.step()
        model.zero_grad()
        model(inputs, True).mean().backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
