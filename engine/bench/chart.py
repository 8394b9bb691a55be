"""A chart of throughput rows as SVG: a group of horizontal bars for each workload, a bar for each engine.

Workloads differ by orders of magnitude, so each group has a scale of its own and each bar its number. Colours are
middle tones on a transparent ground: they read on light and dark pages. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = {"convoy": "#2f81f7", "transformers": "#8b949e", "openvino": "#a371f7", "vllm": "#d29922"}
_TEXT = "#7d8590"
_WIDTH, _LEFT, _BAR_AREA = 760, 110, 470
_BAR, _STEP, _GAP, _TOP = 16, 20, 14, 56


def chart(rows: Sequence[Mapping[str, Any]], title: str, caption: str) -> str:
    """An SVG document.

    Args:
        rows: of `measure.throughput`; workloads that generate a single token are shown by all their tokens.
        title, caption: lines above and below the bars.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["workload"], []).append(row)
    parts, y = [_text(0, 18, title, size=15, weight="bold")], _TOP
    parts += _legend(list(dict.fromkeys(row["engine"] for row in rows)))
    for workload, group in groups.items():
        most = max(_rate(row) for row in group)
        parts.append(_text(_LEFT - 10, y + len(group) * _STEP / 2 + 3, workload, anchor="end", weight="bold"))
        for row in group:
            parts += _bar(row, most, y)
            y += _STEP
        y += _GAP
    parts.append(_text(0, y + 8, caption, size=11))
    height = y + 18
    attributes = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {attributes} font-family="system-ui, sans-serif">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"]) + "\n"


def _rate(row: Mapping[str, Any]) -> float:
    return float(row["total_per_s"] if _is_prefill(row) else row["out_per_s"])


def _is_prefill(row: Mapping[str, Any]) -> bool:
    return bool(row["tokens_in"] > 100 * row["tokens_out"])


def _bar(row: Mapping[str, Any], most: float, y: float) -> list[str]:
    rate = _rate(row)
    width = max(1.0, _BAR_AREA * rate / most)
    label = f"{rate:,.0f} {'prompt ' if _is_prefill(row) else ''}tok/s"
    if row.get("ratio") is not None:
        label += f" ({row['ratio']:.2f}x)"
    colour = _COLOURS.get(row["engine"], _TEXT)
    return [
        f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>',
        _text(_LEFT + width + 6, y + 12, label, size=12),
    ]


def _legend(engines: Sequence[str]) -> list[str]:
    parts, x = [], _LEFT
    for engine in engines:
        parts.append(f'<rect x="{x}" y="30" width="11" height="11" rx="2" fill="{_COLOURS.get(engine, _TEXT)}"/>')
        parts.append(_text(x + 16, 40, engine, size=12))
        x += 40 + 7 * len(engine)
    return parts


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}" fill="{_TEXT}">{escape(text)}</text>'
