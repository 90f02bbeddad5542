"""A loader with a position of its own beside ours: nothing brings it back in a dropped step."""

import torch
from torch.utils.data import DataLoader

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples

REFUSED = "cannot bring back .second."


class Stateful(DataLoader):
    """A loader that knows how far it is."""

    at = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.at += 1
            yield batch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


elastic.init_process_group()
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
second = Stateful(samples(), batch_size=BATCH)
others = iter(second)
run = elastic.Elastic(TrainState(model=model, optimizer=optimizer, data=loader, second=second))
while loader.epoch < EPOCHS:
    for inputs, targets in run.batches():
        optimizer.zero_grad()
        more = next(others, None)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        pace(run)
run.save()
end(run, model)
