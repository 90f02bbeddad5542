"""The loop is in a class."""

import torch

from elastirun.train import DistributedDataParallel, ElasticDataLoader, TrainState, elastic
from tests.nightly.live_scripts.shared import BATCH, EPOCHS, end, loss_of, net, pace, samples


class Trainer:
    """Holds model, optimizer and loader."""

    def __init__(self, module):
        self.model = DistributedDataParallel(module)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.loader = ElasticDataLoader(samples(), global_batch_size=BATCH)
        self.run = elastic.Elastic(TrainState(model=self.model, optimizer=self.optimizer, data=self.loader))

    def fit(self):
        """Train all epochs."""
        while self.loader.epoch < EPOCHS:
            for batch in self.run.batches():
                self.step(*batch)
        self.run.save()

    def step(self, inputs, targets):
        """Make one step."""
        self.optimizer.zero_grad()
        loss_of(self.model(inputs), targets).backward()
        self.optimizer.step()
        pace(self.run)


elastic.init_process_group()
trainer = Trainer(net())
trainer.fit()
end(trainer.run, trainer.model)
