"""The metrics of an agent in the text format of Prometheus, by prometheus-client (``pip install '.[metrics]'``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def render(snapshot: Mapping[str, Any], states: Iterable[str]) -> tuple[bytes, str]:
    """Return the metrics and their content type. ``snapshot``: the fields of ``health.Snapshot``; ``states``: all that its state may be.

    Raises ImportError without prometheus-client.

    The values come from one snapshot, so nothing is kept in a registry between two requests.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    families = _families(snapshot, states)

    class Collector:
        def collect(self) -> list[Any]:
            return families

    registry = CollectorRegistry()
    registry.register(Collector())
    body: bytes = generate_latest(registry)
    content_type: str = CONTENT_TYPE_LATEST
    return body, content_type


def _families(snapshot: Mapping[str, Any], states: Iterable[str]) -> list[Any]:
    """Return the metrics with their values and help texts."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    def gauge(name: str, help: str, value: float) -> Any:
        return GaugeMetricFamily(f"elastirun_{name}", help, value)

    def by_label(kind: type[Any], name: str, help: str, label: str, values: Mapping[str, float]) -> Any:
        family = kind(f"elastirun_{name}", help, labels=[label])
        for value_of_label, value in values.items():
            family.add_metric([value_of_label], value)
        return family

    def by_worker(kind: type[Any], name: str, help: str, field: str) -> Any:
        return by_label(kind, name, help, "local_rank", {str(worker["local_rank"]): worker[field] for worker in snapshot["steps"]})

    # Prometheus itself adds labels named job and instance, and often node: the names here are others.
    info = {"version": snapshot["version"], "host": snapshot["node"], "run_id": snapshot["job"]}
    slow = {str(worker["local_rank"]): worker["times_median"] for worker in snapshot["steps"] if worker["times_median"]}
    factor = "Of a straggler: for how many times as long it computes as the median rank."
    account = snapshot["account"]
    current = {name: name == snapshot["state"] for name in states}
    spent = {kind: seconds for kind, seconds in account["seconds"].items() if seconds is not None}
    lost = {**dict.fromkeys(snapshot["restarts"], 0.0), **account["lost_seconds"]}
    families = [
        InfoMetricFamily("elastirun", "This agent.", info),
        by_label(GaugeMetricFamily, "state", "1 for the state that this node is in.", "state", current),
        gauge("round", "Number of the newest round that this node knows; 0: none.", snapshot["round"]),
        gauge("world_size", "Workers in that round, over all nodes.", snapshot["world_size"]),
        gauge("nodes", "Nodes in that round.", len(snapshot["nodes"])),
        by_label(CounterMetricFamily, "restarts", "Rounds that ended before their work was done, by cause.", "cause", snapshot["restarts"]),
        gauge("failures", "Failures of workers of the job that count against --max-restarts.", snapshot["failures"]),
        gauge("max_restarts", "--max-restarts: with more failures the job fails.", snapshot["max_restarts"]),
        CounterMetricFamily("elastirun_failures_caused", "Rounds ended by a failure of this node's worker.", snapshot["failures_caused"]),
        CounterMetricFamily("elastirun_hangs", "Times that the workers of this node were found to hang.", snapshot["hangs"]),
        gauge("stragglers", "Workers of this node that compute for longer than the others of the job.", len(slow)),
        by_label(GaugeMetricFamily, "worker_times_median", factor, "local_rank", slow),
        gauge("joins_waiting", "Nodes that wait for the next round, as far as this node knows.", snapshot["joins_waiting"]),
        gauge("strikes", "Strikes of this node, by which it sits out.", snapshot["strikes"]),
        by_label(GaugeMetricFamily, "workers", "Workers of this node.", "state", snapshot["workers"]),
        by_worker(CounterMetricFamily, "worker_steps", "Steps of a worker of this node in this round.", "steps"),
        by_worker(GaugeMetricFamily, "worker_step_age_seconds", "Seconds since the worker's last step.", "seconds_since_step"),
        by_label(GaugeMetricFamily, "spent_seconds", "Time of this agent by what it was spent on.", "on", spent),
        by_label(GaugeMetricFamily, "lost_seconds", "Time lost to rounds that ended early, by cause.", "cause", lost),
        gauge("goodput_ratio", "The part of this agent's time that was training that counted.", account["goodput"]),
        gauge("keep_alive_age_seconds", "Seconds since the store last acknowledged a keep-alive.", snapshot["seconds_since_keep_alive"]),
        gauge("checkpoints_held_bytes", "Memory in which this agent keeps checkpoints.", snapshot["checkpoints_held_bytes"]),
    ]
    if (seconds := snapshot["seconds_since_round_start"]) is not None:
        families.append(gauge("round_age_seconds", "Seconds since workers were last started on this node.", seconds))
    return families
