"""An optimizer that computes the gradients several times."""

from functools import partial

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "reductions were made for the batch"


def closure(inputs, targets):
    """Return the loss of a batch."""
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    return loss


elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.step(partial(closure, inputs, targets))
        pace(run)
run.save()
end(run, model)
