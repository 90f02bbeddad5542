"""Each batch is loaded before the one before it is used."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "no reduction was made for the batch"


def ahead(batches):
    """Yield each batch when the next one is there."""
    before = next(batches, None)
    while before is not None:
        following = next(batches, None)
        yield before
        before = following


elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in ahead(run.batches()):
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
