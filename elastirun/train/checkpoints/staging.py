"""The images of this rank in shared memory: each save copies the state into one of them, from which the writer and the agent have it.

An image holds whole files: see docs/decisions/0015.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from elastirun.checkpoint.image import Description, Image, round_up
from elastirun.checkpoint.tensors import TENSORS, VALUES
from elastirun.train.checkpoints.bulk_copy import copy_all, write
from elastirun.train.state.layout import ImageFiles
from elastirun.train.state.tree import Flat

IMAGES = 2  # one is being written to the disk, or is the newest complete one, while the next save fills the other
MORE_IMAGES = 3  # with saves for the memory alone: one is being written, one is the newest, one is filled
DESCRIPTION, PER_FILE = 1024, 128  # bytes of an image's description, about: without files, and for each
ROOM = 64 << 10  # bytes for values.json to grow before an image is made anew
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, madvise(2), Linux 5.14
AT_ONCE = 4 << 20  # bytes to map at once, in a millisecond: no other thread of the process can get memory meanwhile
_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of the process


class Staging:
    """The images, and where the parts of the state stand in them.

    An image that an earlier round has left with the agent is taken over: it has its pages, and keeps its content until it is filled anew.
    """

    def __init__(self, images: int = IMAGES) -> None:
        self.images: list[Image | None] = [None] * images
        self._files: ImageFiles | None = None
        self._tensors_json = b""
        self._values_at = self._room = 0  # where values.json begins; bytes for the description
        self._views: list[list[Tensor] | None] = [None] * images  # where the raw data go; None: not prepared
        self._gpu: torch.device | None = None
        self._pinned: list[bool] = [False] * images
        self._there = [0] * images  # bytes from the beginning that have pages
        self._in_use = threading.Lock()  # an image is not closed while its pages are being mapped
        self._may_map = [threading.Event() for _ in range(images)]
        for each in self._may_map:
            each.set()
        self._stopped = False  # no page is mapped ahead any more

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return sum(image.size for image in self.images if image)

    def adopt(self, images: Mapping[int, Image]) -> None:
        """Take over ``images``, by their number; close those for which there is no place any more."""
        for which, image in images.items():
            if which < len(self.images):
                self._replace(which, image)
            else:
                image.close()

    def arrange(self, files: ImageFiles, tensors_json: bytes, gpu: torch.device | None) -> None:
        """Fill images in this way from now on, with data from ``gpu`` if there is one. What the images hold stays until then."""
        self._gpu = gpu
        self._files, self._tensors_json, self._views = files, tensors_json, [None] * len(self.images)
        self._values_at = round_up(files.end + len(tensors_json))
        self._room = round_up(DESCRIPTION + PER_FILE * len(files.files))

    def prepare(self, which: int, values: int) -> bool:
        """Make image number ``which`` ready for ``values`` bytes of values.json; return whether there are new images."""
        assert self._files is not None
        least, made = self._values_at + values + self._room, False
        for number, image in enumerate(self.images):
            if image is None or (number == which and image.size < least):
                self._replace(number, Image.create(least + values + ROOM))
                made = True
        image = self.images[which]
        if self._views[which] is None and image is not None:
            image.begin()
            self._files.write_shells(image.memory)
            image.memory[self._files.end : self._files.end + len(self._tensors_json)] = self._tensors_json
            self._views[which] = self._files.destinations(image.memory)
        return made

    def fill(self, which: int, flat: Flat, values: bytes, description: Description) -> None:
        """Copy the state into image number ``which``, and finish it. The state may change from then on."""
        image, files, views = self.images[which], self._files, self._views[which]
        assert image is not None and files is not None and views is not None
        image.begin()
        with self.copying(which):
            sources, left = files.sources(flat), []
            for at, (raw, view) in enumerate(zip(files.raws, views, strict=True)):
                # A write makes pages without clearing and mapping them: in a third of the time of a copy to pages that are not there.
                if raw.at + view.nbytes <= self._there[which] or not write(image.fd, raw.at, view, sources[at]):
                    left.append(at)
            copy_all([views[at] for at in left], [sources[at] for at in left], non_blocking=True)
            self._there[which] = image.size
        image.memory[self._values_at : self._values_at + len(values)] = values
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        small = {TENSORS: (files.end, len(self._tensors_json)), VALUES: (self._values_at, len(values))}
        image.finish(replace(description, files={**files.files, **small}))

    @contextmanager
    def copying(self, which: int) -> Iterator[None]:
        """Leave the processor and the memory to a copy into image number ``which``: ``make_resident`` waits.

        A copy from a GPU needs mapped pages, so ``make_resident`` goes on with those of that image.
        """
        paused = [each for number, each in enumerate(self._may_map) if number != which or self._gpu is None]
        for each in paused:
            each.clear()
        try:
            yield
        finally:
            for each in paused:
                each.set()

    def make_resident(self) -> None:
        """Have the kernel map all pages now, and let the GPU copy straight into them, so that the first save waits for neither.

        To be called in a thread. Takes half a second per GB, in which other threads go on. The image that is filled first comes
        first. While ``fill`` copies into one image no page is mapped beside it; what has none then is written.
        """
        for which, image in enumerate(self.images):
            if image is None or self._stopped:
                continue
            with suppress(OSError, ValueError):
                self._map(which, image)
                if self._gpu is not None and not self._pinned[which] and not self._stopped:
                    with torch.cuda.device(self._gpu):
                        torch.cuda.cudart().cudaHostRegister(_address(image), image.size, _PORTABLE)  # type: ignore[no-untyped-call]
                    self._pinned[which] = True

    def stop(self) -> None:
        """Let ``make_resident`` end soon, for somebody who waits for its thread. May be called in any thread."""
        self._stopped = True

    def _map(self, which: int, image: Image) -> None:
        """Map every page of an image, piece by piece. Raises OSError where memory does not suffice; ``fill`` finds out, too."""
        begin = ctypes.c_char.from_buffer(image.memory)  # keeps the memory mapped
        madvise = ctypes.CDLL(None).madvise
        for at in range(0, image.size, AT_ONCE):
            self._may_map[which].wait()
            where, size = ctypes.c_void_p(ctypes.addressof(begin) + at), min(AT_ONCE, image.size - at)
            with self._in_use:
                if self.images[which] is not image or self._stopped:
                    return
                os.posix_fallocate(image.fd, at, size)  # quicker than page by page, and other threads can get memory meanwhile
                if madvise(where, ctypes.c_size_t(size), _POPULATE_WRITE):
                    return
                self._there[which] = max(self._there[which], at + size)

    def close(self) -> None:
        """Unmap the images. Whoever else has them keeps them."""
        self._views = [None] * len(self.images)
        for which in range(len(self.images)):
            self._replace(which, None)

    def _replace(self, which: int, image: Image | None) -> None:
        with self._in_use:
            old, self.images[which], self._views[which], self._there[which] = self.images[which], image, None, 0
        if old is not None:
            if self._pinned[which]:
                torch.cuda.cudart().cudaHostUnregister(_address(old))  # type: ignore[no-untyped-call]
            self._pinned[which] = False
            old.close()


def _address(image: Image) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(image.memory))
