"""Distributed checkpoints of a model sharded by FSDP2, loaded again by another round."""

import os
import sys
from pathlib import Path

import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
for layer in net:
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
newest = max((int(path.parent.name) for path in Path(sys.argv[1]).glob("*/.metadata")), default=0)
if newest:
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=f"{sys.argv[1]}/{newest}")
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
for step in range(newest + 1, report.STEPS + 1):
    net(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    report.step(step)
    if step % 20 == 0:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{sys.argv[1]}/{step}")
report.done()
dist.destroy_process_group()
os._exit(0)  # torch 2.13 may abort at the interpreter's end while the sharded model still holds gloo's threads (pytorch issue 190489)
