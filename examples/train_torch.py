"""Train as examples/train.py does, with nothing but torch: its data-parallel class, one checkpoint per epoch, shares of a random order.

    elastirun --standalone --nproc-per-node=2 examples/train_torch.py

An elastic script may be stopped at any time and started again with another RANK and WORLD_SIZE. So it saves a checkpoint at the
end of each epoch, begins by loading the checkpoint, and derives everything else from (epoch, rank, world size). Read it from top to
bottom: set-up, data, model, checkpoint, training.

A second run continues where the first one stopped, because the checkpoint's path is an argument with a fixed default. The path must
not contain the run id: without --rdzv-id a launcher makes a new one for each run.

The data are the 1,797 images of 8 x 8 pixels that come with scikit-learn (UCI's "optical recognition of handwritten digits").
"""

import argparse
import io
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported before the process group exists, so that it keeps no reference to it; see the end of main
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastirun.train import is_current

HELD_OUT = 450  # images for the test, a quarter of all; never trained on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all workers together")
    parser.add_argument("--checkpoint", type=Path, default="runs/digits_torch.pt", help="where to save and resume: on a disk of all nodes")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="sleep so many seconds in each step, for demonstrations")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda when there is a GPU for each worker")
    return parser.parse_args()


def join_workers(wanted: str) -> torch.device:
    """Make the process group from the launcher's environment, or a group of one without a launcher, and return the device."""
    local_rank, local_workers = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough = torch.cuda.device_count() >= local_workers
    kind = wanted if wanted != "auto" else "cuda" if enough else "cpu"
    backend = "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


def load_images(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, then held-out images and labels. The split is the same in every worker."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return images[train], labels[train], images[test], labels[test]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def save(path: Path, state: dict[str, object]) -> None:
    """Replace the checkpoint atomically: after a crash at any moment the old or the new one is on the disk, complete.

    A node that was partitioned may not know yet that the others have continued without it. Its checkpoint must not replace theirs.
    """
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")  # unique, so that two writers cannot mix
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if not is_current(timeout=60.0):
        temporary.unlink()
        raise RuntimeError("another round has taken the place of this one; its checkpoint is not published")
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name, too
    os.close(folder)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Load the checkpoint, if there is one, and return the number of epochs done.

    Rank 0 reads the file and broadcasts its bytes, so that all ranks start from the same one, whatever their own disks hold.
    """
    data = path.read_bytes() if dist.get_rank() == 0 and path.exists() else b""
    size = torch.tensor(len(data), device=device)
    dist.broadcast(size, src=0)
    if not size:
        return 0
    buffer = bytearray(data or int(size))
    content = torch.frombuffer(buffer, dtype=torch.uint8)
    sent = content.to(device)
    dist.broadcast(sent, src=0)  # as bytes: received objects would be unpickled, and a pickle can run any code
    content.copy_(sent)
    state = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])  # moves its tensors to the parameters' device
    return int(state["epoch"])


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, epoch: int, args: argparse.Namespace
) -> float:
    """Train on every training image once, and return the mean loss.

    The batches of an epoch are the same for any number of workers: each worker takes every n-th image of a batch. Its loss is the sum
    over its images. DDP averages gradients over the workers, so the factor ``world / len(indices)`` gives the mean over the batch.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    total = torch.zeros((), device=images.device)
    for indices in order.split(args.batch):
        mine = indices[rank::world].to(images.device)
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        optimizer.zero_grad()
        (loss * world / len(indices)).backward()
        optimizer.step()
        total += loss.detach()
        time.sleep(args.pause)
    dist.all_reduce(total)
    return total.item() / len(images)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the percentage of images that the model classifies correctly. Each image is counted once, by one worker."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right = (model(images[rank::world]).argmax(dim=1) == labels[rank::world]).sum()
    dist.all_reduce(right)
    return 100.0 * right.item() / len(images)


def main() -> None:
    args = parse()
    device = join_workers(args.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    train_images, train_labels, test_images, test_labels = load_images(device)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = resume(args.checkpoint, model, optimizer, device)
    if rank == 0:
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        begin = f"going on after epoch {first} of {args.checkpoint}" if first else f"from scratch, checkpoint {args.checkpoint}"
        print(f"{world} worker{'s' * (world > 1)} on {device.type}: {begin}", flush=True)

    parallel = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    for epoch in range(first, args.epochs):
        loss = train_epoch(parallel, optimizer, train_images, train_labels, epoch, args)
        percent = accuracy(model, test_images, test_labels)
        if rank == 0:
            save(args.checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1})
            print(f"epoch {epoch + 1:3d}/{args.epochs}  loss {loss:.4f}  accuracy {percent:5.2f} %  world size {world}", flush=True)

    percent = accuracy(model, test_images, test_labels)
    if rank == 0:
        if first >= args.epochs:
            print("there was nothing left to do; to train again, remove the checkpoint or name another", flush=True)
        print(f"test accuracy {percent:.1f} %", flush=True)
    # Gloo's threads end with the last reference to the process group. Threads that outlive the interpreter may abort it at its exit.
    del parallel
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
