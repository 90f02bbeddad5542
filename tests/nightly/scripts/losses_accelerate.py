"""accelerate with gradient accumulation; the Accelerator saves and loads its state."""

import sys
from pathlib import Path

import losses
import report
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.utils.data import DataLoader

accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
)
net = losses.net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
net, optimizer, data = accelerator.prepare(net, optimizer, DataLoader(losses.data(), batch_size=losses.BATCH))
losses.wrapped(net)
saved = sorted(Path(sys.argv[1]).glob("epoch-*/complete"))
if saved:
    accelerator.load_state(str(saved[-1].parent))
for epoch in range(len(saved), losses.STEPS // losses.EPOCH):
    for at, (batch,) in enumerate(data, 1):
        with accelerator.accumulate(net):
            loss = net(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.loss(epoch * losses.EPOCH + at, loss.item())
    folder = Path(sys.argv[1]) / f"epoch-{epoch}"
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    (folder / "complete").touch()
accelerator.end_training()
report.done()
