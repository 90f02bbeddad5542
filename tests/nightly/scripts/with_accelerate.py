"""accelerate, its ``launch`` taken over by elastirun: the Accelerator saves and loads the state.

It trains on CPUs, or on GPUs with TEST_DEVICE=cuda.
"""

import os
import sys
from pathlib import Path

import report
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
accelerator = Accelerator(cpu=DEVICE == "cpu")
folder, net = Path(sys.argv[1]) / "state", torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
net, optimizer, data = accelerator.prepare(net, optimizer, DataLoader(TensorDataset(torch.randn(4000, 4)), batch_size=8))
device = next(net.parameters()).device
report.say(f"DEVICE {device} {torch.distributed.get_backend()}")
assert device.type == DEVICE, device
steps_done = torch.zeros(1, dtype=torch.long)


class Steps:
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"steps": steps_done}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        steps_done.copy_(state["steps"])


accelerator.register_for_checkpointing(Steps())
if (folder / "complete").exists():
    accelerator.load_state(str(folder))
for (batch,) in data:
    if steps_done >= report.STEPS:
        break
    loss = net(batch).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    steps_done += 1
    report.step(int(steps_done))
    if steps_done % 5 == 0 and not (folder / "complete").exists():
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()
        (folder / "complete").touch()
accelerator.end_training()
report.done()
