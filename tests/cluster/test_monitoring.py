"""The dashboard, the rules and the scrape configurations: made of metrics that exist, and valid to Prometheus."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.telemetry import METRICS, exported_names, markdown_table
from tests.cluster.prometheus import ROOT, program

PROMETHEUS = ROOT / "cluster" / "prometheus"
GRAFANA = ROOT / "cluster" / "grafana"
NAME = re.compile(r"\bray_\w+")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GRAFANA / "dashboard.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions() -> list[str]:
    """What the dashboard asks, with Grafana's variables filled in."""
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [one.replace("$__rate_interval", "5m").replace("$model", ".*") for one in asked]


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def test_names_are_distinct_and_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"convoy_[a-z_]+", metric.name) and metric.help
        assert not metric.name.endswith("_total"), "the exporter adds it"
        histogram = metric.kind == "histogram"
        assert histogram == bool(metric.buckets) == metric.name.endswith("_s")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_dashboard_is_what_the_table_makes() -> None:
    made = runpy.run_path(str(GRAFANA / "make_dashboard.py"))["text"]()
    assert (GRAFANA / "dashboard.json").read_text() == made, "run cluster/grafana/make_dashboard.py"


def test_the_dashboard_shows_every_metric_and_nothing_else() -> None:
    shown = set(NAME.findall(" ".join(expressions())))
    assert shown <= exported_names()
    assert all(shown & set(metric.exported()) for metric in METRICS)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


def test_rules_name_metrics_and_labels_that_exist() -> None:
    text = (PROMETHEUS / "rules.yml").read_text()
    assert set(NAME.findall(text)) <= exported_names()
    assert set(NAME.findall((PROMETHEUS / "rules_test.yml").read_text())) <= exported_names()
    tags = {name: set(metric.tags) for metric in METRICS for name in metric.exported()}
    for name, labels in re.findall(r"(ray_\w+)\{([^}]*)\}", text + " ".join(expressions())):
        assert {label.split("=")[0].rstrip("~! ") for label in labels.split(",")} <= tags[name] | {"le"}


def test_what_is_scraped_is_what_is_shown() -> None:
    """Both scrape configurations keep every metric of the table, and no label that a rule needs is dropped."""
    for file in ("prometheus.yml", "prometheus-kubernetes.yml"):
        (job,) = yaml.safe_load((PROMETHEUS / file).read_text())["scrape_configs"]
        keep, drop = job["metric_relabel_configs"]
        assert all(re.fullmatch(keep["regex"], name) for name in exported_names())
        assert not re.fullmatch(keep["regex"], "ray_grpc_server_req_new_total")
        assert not any(re.fullmatch(drop["regex"], tag) for metric in METRICS for tag in metric.tags)


def test_the_table_for_readers_has_every_metric() -> None:
    lines = markdown_table().splitlines()
    assert len(lines) == len(METRICS) + 2
    assert len({line.count("|") for line in lines}) == 1


def test_promtool_accepts_rules_and_their_tests() -> None:
    promtool = program("promtool")
    assert "SUCCESS: 11 rules found" in run(promtool, "check", "rules", PROMETHEUS / "rules.yml")
    assert "SUCCESS" in run(promtool, "test", "rules", PROMETHEUS / "rules_test.yml")


def test_promtool_accepts_the_scrape_configurations(tmp_path: Path) -> None:
    promtool = program("promtool")
    assert "is valid" in run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")
    # Debian's build has no discovery in Kubernetes: all but that is checked.
    config = yaml.safe_load((PROMETHEUS / "prometheus-kubernetes.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    config["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    assert "is valid" in run(promtool, "check", "config", tmp_path / "prometheus.yml")


def test_promtool_accepts_what_the_dashboard_asks(tmp_path: Path) -> None:
    promtool = program("promtool")
    rules = [{"record": f"panel:{number}", "expr": one} for number, one in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules" in run(promtool, "check", "rules", tmp_path / "rules.yml")


def test_promtool_refuses_what_is_wrong(tmp_path: Path) -> None:
    promtool = program("promtool")
    (tmp_path / "rules.yml").write_text(
        (PROMETHEUS / "rules.yml").read_text().replace("sum by (model)", "sum bi (model)")
    )
    with pytest.raises(AssertionError, match="parse error"):
        run(promtool, "check", "rules", tmp_path / "rules.yml")
