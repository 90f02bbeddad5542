"""Scaled gradients whose scaler steps in a dropped step, too: all end, and begin from the checkpoint."""

import torch

from elastirun.train import Checkpointer, DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, FOLDER, end, loss_of, net, pace, samples

TOLERANCE = 5e-2

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
scaler = torch.amp.GradScaler("cpu")
run = elastic.Elastic(
    TrainState(model=model, optimizer=optimizer, data=loader, scaler=scaler),
    lambda: Checkpointer(str(FOLDER / "checkpoints"), every=5),
)
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        pace(run)
run.save()
end(run, model)
