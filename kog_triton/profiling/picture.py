"""One token as a picture: a line a block, time to the right, a color a span, waits pale."""

from pathlib import Path

import numpy as np

from kog_triton.errors import DeviceError, RequestError
from kog_triton.profiling.analysis import Timeline

INCHES, DPI = (18, 8), 150
PALE = 0.25  # opacity of a wait


def need_matplotlib() -> None:
    """DeviceError if there is none: said before a GPU is opened."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DeviceError('--picture needs matplotlib: pip install "kog-triton[bench]"') from error


def draw(line: Timeline, token: int, file: Path, title: str) -> None:
    """Write the picture; its kind is the file name's ending, PNG, SVG or PDF."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(INCHES)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(dict.fromkeys(span.name for span in line.spans))
    color = {name: colormaps["tab20"](n % 20) for n, name in enumerate(names)}
    origin = np.nanmin(line.starts[token])
    for block in range(line.ends.shape[1]):
        shown = np.flatnonzero(line.seen[token, block])
        starts = line.starts[token, block, shown]
        bars = np.stack([starts - origin, line.ends[token, block, shown] - starts], 1) / 1e3
        spans = [line.spans[i] for i in shown]
        faces = [(*color[span.name][:3], PALE if span.waits else 1.0) for span in spans]
        axes.broken_barh(bars.tolist(), (block - 0.5, 1.0), facecolors=faces)
    waiting = {span.name for span in line.spans if span.waits}
    handles = [Patch(color=(*color[n][:3], PALE if n in waiting else 1.0), label=n) for n in names]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set(xlabel="us", ylabel="block", title=title)
    axes.margins(x=0)
    try:
        figure.savefig(file, dpi=DPI, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise RequestError(f"{file}: cannot be written: {error}") from error
