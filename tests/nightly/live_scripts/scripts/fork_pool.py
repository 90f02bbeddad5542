"""A pool of forks prepares each batch."""

import multiprocessing

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples


def doubled(values):
    """Return the values of a sample times two."""
    return [2 * value for value in values]


pool = multiprocessing.get_context("fork").Pool(1)
elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        inputs = torch.tensor(pool.map(doubled, inputs.tolist()))
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
pool.terminate()
end(run, model)
