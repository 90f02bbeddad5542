"""The loader of torchdata."""

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from elastirun.train import DistributedDataParallel, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, net, samples

NEEDS = "torchdata"
REFUSED = "one ElasticDataLoader"

elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = StatefulDataLoader(samples(), batch_size=BATCH)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader))
