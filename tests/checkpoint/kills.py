"""Kills and freezes writer processes at random moments around their saves, and looks at what is left.

python -m tests.checkpoint.kills 1000 200      a thousand kills, two hundred stops
"""

from __future__ import annotations

import argparse
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

from elastirun.checkpoint.directory import open_directory
from elastirun.checkpoint.writer_process import WriterProcess
from elastirun.errors import CheckpointError
from tests.checkpoint.saves import claimed, content, entries, image_of
from tests.support.tries import unless

KEEP = 2
SIZE = 2 << 20  # bytes of the largest file, so that a save takes a few milliseconds
LONGEST = 0.05  # seconds until a kill, at most
LONGEST_COMMIT = 0.01  # seconds until a stop, at most


def kills(path: Path, count: int, rng: random.Random) -> list[str]:
    """Kill ``count`` writers. After each the directory must have whole checkpoints only, of them the newest that was reported.

    Return what is wrong.
    """
    directory, step, reported, wrong = open_directory(str(path)), 0, 0, list[str]()
    images = {number: image_of(number, files=content(number, SIZE)) for number in (0, 1)}
    for round in range(1, count + 1):
        claim = claimed(directory, f"store:{round}")
        names = [one.name for one in claim.found]
        steps = [one.commit.step for one in claim.found if one.commit]
        wrong += unless(
            (entries(path) == sorted([f".staging-{claim.name}", *names]), f"{round}: something is left: {entries(path)}"),
            (len(steps) == len(names), f"{round}: {names} are not all published"),
            (max([0, *steps]) in (reported, reported + 1), f"{round}: {steps}, but {reported} was reported"),
        )
        wrong += [f"{round}: {damage}" for one in claim.found for damage in directory.verify(one, look="sha256")]
        reported = step = max([0, *steps])
        sequence = claim.sequence
        writer = WriterProcess()
        writer.start()
        writer.request({"do": "images"}, [images[number].fd for number in (0, 1)])
        writer.reply()
        assert writer._process
        end = time.monotonic() + rng.uniform(0, LONGEST)
        try:
            while True:
                step += 1
                image = image_of(step, files=content(step, SIZE))
                _save(writer, str(path), claim.name, step, sequence, image.fd, end)
                image.close()
                reported, sequence = step, sequence + 1
        except CheckpointError:
            image.close()
        writer.close()
    for one in images.values():
        one.close()
    return wrong


def _save(writer: WriterProcess, path: str, claim: str, step: int, sequence: int, fd: int, end: float) -> None:
    """Write and publish one step; kill the writer at ``end``. Raises ``CheckpointError`` when it is dead."""
    place = {"directory": path, "claim": claim}
    writer.request({"do": "images"}, [fd])
    writer.request({"do": "write", "image": 0, **place})
    _reply(writer, end)
    files = _reply(writer, end)["files"]
    commit = {"step": step, "sequence": sequence, "fence": "", "round": 0, "world_size": 1, "files": files}
    writer.request({"do": "commit", "commit": commit, "keep": KEEP, **place})
    assert _reply(writer, end)["name"]


def _reply(writer: WriterProcess, end: float) -> dict[str, object]:
    if not select.select([writer.fileno()], [], [], max(0.0, end - time.monotonic()))[0] and writer._process:
        writer._process.kill()
    return writer.reply()


def freezes(path: Path, count: int, rng: random.Random) -> tuple[int, list[str]]:
    """Stop ``count`` writers while they publish, and let them go on when a later round has claimed the directory.

    Whatever that claim has found must be what is there in the end. Return how many were stopped too early to publish, and what is wrong.
    """
    directory, lost, wrong = open_directory(str(path)), 0, list[str]()
    for number in range(1, count + 1):
        claim = claimed(directory, f"store:{2 * number}")
        image, writer = image_of(number), WriterProcess()
        writer.start()
        place = {"directory": str(path), "claim": claim.name}
        writer.request({"do": "images"}, [image.fd])
        writer.request({"do": "write", "image": 0, **place})
        writer.reply()
        files = writer.reply()["files"]
        commit = {"step": number, "sequence": claim.sequence, "fence": "", "round": 0, "world_size": 1, "files": files}
        assert writer._process
        writer.request({"do": "commit", "commit": commit, "keep": KEEP, **place})
        select.select([writer.fileno()], [], [], rng.uniform(0, LONGEST_COMMIT))
        writer._process.send_signal(signal.SIGSTOP)
        new = claimed(directory, f"store:{2 * number + 1}")
        writer._process.send_signal(signal.SIGCONT)
        reply = writer.reply()
        writer.close()
        image.close()
        published = number in [one.commit.step for one in new.found if one.commit]
        names = sorted([f".staging-{new.name}", *(one.name for one in new.found)])
        wrong += unless(
            (directory.scan() == new.found, f"{number}: other checkpoints than a later claim has found; {reply}"),
            (entries(path) == names, f"{number}: {entries(path)} instead of {names}"),
            (published or bool(reply.get("lost")), f"{number}: neither published nor lost: {reply}"),
        )
        lost += not published
    return lost, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs=2, metavar="N", help="kills, and stops")
    counts = parser.parse_args().counts
    with tempfile.TemporaryDirectory() as killed, tempfile.TemporaryDirectory() as frozen:
        begun = time.monotonic()
        wrong = kills(Path(killed), counts[0], random.Random(counts[0]))
        found = f"{len(wrong)} wrong" if wrong else "no torn checkpoint, none lost, nothing left"
        print(f"{counts[0]} kills: {found}; {time.monotonic() - begun:.0f} s")
        begun = time.monotonic()
        lost, late = freezes(Path(frozen), counts[1], random.Random(counts[1]))
        found = f"{len(late)} wrong" if late else "none published later"
        print(f"{counts[1]} stops, {lost} of them before the publish: {found}; {time.monotonic() - begun:.0f} s")
    for line in (*wrong, *late):
        print(line)
    return bool(wrong or late)


if __name__ == "__main__":
    sys.exit(main())
