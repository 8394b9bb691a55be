"""Writes dashboard.json beside this file from the table of metrics: `python cluster/grafana/make_dashboard.py`.

Each metric has its panel (a gauge as it is, a counter as a rate, a histogram as quantiles), and a few ratios come on
top. A test compares the file with what this makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rayapp.telemetry import METRICS, Metric

FILE = Path(__file__).with_name("dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
UNITS = {"seconds": "s", "share, 0 to 1": "percentunit", "tokens": "short", "": "short"}
KNOWN = {metric.name: metric for metric in METRICS}
MODEL = 'model=~"$model"'

ROWS = {
    "Load": ["convoy_running_requests", "convoy_waiting_requests", "convoy_requests"],
    "What callers see": ["convoy_time_to_first_token_s", "convoy_inter_token_s", "convoy_request_time_s"],
    "Tokens": ["convoy_generation_tokens", "convoy_prompt_tokens", "convoy_prefix_hit_tokens"],
    "KV cache": ["convoy_kv_usage", "convoy_preemptions", "hits"],
    "Where the time goes": [
        "convoy_queue_time_s", "convoy_prefill_time_s", "convoy_decode_time_s", "convoy_serve_overhead_s",
    ],
    "Routing": ["convoy_routing_decisions", "convoy_migrations", "decisions"],
}  # fmt: skip

# title, unit, expression, legend
RATIOS = {
    "hits": (
        "Prompt tokens found in the prefix cache",
        "percentunit",
        f"sum by (model) (rate(ray_convoy_prefix_hit_tokens_total{{{MODEL}}}[$__rate_interval]))"
        f" / sum by (model) (rate(ray_convoy_prompt_tokens_total{{{MODEL}}}[$__rate_interval]))",
        "{{model}}",
    ),
    "decisions": (
        "Share of routing decisions",
        "percentunit",
        "sum by (decision) (rate(ray_convoy_routing_decisions_total[$__rate_interval]))"
        " / on() group_left sum(rate(ray_convoy_routing_decisions_total[$__rate_interval]))",
        "{{decision}}",
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it (schema of Grafana 9 and newer)."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, names in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        top += 1
        for number, name in enumerate(names):
            made = ratio(name) if name in RATIOS else of_metric(KNOWN[name])
            column, line = number % (COLUMNS // WIDTH), number // (COLUMNS // WIDTH)
            place = {"x": WIDTH * column, "y": top + HEIGHT * line, "w": WIDTH, "h": HEIGHT}
            panels.append(made | {"gridPos": place})
        top += HEIGHT * -(-len(names) // (COLUMNS // WIDTH))
    for number, one in enumerate(panels, 1):
        one["id"] = number
    return {
        "title": "Convoy",
        "uid": "convoy",
        "tags": ["convoy", "ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables()},
        "panels": panels,
    }


def variables() -> list[dict[str, Any]]:
    """What is chosen at the top: the data source and the models."""
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(ray_convoy_running_requests, model)", "refId": "model"},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def of_metric(metric: Metric) -> dict[str, Any]:
    """The panel of one metric."""
    by = ", ".join(metric.tags)
    chosen = f"{{{MODEL}}}" if "model" in metric.tags else ""
    legend = " ".join(f"{{{{{tag}}}}}" for tag in metric.tags)
    name = metric.exported()[0]
    unit = UNITS[metric.unit]
    if metric.kind == "histogram":
        rates = f"sum by (le, {by}) (rate({name}{chosen}[$__rate_interval]))"
        expressions = {f"{legend} p{share}": f"histogram_quantile(0.{share}, {rates})" for share in (50, 95, 99)}
    elif metric.kind == "counter":
        expressions = {legend: f"sum by ({by}) (rate({name}{chosen}[$__rate_interval]))"}
        unit = "cps"
    else:
        # A share is not added up over replicas.
        function = "avg" if metric.unit.startswith("share") else "sum"
        expressions = {legend: f"{function} by ({by}) ({name}{chosen})"}
    title = metric.name.removeprefix("convoy_").removesuffix("_s").replace("_", " ").capitalize()
    return panel(title + (" a second" if metric.kind == "counter" else ""), metric.help, unit, expressions)


def ratio(name: str) -> dict[str, Any]:
    title, unit, expression, legend = RATIOS[name]
    return panel(title, "", unit, {legend: expression})


def panel(title: str, help: str, unit: str, expressions: dict[str, str]) -> dict[str, Any]:
    """A graph over time. `expressions`: by legend."""
    return {
        "type": "timeseries",
        "title": title,
        "description": help,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(expressions.items())
        ],
    }


def text() -> str:
    """The content of dashboard.json."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
