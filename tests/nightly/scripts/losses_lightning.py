"""Lightning's Trainer, with automatic or manual optimization; a checkpoint after each epoch."""

import os
import sys
from pathlib import Path
from typing import Any

import losses
import report
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = losses.net()
        self.automatic_optimization = sys.argv[2] == "automatic"

    def on_train_start(self) -> None:
        losses.wrapped(self.trainer.strategy.model)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        losses.loss(self.global_step + 1, loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    last = Path(sys.argv[1]) / "last.ckpt"
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=losses.STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=last.parent, save_last=True, every_n_epochs=1)],
    )
    trainer.fit(Net(), DataLoader(losses.data(), batch_size=losses.BATCH), ckpt_path=last if last.exists() else None)
    report.done()
