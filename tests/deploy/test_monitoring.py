"""The overlay for Prometheus and Grafana: its alerts fire when they must and are quiet in a sound job, and all that it asks for exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastirun.agent.observe.node_states import WORDS
from elastirun.agent.status.health import CAUSES, PAGES
from tests.agent.test_health import NOW
from tests.deploy.manifests import FOLDER
from tests.support.cluster import PATIENCE, Cluster, free_port
from tests.support.until import until

MONITORING = FOLDER / "overlays" / "monitoring"
RULES: dict[str, Any] = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "elastirun.json").read_text())
PAGE = PAGES["/metrics"](NOW).body
METRICS = {*re.findall(r"^(elastirun_\w+)", PAGE.decode(), re.M), "elastirun_round_age_seconds"}
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES += [one["expr"] for one in DASHBOARD["annotations"]["list"]]
PANELS: dict[str, dict[str, Any]] = {panel["title"]: panel for panel in DASHBOARD["panels"]}
BY_NODE = re.compile(r"by \([^)]*\b(?:host|instance)\b")

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool, which comes with Prometheus, is not installed")

# One node of a sound job, scraped each minute for an hour and a half. An alert's case changes some of it.
SOUND = {
    'elastirun_info{instance="a", run_id="job", host="node-a"}': "1x90",
    'elastirun_failures{instance="a"}': "1x90",
    'elastirun_max_restarts{instance="a"}': "3x90",
    'elastirun_worker_step_age_seconds{instance="a", local_rank="0"}': "1x90",
    'elastirun_worker_step_age_seconds{instance="a", local_rank="1"}': "700x90",  # an evaluation of one worker: the other steps
    'elastirun_state{instance="a", state="running"}': "1x90",
    'elastirun_state{instance="a", state="sitting_out"}': "0x90",
    'elastirun_goodput_ratio{instance="a"}': "0.9x90",
    'elastirun_spent_seconds{instance="a", on="training"}': "0+60x90",
    'elastirun_keep_alive_age_seconds{instance="a"}': "0.5x90",
    'elastirun_hangs_total{instance="a"}': "0x90",
}
BROKEN: dict[str, dict[str, str]] = {
    "ElastirunRestartsNearlySpent": {'elastirun_failures{instance="a"}': "3x90"},
    "ElastirunNoStep": {'elastirun_worker_step_age_seconds{instance="a", local_rank="0"}': "0+60x90"},
    "ElastirunNoWorkers": {'elastirun_state{instance="a", state="running"}': "0x90"},
    "ElastirunGoodputLow": {'elastirun_goodput_ratio{instance="a"}': "0.7x90"},
    "ElastirunKeepAliveOld": {'elastirun_keep_alive_age_seconds{instance="a"}': "45x90"},
    "ElastirunNodeSitsOut": {'elastirun_state{instance="a", state="sitting_out"}': "1x90"},
    "ElastirunHang": {'elastirun_hangs_total{instance="a"}': "0x85 1x5"},
    "ElastirunStraggler": {'elastirun_worker_times_median{instance="a", local_rank="1"}': "1.5x90"},
}


# For how a job in its first hour is judged: so little training is not low yet.
YOUNG = {'elastirun_goodput_ratio{instance="a"}': "0.1x90", 'elastirun_spent_seconds{instance="a", on="training"}': "0+30x90"}
STEPS = """
import os, time
from elastirun.progress import progress
for step in range(10**6):
    progress(step=step + 1)
    time.sleep(0.02)
    if step == 100 and os.environ["RANK"] == "0":  # again and again: a rate is seen for some seconds only
        raise RuntimeError("a fault")
"""
NOT_IN_THAT_JOB = ("elastirun_worker_times_median",)  # no straggler
TIMES = {"__rate_interval": "10s", "__interval": "1s", "__range": "1m"}  # as Grafana would fill them in, for a scrape each 200 ms


def filled(text: str, job: str = "test") -> str:
    """Return a query of the dashboard with its variables filled in, as Grafana does."""
    return re.sub(r"\$(\w+)", lambda found: job if found[1] == "run_id" else TIMES[found[1]], text)


def promtool(*argv: str, stdin: bytes = b"") -> str:
    done = subprocess.run(["promtool", *argv], input=stdin, capture_output=True, timeout=PATIENCE)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The file as Prometheus itself reads it, without its operator."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(RULES))
    return path


@needs_promtool
def test_the_rules_are_valid(rules: Path) -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(rules))


@needs_promtool
def test_each_alert_fires_for_its_fault_alone(rules: Path, tmp_path: Path) -> None:
    assert BROKEN.keys() == ALERTS.keys()
    cases = []
    for broken, change in {"": {}, "young": YOUNG, **BROKEN}.items():
        series = {**SOUND, **change}
        cases.append(
            {
                "interval": "1m",
                "name": broken,
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": "90m",
                        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert == broken else [],
                    }
                    for alert in ALERTS
                ],
            }
        )
    tests = tmp_path / "tests.yaml"
    tests.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", str(tests))


@needs_promtool
def test_prometheus_finds_no_fault_with_the_metrics() -> None:
    assert promtool("check", "metrics", stdin=PAGE) == ""


@needs_promtool
def test_the_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    rules = [{"record": f"query:{i}", "expr": filled(text)} for i, text in enumerate(QUERIES)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(path))


@pytest.mark.parametrize("text", [*QUERIES, *(rule["expr"] for rule in ALERTS.values())])
def test_what_is_asked_for_exists(text: str) -> None:
    assert set(re.findall(r"elastirun_\w+", text)) <= METRICS


@pytest.mark.daily(5)
@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed")
def test_a_real_prometheus_answers_each_query_of_the_dashboard(nodes: Cluster) -> None:
    ports, at = [free_port(), free_port()], free_port()
    nodes.script.write_text(STEPS)
    for i, port in enumerate(ports, 1):
        options = ("--max-restarts=1000", "--set=restart-pause=0", f"--node-name=node-{i}")
        nodes.agent(i, f"--health-port={port}", *options, nnodes="2")
    scrape = {"job_name": "agents", "scrape_interval": "200ms", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
    config = nodes.tmp_path / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    options = ["--web.listen-address", f"127.0.0.1:{at}", "--storage.tsdb.path", str(nodes.tmp_path / "data"), "--config.file", str(config)]
    with open(nodes.tmp_path / "prometheus.out", "w") as out, subprocess.Popen(["prometheus", *options], stdout=out, stderr=out) as server:
        try:
            wanted = [text for text in QUERIES if not any(name in text for name in NOT_IN_THAT_JOB)]
            until(lambda: all(series(at, text) for text in wanted), "an answer to each query", state=lambda: nodes.everything())
            table = {target["expr"] for target in PANELS["Nodes of the job"]["targets"]}.intersection(wanted)
            until(lambda: all(hosts(at, text) == {"node-1", "node-2"} for text in table), "a row for each node in each column")
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/status", timeout=PATIENCE) as answer:
                first = json.load(answer)["nodes"][0]  # the node with rank 0, which fails again and again
            (worst,) = series(at, PANELS["Caused the most restarts"]["targets"][0]["expr"])
            assert worst["metric"]["host"] == first and float(worst["value"][1]) >= 1
            (most,) = series(at, "topk(1, sum by (cause) (elastirun_lost_seconds))")
            assert most["metric"]["cause"] == "failure"
        finally:
            server.kill()


def hosts(port: int, text: str) -> set[str]:
    return {one["metric"]["host"] for one in series(port, text)}


def series(port: int, text: str) -> list[dict[str, Any]]:
    """Return what Prometheus answers to a query of the dashboard, about the last seconds."""
    query = urllib.parse.urlencode({"query": filled(text)})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=PATIENCE) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except OSError:  # it does not listen yet
        return []
    return found


def test_the_panels_fit_on_the_page_and_none_covers_another() -> None:
    taken: set[tuple[int, int]] = set()
    for title, panel in PANELS.items():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, title
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(PANELS)
    assert {i for one in DASHBOARD["annotations"]["list"] for i in one["filter"]["ids"]} <= {panel["id"] for panel in DASHBOARD["panels"]}


@pytest.mark.parametrize("title", PANELS)
def test_a_panel_of_one_job_stays_readable_with_hundreds_of_nodes(title: str) -> None:
    """Only the table has a line for each node; a large number is one node's, and lines over time are of all nodes together."""
    panel = PANELS[title]
    for target in panel["targets"]:
        assert 'run_id="$run_id"' in target["expr"]
        of_nodes = BY_NODE.search(target["expr"]) is not None
        assert not of_nodes or panel["type"] == "table" or target["expr"].startswith("topk(1, ")
        assert target.get("instant", False) is of_nodes or panel["type"] == "table", "a node of long ago is not the worst one now"


def test_kinds_of_time_and_causes_have_one_name_and_colour_each() -> None:
    spent = {words.spent: (words.title, words.color) for words in WORDS.values() if words.spent}
    assert shown(PANELS["What the time is spent on"]) == spent, "those of the report"
    causes = shown(PANELS["Lost time by cause"])
    assert causes.keys() == set(CAUSES) and len(set(causes.values())) == len(CAUSES)


def shown(panel: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the name and the colour that a panel gives each of its series."""
    found = {}
    for rule in panel["fieldConfig"]["overrides"]:
        values = {one["id"]: one["value"] for one in rule["properties"]}
        found[rule["matcher"]["options"]] = values["displayName"], values["color"]["fixedColor"]
    return found


def test_the_rules_of_the_table_name_columns_that_it_has() -> None:
    table = PANELS["Nodes of the job"]
    names = table["transformations"][1]["options"]["renameByName"]
    columns = {*names.values(), "state"}
    assert {f"Value #{target['refId']}" for target in table["targets"]} <= {*names, "Value #A"}
    assert {rule["matcher"]["options"] for rule in table["fieldConfig"]["overrides"]} <= columns
    assert {one["displayName"] for one in table["options"]["sortBy"]} <= columns


def test_alerts_say_which_job_and_what_to_do() -> None:
    for rule in ALERTS.values():
        assert "$labels.run_id" in rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")


def test_the_pods_of_the_base_are_scraped_at_their_port() -> None:
    monitor = yaml.safe_load((MONITORING / "pod-monitor.yaml").read_text())["spec"]
    job = yaml.safe_load((FOLDER / "base" / "job.yaml").read_text())["spec"]["template"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert monitor["selector"]["matchLabels"].items() <= job["metadata"]["labels"].items()
    assert endpoint["port"] in [port["name"] for port in job["spec"]["containers"][0]["ports"]] and endpoint["path"] in PAGES
