"""A recording as a table for people: a row a span, in the order of the walk, and how to read it.

    us/run     a mean run of a block that takes the span            us/token  of a mean block; adds up
    weights    of that, what a mean warp waits for weights          critical  see analysis.py
    GB/s       the stage's bytes over us/run                        roofline us bytes over bandwidth, a run

A stage whose weights came while its block waited elsewhere can be faster than its roofline; the step cannot.
"""

from rich.table import Table

from kog_triton.backends.recording import RankRecording, Recording
from kog_triton.cli.console import Output, plain_table
from kog_triton.profiling.analysis import Figure, Timeline, figures
from kog_triton.profiling.ranks import Exposed, RankTimeline, exposed
from kog_triton.schedule.topology import Gpu


def show(recording: Recording, line: Timeline, rows: list[Figure], gpu: Gpu | None, title: str) -> None:
    """Print table and notes on stdout."""
    console = Output()
    console.write_table(span_table(rows, gpu, title))
    for text in notes(recording, line, rows, gpu):
        console.write_line(text)


def show_ranks(recording: RankRecording, lines: RankTimeline, gpu: Gpu | None, title: str) -> None:
    """Print each GPU's table and notes, then what all wait for each other, on stdout."""
    console = Output()
    for i, (one, line) in enumerate(zip(recording.each, lines.each, strict=True)):
        show(one, line, figures(one, line), gpu, f"{title}: GPU {i}")
    console.write_table(exposed_table(exposed(lines), lines))
    for i, clock in enumerate(lines.clocks, 1):
        console.write_line(
            f"GPU {i}'s clock is {clock.offset:+,} ns beside GPU 0's and drifts by {clock.drift:+.2e} (give or take "
            f"{clock.drift_error:.0e}); a time of GPU {i} may lie {clock.error:.0f} ns from where it stands"
        )


def exposed_table(rows: list[Exposed], lines: RankTimeline) -> Table:
    """A row a GPU and span, and the sum of each GPU."""
    table = plain_table(
        ["GPU", "span", "runs", "us/token", "largest", "share"],
        "exposed communication: a mean block's waits for other GPUs alone",
    )
    for gpu in range(len(lines.each)):
        own = [row for row in rows if row.gpu == gpu]
        for row in own:
            cells = f"{row.token / 1e3:.2f}", f"{row.largest / 1e3:.2f}", f"{row.share:.2%}"
            table.add_row(str(gpu), row.name, str(row.runs), *cells)
        token, share = sum(row.token for row in own), sum(row.share for row in own)
        table.add_row(str(gpu), "all", "", f"{token / 1e3:.2f}", "", f"{share:.2%}")
    return table


def span_table(rows: list[Figure], gpu: Gpu | None, title: str) -> Table:
    names = ["span", "runs", "us/run", "largest", "us/token", "share", "weights", "critical"]
    table = plain_table([*names, "GB/s", "roofline us"], title)
    total = sum(row.token for row in rows)
    for row in rows:
        rate = row.num_bytes / row.mean if row.num_bytes and row.mean else None  # bytes / ns
        roofline = row.num_bytes / gpu.bandwidth * 1e6 if row.num_bytes and gpu else None
        table.add_row(
            f"{row.name} (wait)" if row.waits else row.name,
            str(row.runs),
            f"{row.mean / 1e3:.2f}",
            f"{row.largest / 1e3:.2f}",
            f"{row.token / 1e3:.1f}",
            f"{row.token / total:.1%}",
            f"{row.weights / 1e3:.1f}",
            f"{row.critical / 1e3:.1f}",
            "-" if rate is None else f"{rate:,.0f}",
            "-" if roofline is None else f"{roofline:.2f}",
        )
    return table


def notes(recording: Recording, line: Timeline, rows: list[Figure], gpu: Gpu | None) -> list[str]:
    """The step as a whole, what the stamps cost, and how well the clocks are known."""
    total = sum(row.token for row in rows)
    waiting = sum(row.token for row in rows if row.waits) / total
    weights = sum(row.weights for row in rows) / total
    critical = sum(row.critical for row in rows)
    waits = sum(row.critical for row in rows if row.waits)
    out = [
        f"a token takes {line.token_ns / 1e3:.1f} us: a mean block waits {waiting:.1%} of it for other "
        f"blocks, and a mean warp {weights:.1%} of it for weights",
        f"critical path: {critical / 1e3:.1f} us, {waits / 1e3:.1f} of them the least wait of any block",
    ]
    rate = recording.token_bytes / line.token_ns
    bytes_line = f"{recording.token_bytes / 1e9:.3f} GB of weights a token: {rate:,.0f} GB/s"
    if gpu:
        roofline = recording.token_bytes / gpu.bandwidth * 1e6
        share = rate * 1e9 / gpu.bandwidth
        bytes_line += f", {share:.1%} of {gpu.name}'s datasheet: its roofline is {roofline:.1f} us"
    out.append(bytes_line)
    if len(recording.plain_step_ns):
        plain = float(recording.plain_step_ns.mean())
        out.append(
            f"without stamps the same steps take {plain / 1e3:.1f} us: the stamps cost {line.token_ns / plain - 1:+.1%}"
        )
    strayed = line.clock_error
    error = (
        "how straight it is takes two tokens"
        if strayed is None
        else (f"a reading lies at most {strayed:.0f} ns from the line through those beside it")
    )
    out.append(
        f"clocks: a line from one reading to the next, a token apart, for each block; they step by "
        f"{line.clock_step} ns, and {error}"
    )
    return out
