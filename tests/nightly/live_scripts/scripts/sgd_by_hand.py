"""An optimizer that was written by hand."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples


class Descent(torch.optim.Optimizer):
    """Gradient descent with momentum."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad)
                    param.sub_(momentum, alpha=group["lr"])


elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = Descent(model.parameters())
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
