"""One rank passes over a batch in which an exception came."""

import torch
import torch.distributed as dist

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "no reduction was made for the batch"

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        try:
            if run.step % 10 == 9 and dist.get_rank() == 1:
                raise ValueError("a bad sample")
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
        except ValueError:
            pace(run)
            continue
        optimizer.step()
        pace(run)
run.save()
end(run, model)
