"""The plug-in through which plain torchrun gets elastirun's rendezvous at etcd: the entry-point group ``torchrun.handlers``.

torch loads this module wherever its elastic package is imported, whatever the backend, so it imports everything else late.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastirun import clock

if TYPE_CHECKING:
    from elastirun.config import LaunchConfig

API = "torch.distributed.elastic.rendezvous.api"
MOST_RESTARTS = 10**9  # no limit of ours: torchrun counts restarts itself, on each node
STORE_LIMIT = 60.0  # seconds to reach the store of a round, and for each call that torchrun then makes on that store
TRY_AGAIN = 0.5  # seconds between two attempts to connect to the store of a round


def etcd() -> Callable[[Any], Any]:
    """Return the function that makes a handler. The entry point names this one, and torch calls it."""
    return make


def make(parameters: Any) -> Any:
    """Make a ``RendezvousHandler`` from torch's ``RendezvousParameters``. The node joins at the first ``next_rendezvous``.

    Raises torch's ``RendezvousError``, in one line, when the parameters cannot work.
    """
    from elastirun.agent.torch_handler import TorchrunNode
    from elastirun.errors import ElastirunError

    api = importlib.import_module(API)

    class EtcdRendezvous(TorchrunNode, api.RendezvousHandler):  # type: ignore[misc, name-defined]
        def get_backend(self) -> Any:
            return parameters.backend

        def get_run_id(self) -> Any:
            return parameters.run_id

    try:
        config, warnings = configuration(parameters)
        made = EtcdRendezvous(config, reach, lambda name, why: getattr(api, f"Rendezvous{name}Error")(why))
    except ElastirunError as error:
        raise api.RendezvousError(str(error)) from None
    for warning in warnings:
        print(f"elastirun: warning: {warning}", file=sys.stderr, flush=True)
    return made


def configuration(parameters: Any) -> tuple[LaunchConfig, list[str]]:
    """Translate ``parameters`` into our options. Returns the configuration and warnings. Raises UsageError."""
    import uuid

    from elastirun.cli.detect.detected import Host
    from elastirun.cli.given_options import GivenOptions, MachineFacts
    from elastirun.cli.resolve import resolve

    given = {
        "nnodes": f"{parameters.min_nodes}:{parameters.max_nodes}",
        "rdzv_backend": "etcd",
        "rdzv_endpoint": parameters.endpoint,
        "rdzv_id": parameters.run_id,
        "rdzv_conf": ",".join(f"{key}={value}" for key, value in parameters.config.items()),
        "local_addr": parameters.local_addr or "",
        "max_restarts": str(MOST_RESTARTS),
        "restart_pause": "0",
    }
    options = GivenOptions(given, {})
    facts = MachineFacts(cpus=lambda: 1, devices=lambda kind: None, new_id=lambda: str(uuid.uuid4()), host=lambda: Host(""))
    return resolve(options, ["torchrun"], facts), options.warnings


def reach(record: Any, node_rank: int, is_on: Callable[[], bool]) -> Any:
    """Connect to the store that node rank 0 serves for a round. Returns torch's ``RendezvousInfo``; keys have a prefix of the round's own.

    Retries while the round runs (``is_on()``), for ``STORE_LIMIT`` at most; then it returns a ``RendezvousConnectionError``.
    """
    from datetime import timedelta

    c10d, api = importlib.import_module("torch.distributed"), importlib.import_module(API)
    head, own = record.members[0], record.members[node_rank]
    limit = clock.now() + STORE_LIMIT
    while is_on():
        try:
            at = {"host_name": head.address, "port": head.port, "timeout": timedelta(seconds=STORE_LIMIT)}
            store = c10d.PrefixStore(record.fence, c10d.TCPStore(**at, is_master=False, wait_for_workers=False))
            info = api.RendezvousStoreInfo.build(node_rank, store, own.address)
            return api.RendezvousInfo(store, node_rank, len(record.members), info)
        except (RuntimeError, OSError, ValueError) as error:  # torch's Dist*Error are RuntimeErrors
            if clock.now() > limit:
                where = f"the store of round {record.round} at {head.name} {head.address}:{head.port}"
                return api.RendezvousConnectionError(f"{where} is out of reach: {str(error).partition(chr(10))[0]}")
            time.sleep(TRY_AGAIN)
    return None
