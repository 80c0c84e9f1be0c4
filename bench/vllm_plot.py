"""A picture of rates over the length of a prompt, in the style of `forebay bench copy --plot`.

Pure: points in, SVG out. Must never know how they were measured.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

PANEL_WIDE, HIGH = 440, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 28, 84, 48
LINES = 6  # Across a panel at most.
TITLE = "Restoring KV into one GPU: GB/s until the first token, over tokens of the prompt"


@dataclass(frozen=True)
class Curve:
    """A line of a panel: tokens and GB/s."""

    name: str
    colour: str
    dashed: bool
    points: list[tuple[int, float]]


Panel = tuple[str, list[Curve]]


def svg(panels: list[Panel]) -> str:
    """The picture; a frame without panels if there are none."""
    panels = [(title, [curve for curve in curves if curve.points]) for title, curves in panels]
    panels = [(title, curves) for title, curves in panels if curves]
    wide = PANEL_WIDE * max(1, len(panels))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {HIGH}" width="{wide}" height="{HIGH}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#111827">',
        f"<title>{TITLE}</title>",
        f'<rect width="{wide}" height="{HIGH}" fill="#ffffff"/>',
    ]
    if panels:
        lines += legend(panels[0][1])
    for index, (title, curves) in enumerate(panels):
        lines += panel(index * PANEL_WIDE, title, curves)
    return "\n".join([*lines, "</svg>"]) + "\n"


def stroke(curve: Curve) -> str:
    """How a line is drawn."""
    dashes = "6 4" if curve.dashed else "none"
    return f'stroke="{curve.colour}" stroke-width="2.5" stroke-dasharray="{dashes}"'


def legend(curves: list[Curve]) -> Iterator[str]:
    """The names, in two rows above the first panel."""
    for index, curve in enumerate(curves):
        x, y = LEFT + 180 * (index // 2), 20 + 18 * (index % 2)
        yield f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" {stroke(curve)}/>'
        yield f'<text x="{x + 28}" y="{y + 4}">{curve.name}</text>'


def panel(offset: int, title: str, curves: list[Curve]) -> Iterator[str]:
    """One frame with its lines."""
    sizes = sorted({tokens for curve in curves for tokens, _ in curve.points})
    least, most = math.log2(sizes[0]), math.log2(max(sizes[-1], 2 * sizes[0]))
    unit = step(max(rate for curve in curves for _, rate in curve.points) / LINES)
    top = unit * math.ceil(max(rate for curve in curves for _, rate in curve.points) / unit)
    left, right, floor = offset + LEFT, offset + PANEL_WIDE - RIGHT, HIGH - BOTTOM

    def x(tokens: int) -> float:
        return left + (math.log2(tokens) - least) / (most - least) * (right - left)

    def y(rate: float) -> float:
        return floor - rate / top * (floor - TOP)

    yield f'<text x="{left}" y="70" font-weight="600">{title}, GB/s</text>'
    for line in range(round(top / unit) + 1):
        rate = line * unit
        yield f'<line x1="{left}" y1="{y(rate):.1f}" x2="{right}" y2="{y(rate):.1f}" stroke="#e5e7eb"/>'
        yield f'<text x="{left - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:g}</text>'
    for tokens in sizes:
        name = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
        at = f"{x(tokens):.1f}"
        yield f'<line x1="{at}" y1="{floor}" x2="{at}" y2="{floor + 4}" stroke="#9ca3af"/>'
        yield f'<text x="{at}" y="{floor + 18}" text-anchor="middle" font-size="11">{name}</text>'
    middle, foot = (left + right) / 2, HIGH - 10
    yield f'<text x="{middle:.1f}" y="{foot}" text-anchor="middle" fill="#4b5563">tokens of the prompt</text>'
    for curve in curves:
        path = " ".join(f"{x(tokens):.1f},{y(rate):.1f}" for tokens, rate in curve.points)
        yield f'<polyline points="{path}" fill="none" {stroke(curve)}/>'
        if not curve.dashed:
            for tokens, rate in curve.points:
                yield f'<circle cx="{x(tokens):.1f}" cy="{y(rate):.1f}" r="3" fill="{curve.colour}"/>'


def step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... and so on down that is no smaller."""
    unit = 10 ** math.floor(math.log10(least))
    return next(times * unit for times in (1, 2, 5, 10, 20) if times * unit >= least * (1 - 1e-9))
