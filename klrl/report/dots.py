"""All tasks in one chart, as SVG for the page: a strip per setting, no script needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from klrl.report.aggregate import Aggregate

#: Pixels: the chart's width, a strip's height, the room beside, above and below the strips, and
#: about the width of a letter.
_WIDTH, _STRIP, _SIDE, _TOP, _BOTTOM, _LETTER = 440, 42, 14, 26, 44, 6.7
#: More tasks than shapes are not told apart.
_SHAPES = ("circle", "square", "triangle", "diamond")


def title(score: str) -> str:
    """The chart's title; ``score`` is return, or score of language."""
    return f"Normalised {score} over all tasks"


def axis_title(score: str) -> str:
    """The title of its axis."""
    return f"normalised final {score}"


def shapes(tasks: Sequence[str]) -> list[str]:
    """A shape per task; of many tasks all have the same."""
    return list(_SHAPES[: len(tasks)]) if len(tasks) <= len(_SHAPES) else ["circle"] * len(tasks)


def told_apart(tasks: Sequence[str]) -> bool:
    """Whether the tasks have shapes of their own."""
    return len(set(shapes(tasks))) == len(tasks)


def dots(settings: Sequence[Aggregate], tasks: Sequence[str], score: str = "return") -> str:
    """The figure: each setting's mean over tasks with its interval, and the mean of each task."""
    axis = _Axis(_ends(settings))
    below = _TOP + _STRIP * len(settings)
    key, rows = _key(tasks, below + _BOTTOM)
    height = below + _BOTTOM + 18 * rows
    parts = [
        f'<text x="{_SIDE}" y="17" font-weight="600" font-size="13">{title(score)}</text>',
        *axis.drawn(below, axis_title(score)),
        *(_strip(each, tasks, axis, _TOP + _STRIP * i) for i, each in enumerate(settings)),
        *key,
    ]
    told = f"{title(score)}: {len(settings)} settings, {len(tasks)} tasks"
    return (
        f'<figure class="dots"><svg width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{told}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _ends(settings: Iterable[Aggregate]) -> tuple[float, float]:
    """The least and the most that is drawn."""
    values = [
        value
        for each in settings
        for value in (each.mean.value, each.mean.low, each.mean.high, *each.task_means)
        if math.isfinite(value)
    ]
    return min(values), max(values)


class _Axis:
    """Normalised returns, from the least to the most that is drawn -> pixels."""

    def __init__(self, ends: tuple[float, float]) -> None:
        low, high = ends
        room = 0.05 * (high - low) or 0.5 * abs(low) or 0.5
        self._low, self._high = low - room, high + room

    def __call__(self, value: float) -> float:
        """Pixels from the left."""
        share = (value - self._low) / (self._high - self._low)
        return round(_SIDE + share * (_WIDTH - 2 * _SIDE), 1)

    def drawn(self, bottom: int, title: str) -> list[str]:
        """Its lines, numbers and title."""
        step = _step((self._high - self._low) / 8)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        parts = []
        for value in (k * step for k in range(first, last + 1)):
            x = self(value)
            parts += [
                f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>',
                f'<text class="x" x="{x}" y="{bottom + 15}" text-anchor="middle">'
                f"{value:.{digits}f}</text>",
            ]
        below = f'<text x="{_WIDTH / 2}" y="{bottom + 32}" text-anchor="middle">{title}</text>'
        return [*parts, below]


def _step(least: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(k * unit for k in (1, 2, 5, 10) if k * unit >= 0.999 * least)


def _strip(each: Aggregate, tasks: Sequence[str], axis: _Axis, top: int) -> str:
    """A setting's name, below it its mean, and the tasks a little lower, so that none is hidden."""
    y, lower = top + 24, top + 31
    name, mean = escape(each.name), each.mean
    room = int((_WIDTH - 2 * _SIDE) / _LETTER)
    short = name if len(each.name) <= room else f"{escape(each.name[: room - 1])}…"
    parts = [f'<text x="{_SIDE}" y="{top + 13}">{short}</text>']
    for task, shape, value in zip(tasks, shapes(tasks), each.task_means, strict=True):
        told = f"<title>{name}, {escape(task)}: {value:.3f}</title>"
        parts.append(f'<g class="dot">{told}{_mark(shape, axis(value), lower)}</g>')
    span = ""
    if math.isfinite(mean.low):
        x1, x2 = axis(mean.low), axis(mean.high)
        parts.append(f'<line class="up" x1="{x1}" x2="{x2}" y1="{y}" y2="{y}"/>')
        span = f" ({mean.low:.3f} to {mean.high:.3f})"
    told = f"<title>{name}: {mean.value:.3f}{span}</title>"
    parts.append(f'<circle class="point" cx="{axis(mean.value)}" cy="{y}" r="5">{told}</circle>')
    return "".join(parts)


def _mark(shape: str, x: float, y: float) -> str:
    """A small mark around a place."""
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y}" r="3"/>'
    corners = {
        "square": ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        "triangle": ((0, -4), (4, 3), (-4, 3)),
        "diamond": ((0, -4), (4, 0), (0, 4), (-4, 0)),
    }[shape]
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}"/>'


def _key(tasks: Sequence[str], top: int) -> tuple[list[str], int]:
    """What the marks are, and in how many lines."""
    if not told_apart(tasks):
        return [f'<text x="{_SIDE}" y="{top + 10}">small: means of the tasks</text>'], 1
    parts, x, row = [], float(_SIDE), 0
    for task, shape in zip(tasks, shapes(tasks), strict=True):
        width = 26 + _LETTER * len(task)
        if x > _SIDE and x + width > _WIDTH:
            x, row = float(_SIDE), row + 1
        y = top + 18 * row + 6
        parts.append(f'<g class="dot">{_mark(shape, x + 4, y)}</g>')
        parts.append(f'<text x="{x + 13:.1f}" y="{y + 4}">{escape(task)}</text>')
        x += width
    return parts, row + 1
