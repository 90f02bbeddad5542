"""Train a small network on handwritten digits with any number of workers, which may change at any moment.

    python examples/train.py                                       one process, no launcher
    torchrun  --standalone --nproc-per-node=2 examples/train.py    the usual launcher
    elastirun --standalone --nproc-per-node=2 examples/train.py    this project's
    elastirun --nnodes=1:3 --nproc-per-node=2 --rdzv-id=digits --rdzv-endpoint=HOST:29400 examples/train.py
                                                                   the same on each of one to three nodes

It may be killed at any time and started again with another number of workers: it goes on with the newest checkpoint, sees each image
once per epoch, and uses 64 images per step at any world size. With --deterministic the weights are the same to the last bit, too. A second
run goes on where the first one stopped, because the directory of the checkpoints is fixed. The data are the 1,797 images of 8 x 8 pixels
that come with scikit-learn. See also train_torch.py.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

from elastirun.train import Checkpointer, DeterministicShards, DistributedDataParallel, Drain, ElasticDataLoader, TrainState


def main() -> None:
    args = parse()
    device = join_workers(args.device)
    training, held_out = digits()
    torch.manual_seed(0)
    if args.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without, cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(True)
    module = make_model().to(device)
    model = DeterministicShards(module) if args.deterministic else DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    loader = ElasticDataLoader(training, global_batch_size=args.batch)
    run = TrainState(model=module, optimizer=optimizer, data=loader)
    checkpoints, drain = Checkpointer(args.checkpoint, every=args.every), Drain(model)

    step = checkpoints.restore(run)
    begin = "from scratch, checkpoints in" if step is None else f"going on after step {step} of"
    say(f"{dist.get_world_size()} worker{'s' * (dist.get_world_size() > 1)} on {device.type}: {begin} {args.checkpoint}")
    if loader.epoch >= args.epochs:
        say("there was nothing left to do; to train again, remove the checkpoints or name another directory")
    for epoch in range(loader.epoch, args.epochs):
        total = torch.zeros(2, device=device)  # sum of the losses, images; those before a restart do not count
        for batches in loader.steps(model):
            optimizer.zero_grad()
            for images, labels in batches:
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                total += torch.stack([loss.detach() * len(labels), total.new_tensor(len(labels))])
            optimizer.step()
            run.step += 1
            checkpoints.save(run.step, run, now=drain.now)
            if drain.now:  # SIGTERM: this node leaves, or the number of nodes changes. All ranks stop after the same step
                say(f"all workers stop after step {run.step}")
                checkpoints.close(0.8 * drain.seconds_left)
                drain.leave()
            time.sleep(args.pause)
        dist.all_reduce(total)
        percent, world = accuracy(module, held_out, device), dist.get_world_size()
        say(f"epoch {epoch + 1:3d}/{args.epochs}  loss {total[0] / total[1]:.4f}  accuracy {percent:5.2f} %  world size {world}")
    checkpoints.save(run.step, run, now=True)
    checkpoints.close()
    say(f"test accuracy {accuracy(module, held_out, device):.1f} %")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all workers together")
    parser.add_argument("--checkpoint", default="runs/digits", help="directory that all nodes share: where to save and resume")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="sleep so many seconds in each step, for demonstrations")
    parser.add_argument("--deterministic", action="store_true", help="end with the same bits at any number of workers; slower")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda when there is a GPU for each worker")
    return parser.parse_args()


def join_workers(wanted: str) -> torch.device:
    """Make the process group from the launcher's environment, or a group of one without a launcher, and return the device."""
    local_rank, local_workers = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = wanted == "cuda" or (wanted == "auto" and torch.cuda.device_count() >= local_workers)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    if gpu:
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank) if gpu else torch.device("cpu")


def digits() -> tuple[Dataset, Dataset]:
    """Return training images with labels, and held-out ones that are never trained on. The split is the same in every worker."""
    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16.0, torch.tensor(found.target)
    training, held_out = random_split(TensorDataset(images, labels), [1347, 450], torch.Generator().manual_seed(0))
    return training, held_out


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Dataset, device: torch.device) -> float:
    """Return the percentage of images that the model classifies correctly. Each image counts once, on one rank."""
    found = torch.zeros(2, device=device)
    for batch in ElasticDataLoader(images, global_batch_size=256, shuffle=False):
        if batch is not None:
            right = model(batch[0].to(device)).argmax(dim=1).cpu() == batch[1]
            found += found.new_tensor([right.sum(), len(right)])
    dist.all_reduce(found)
    return 100.0 * float(found[0] / found[1])


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
