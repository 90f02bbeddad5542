"""Tensor parallelism x data parallelism: the matrices of a replica are divided over the ranks of "tp".

elastirun --nproc-per-node=4 --mesh=dp=auto,tp=2 examples/mesh/tensor_parallel.py
"""

import torch
from common import Transformer, arguments, loss_of, split, train
from torch import Tensor

from elastirun.train import DistributedDataParallel, build_mesh


def main() -> None:
    args = arguments(__doc__)
    torch.distributed.init_process_group("gloo")
    mesh = build_mesh("dp=auto,tp=2", device="cpu")
    model = DistributedDataParallel(split(Transformer(), mesh["tp"]), device_mesh=mesh["dp"])

    def compute(x: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(x), targets)
        loss.backward()  # the gradients are the mean over "dp"
        return loss.detach()

    train(args, mesh, mesh["dp"], model, compute)


if __name__ == "__main__":
    main()
