"""FSDP2 x data parallelism (HSDP): parameters, gradients and state of a replica are shared out over the ranks of "shard".

elastirun --nproc-per-node=4 --mesh=replicate=auto,shard=2 examples/mesh/fsdp.py
"""

import warnings

import torch
from common import Transformer, arguments, loss_of, train
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from elastirun.train import build_mesh

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # returns a view, as each linear layer does: nothing changes it in place


def main() -> None:
    args = arguments(__doc__)
    torch.distributed.init_process_group("gloo")
    mesh = build_mesh("replicate=auto,shard=2", device="cpu")
    model = Transformer()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def compute(x: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(x), targets)
        loss.backward()
        return loss.detach()

    train(args, mesh, mesh, model, compute)  # each rank has samples of its own


if __name__ == "__main__":
    main()
