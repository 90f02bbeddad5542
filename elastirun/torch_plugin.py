"""What plain torchrun finds in the entry-point group ``torchrun.handlers``: elastirun's rendezvous, at etcd.

torch loads this wherever its elastic package is imported, whatever the backend: so nothing else is imported before it is needed.
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
MOST_RESTARTS = 10**9  # torchrun counts them itself, on each node
STORE_LIMIT = 60.0  # seconds to reach a round's store, and for what torchrun then asks of it
TRY_AGAIN = 0.5  # seconds after which a store that hung up is tried again


def etcd() -> Callable[[Any], Any]:
    """What the entry point names: torch calls it for the function that makes a handler."""
    return make


def make(parameters: Any) -> Any:
    """The ``RendezvousHandler`` for torch's ``RendezvousParameters``. It joins when the first rendezvous is asked for.

    Errors: torch's ``RendezvousError``, in one line, for what cannot work as it was given.
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
    """``parameters`` as options of ours, and what to warn of. Errors: ``UsageError``."""
    import uuid

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
    facts = MachineFacts(cpus=lambda: 1, devices=lambda kind: None, new_id=lambda: str(uuid.uuid4()))
    return resolve(options, ["torchrun"], facts), options.warnings


def reach(record: Any, node_rank: int, is_on: Callable[[], bool]) -> Any:
    """torch's ``RendezvousInfo`` of a round: the store that node 0 serves for it, with keys of the round's own.

    What fails is tried again while the round is on, for ``STORE_LIMIT``; then it returns a ``RendezvousConnectionError``.
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
