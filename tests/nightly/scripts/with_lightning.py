"""Lightning's Trainer, DDP, a DataLoader with workers, resumed from its last checkpoint.

It trains on CPUs, or on GPUs with TEST_DEVICE=cuda.
"""

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import report
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

DEVICE = os.environ.get("TEST_DEVICE", "cpu")


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self) -> None:
        report.say(f"DEVICE {self.layer.weight.device} {torch.distributed.get_backend()}")
        assert self.layer.weight.device.type == DEVICE, self.layer.weight.device

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        report.step(self.global_step)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    atexit.register(gc.freeze)  # the interpreter's last collection over 390,000 objects costs seconds, see docs/frameworks.md
    folder = Path(sys.argv[1])
    data = DataLoader(TensorDataset(torch.randn(4000, 4)), batch_size=8, num_workers=1, persistent_workers=True)
    last = folder / "last.ckpt"
    trainer = L.Trainer(
        accelerator=DEVICE,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=report.STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=5)],
    )
    trainer.fit(Net(), data, ckpt_path=last if last.exists() else None)
    report.done()
