"""Messages with descriptors: whole, in order, and without descriptors that leak."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from elastirun import linux
from elastirun.checkpoint.messages import MAX_FDS, receive, send
from elastirun.errors import CheckpointError
from tests.support.descriptors import descriptors


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_in_order_with_their_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    fds = [linux.memfd_create(str(n)) for n in range(MAX_FDS)]
    for n, fd in enumerate(fds):
        os.write(fd, b"%d" % n)
    send(pair[0], {"n": 1}, fds)
    send(pair[0], {"n": 2})
    send(pair[0], {"n": 3}, fds[:1])
    found = [receive(pair[1]) for _ in range(3)]
    pair[0].close()
    assert receive(pair[1]) is None
    assert [(one[0], len(one[1])) for one in found if one] == [({"n": 1}, MAX_FDS), ({"n": 2}, 0), ({"n": 3}, 1)]
    for one in found:
        for n, fd in enumerate(one[1] if one else []):
            assert os.pread(fd, 9, 0) == b"%d" % n and not os.get_inheritable(fd)
            os.close(fd)
    for fd in fds:
        os.close(fd)


def test_a_long_message_arrives_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    message = {"files": {f"f{n}": [n, "a" * 64] for n in range(50_000)}}
    sending = threading.Thread(target=send, args=(pair[0], message))
    sending.start()
    assert receive(pair[1]) == (message, [])
    sending.join()


@pytest.mark.daily(4)
@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x02[]", b"\0\0\0\x02{", b"\0\0", b"\0\0\0\x01x"])
def test_what_is_no_message_is_refused_and_its_descriptors_closed(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    before = descriptors()
    socket.send_fds(pair[0], [data], [0])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(CheckpointError):
        receive(pair[1])
    assert descriptors() == before


def test_more_descriptors_than_allowed_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    before = descriptors()
    with pytest.raises(CheckpointError):
        send(pair[0], {}, [0] * (MAX_FDS + 1))
    socket.send_fds(pair[0], [b"\0\0\0\x02{}"], [0] * (MAX_FDS + 1))
    with pytest.raises(CheckpointError):
        receive(pair[1])
    assert descriptors() == before
