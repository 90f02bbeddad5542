"""Torch's own client of a TCPStore, as a stranger or an operator has it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from elastirun.rendezvous.stores.tcp import TcpStore
from elastirun.rendezvous.stores.torch_class import tcp_store_class


def torch_client(store: TcpStore) -> Any:
    """Return torch's client of the server to which ``store`` leads."""
    return tcp_store_class()(*store._where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
