"""The README's picture, drawn from the kept records: tokens/s of one request beside what memory allows, and peers.

    python benchmarks/picture.py            writes docs/speed-light.svg and docs/speed-dark.svg; a test compares

Of each greedy `kog bench compare` of TEST: our GPU backends and the fastest peer. A bar's length is the share of what
memory allows, bytes of a token over the read bandwidth that the same run measured, so that models of any size share
one axis; the figure on it is tokens/s.
"""

import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from kog_triton.bench.table import is_timed, newest_of, read_results

ROOT = Path(__file__).resolve().parents[1]
TEST = "tg256 @ d32"
BACKENDS = {"cuda": "kog, CUDA", "triton": "kog, Triton"}
PEERS = {
    "transformers": "transformers, eager",
    "transformers-compiled": "transformers, torch.compile",
    "transformers-tuned": "transformers, torch.compile, tuned",
    "torch-graph": "plain torch in a CUDA graph",
    "torch-narrow": "torch's narrow products in a CUDA graph",
    "llama-bench": "llama.cpp",
}
SHAPES = {
    "laneformer-2b": "Laneformer-2B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-8b": "Qwen3-8B",
}

Colors = dict[str, str]
THEMES: dict[str, Colors] = {  # as GitHub's pages are, light and dark
    "light": {
        "text": "#1f2328",
        "muted": "#59636e",
        "limit": "#bc4c00",
        "cuda": "#4c3fbf",
        "triton": "#8278d6",
        "peer": "#d5dae0",
    },
    "dark": {
        "text": "#f0f6fc",
        "muted": "#9198a1",
        "limit": "#f0883e",
        "cuda": "#6e5ff0",
        "triton": "#4a3f9e",
        "peer": "#343b44",
    },
}
SIZE = 13  # of words that have no other
FONT = "system-ui, Helvetica, Arial, sans-serif"
# What a word is like, by the classes it has; a theme's colors are classes, too.
STYLE = ".on{fill:#fff}.b{font-weight:600}.e{text-anchor:end}.c{text-anchor:middle}.pale{fill-opacity:.8}"
WIDTH, LEFT, AXIS = 880, 184, 616  # of the picture; where bars begin; how long one at the limit is
TOP, BAR, STEP, BETWEEN, BOTTOM = 92, 22, 26, 20, 56  # heights
OUTSIDE = 0.6  # a bar shorter than this has its words behind it, not on it


def groups(records: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each model's record and the rows to show, smallest model first: ours, then the fastest peer."""
    out = []
    for (_, _, name), record in newest_of(records).items():
        if record["kind"] != "compare" or name != TEST or record["test"]["num_gpus"] != 1:
            continue
        timed = {row["name"]: row for row in record["rows"] if is_timed(row)}
        peers = [row for row in timed.values() if row["kind"] == "peer"]
        best = max(peers, key=lambda row: row["host"]["tokens_per_s"], default=None)
        shown = [timed[name] for name in BACKENDS if name in timed]
        out.append((record, shown + ([best] if best else [])))
    return sorted(out, key=lambda group: group[1][0]["floor"]["bytes"])


def allowed(row: dict[str, Any]) -> float:
    """Tokens/s if nothing but the bytes of a token took time, at the bandwidth that the run measured."""
    return 1e6 / row["floor"]["measured_us"]


def words(x: float, y: float, what: str, kind: str = "", size: int = SIZE) -> str:
    more = f' class="{kind}"' if kind else ""
    more += f' font-size="{size}"' if size != SIZE else ""
    return f'<text x="{round(x, 1):g}" y="{y:g}"{more}>{what}</text>'


def bar(row: dict[str, Any], y: float) -> list[str]:
    """One engine's bar with its name, tokens/s and share."""
    kind = row["name"] if row["name"] in BACKENDS else "peer"
    name = BACKENDS.get(row["name"]) or PEERS[row["name"]]
    rate, share = row["host"]["tokens_per_s"], row["floor"]["measured_mbu"]
    length, base = share * AXIS, y + BAR - 6.5
    drawn = f'<rect x="{LEFT}" y="{y:g}" width="{length:.1f}" height="{BAR}" rx="3" class="{kind}"/>'
    pale = f'dx="7" class="{"muted" if share < OUTSIDE else "pale"}"'
    said = f'<tspan class="b">{rate:,.0f}</tspan><tspan {pale}>{share:.0%}</tspan>'
    if share < OUTSIDE:
        return [drawn, words(LEFT + length + 9, base, f"{said}<tspan {pale}>{name}</tspan>")]
    end = LEFT + min(length, AXIS) - 9  # never across the line of the limit
    return [drawn, words(LEFT + 9, base, name, "on"), words(end, base, said, "on e")]


def told(shown: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> str:
    """The picture in words, for who cannot see it."""
    return " ".join(
        f"{SHAPES[record['model']['name']]}: memory allows {allowed(rows[0]):,.0f} tokens/s; "
        + ", ".join(
            f"{BACKENDS.get(row['name']) or PEERS[row['name']]} {row['host']['tokens_per_s']:,.0f}" for row in rows
        )
        + "."
        for record, rows in shown
    )


def picture(records: list[dict[str, Any]], colors: Colors) -> str:
    """The SVG."""
    shown = groups(records)
    limit = LEFT + AXIS
    gpus = sorted({record["machine"]["gpu"].removeprefix("NVIDIA ") for record, _ in shown})
    days = sorted({record["created"][:10] for record, _ in shown})
    body = [
        words(0, 24, f"Tokens per second of one request on one {' / '.join(gpus)}", "b", 20),
        words(
            0, 48,
            "Greedy, 256 tokens behind a prompt of 32, random 16-bit weights; every text checked before it is timed",
            "muted",
        ),
        words(limit, TOP - 14, "what memory allows", "limit b c"),
    ]  # fmt: skip
    bars, y = [], float(TOP)
    for record, rows in shown:
        middle = y + (len(rows) * STEP - (STEP - BAR)) / 2
        size = rows[0]["floor"]["bytes"] / 1e9
        body.append(words(LEFT - 16, middle - 1, SHAPES[record["model"]["name"]], "b e", 14))
        body.append(words(LEFT - 16, middle + 16, f"{size:.1f} GB a token", "muted e", 12))
        for i, row in enumerate(rows):
            bars += bar(row, y + i * STEP)
        body.append(words(limit + 24, middle + 5, f"{allowed(rows[0]):,.0f}", "limit b", 15))
        y += len(rows) * STEP + BETWEEN
    bottom = y - BETWEEN
    line = (
        f'<line x1="{limit}" y1="{TOP - 6}" x2="{limit}" y2="{bottom + 2:g}" '
        f'stroke="{colors["limit"]}" stroke-width="2"/>'
    )
    notes = (
        "A bar is as long as its share of what memory allows: a token's bytes over the read bandwidth of the same run. "
        "It can pass 100 %:",
        "some of what a token reads was left in the L2 by the one before. "
        f"Drawn by benchmarks/picture.py from records of {', '.join(days)}.",
    )
    for i, note in enumerate(notes):
        body.append(words(0, bottom + 32 + 17 * i, note, "muted", 12))
    height = bottom + BOTTOM
    style = "".join(f".{kind}{{fill:{color}}}" for kind, color in colors.items() if kind != "text")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" role="img" font-family="{FONT}" font-size="{SIZE}" '
            f'fill="{colors["text"]}">',
            "<title>Tokens per second of one request, beside what memory allows</title>",
            f"<desc>{escape(told(shown))}</desc>",
            f"<style>{STYLE}{style}</style>",
            *body,
            *bars,
            line,
            "</svg>\n",
        ]
    )


def main() -> int:
    records = read_results(ROOT / "benchmarks" / "results")
    for name, colors in THEMES.items():
        (ROOT / "docs" / f"speed-{name}.svg").write_text(picture(records, colors), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
