"""Charts as SVG: groups of horizontal bars, such as one for each workload with a bar for each engine.

Groups may differ by orders of magnitude, so each has a scale of its own and each bar its number. Colours are middle
tones on a transparent ground: they read on light and dark pages. Called by command lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

_COLOURS = {"convoy": "#2f81f7", "transformers": "#8b949e", "openvino": "#a371f7", "vllm": "#d29922"}
_TEXT = "#7d8590"
_WIDTH, _LEFT, _BAR_AREA = 760, 110, 470
_BAR, _STEP, _GAP, _TOP = 16, 20, 14, 56


class Bar(NamedTuple):
    """One bar: what it is of, how long, and what is written behind it."""

    name: str
    value: float
    label: str


def chart(rows: Sequence[Mapping[str, Any]], title: str, caption: str) -> str:
    """Throughput as an SVG document.

    Args:
        rows: of `measure.throughput`; workloads that generate a single token are shown by all their tokens.
        title, caption: lines above and below the bars.
    """
    groups: dict[str, list[Bar]] = {}
    for row in rows:
        rate = float(row["total_per_s"] if _is_prefill(row) else row["out_per_s"])
        label = f"{rate:,.0f} {'prompt ' if _is_prefill(row) else ''}tok/s"
        if row.get("ratio") is not None:
            label += f" ({row['ratio']:.2f}x)"
        groups.setdefault(row["workload"], []).append(Bar(row["engine"], rate, label))
    return bar_chart(groups, title, caption, _COLOURS)


def bar_chart(groups: Mapping[str, Sequence[Bar]], title: str, caption: str, colours: Mapping[str, str]) -> str:
    """An SVG document.

    Args:
        groups: bars by what stands before them; the longest of each fills the width.
        title, caption: lines above and below the bars.
        colours: of bars by name.
    """
    parts, y = [_text(0, 18, title, size=15, weight="bold")], _TOP
    parts += _legend(list(dict.fromkeys(bar.name for bars in groups.values() for bar in bars)), colours)
    for group, bars in groups.items():
        most = max(bar.value for bar in bars) or 1.0
        parts.append(_text(_LEFT - 10, y + len(bars) * _STEP / 2 + 3, group, anchor="end", weight="bold"))
        for bar in bars:
            parts += _bar(bar, most, y, colours)
            y += _STEP
        y += _GAP
    parts.append(_text(0, y + 8, caption, size=11))
    height = y + 18
    attributes = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {attributes} font-family="system-ui, sans-serif">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"]) + "\n"


def _is_prefill(row: Mapping[str, Any]) -> bool:
    return bool(row["tokens_in"] > 100 * row["tokens_out"])


def _bar(bar: Bar, most: float, y: float, colours: Mapping[str, str]) -> list[str]:
    width = max(1.0, _BAR_AREA * bar.value / most)
    colour = colours.get(bar.name, _TEXT)
    return [
        f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>',
        _text(_LEFT + width + 6, y + 12, bar.label, size=12),
    ]


def _legend(names: Sequence[str], colours: Mapping[str, str]) -> list[str]:
    parts, x = [], _LEFT
    for name in names:
        parts.append(f'<rect x="{x}" y="30" width="11" height="11" rx="2" fill="{colours.get(name, _TEXT)}"/>')
        parts.append(_text(x + 16, 40, name, size=12))
        x += 40 + 7 * len(name)
    return parts


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}" fill="{_TEXT}">{escape(text)}</text>'
