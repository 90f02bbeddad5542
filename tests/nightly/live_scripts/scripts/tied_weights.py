"""Two layers share a matrix."""

import torch
from torch import nn

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, WIDTH, end, loss_of, net, pace, samples


class Tied(nn.Module):
    """A network whose last matrix is its first one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = net(), nn.Linear(WIDTH, 16, bias=False)
        self.last.weight = self.first[0].weight

    def forward(self, inputs):
        return self.first(inputs) + self.last(inputs).mean(1, keepdim=True)


elastic.init_process_group()
model = DistributedDataParallel(Tied())
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
