"""Rank 0 writes scalars."""

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, FOLDER, end, loss_of, net, pace, samples

NEEDS = "tensorboard"

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
writer = SummaryWriter(str(FOLDER / "scalars"))
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        pace(run)
        if dist.get_rank() == 0 and run.counts:
            writer.add_scalar("loss", loss.item(), run.step)
run.save()
writer.close()
end(run, model)
