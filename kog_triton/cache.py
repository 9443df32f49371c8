"""`kog cache`: what is kept on disk between runs, where and how much; `kog cache clear` empties what is ours."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kog_triton.cli.arguments import Parser
from kog_triton.cli.command import end_process, run
from kog_triton.errors import RequestError


def listed() -> list[dict[str, Any]]:
    """Every cache, ready for JSON."""
    from kog_triton.cli.caches import caches

    rows = []
    for cache in caches():
        files = cache.files()
        rows.append(
            {
                "name": cache.name,
                "what": cache.what,
                "path": None if cache.path is None else str(cache.path),
                "variable": cache.variable,
                "files": len(files),
                "bytes": sum(size for _, size in files),
                "cleared_by_kog": cache.ours,
            }
        )
    return rows


def clear(names: Sequence[str]) -> list[Path]:
    """Delete the files of our caches of these names, or of all; those that were deleted."""
    from kog_triton.cli.caches import caches

    ours = {cache.name: cache for cache in caches() if cache.ours}
    for name in names:
        if name not in ours:
            raise RequestError(f"no cache named {name!r} is kog's to clear: have {', '.join(ours)}")
    gone = []
    for name in names or ours:
        for file, _ in ours[name].files():
            with contextlib.suppress(FileNotFoundError):
                try:
                    file.unlink()
                except PermissionError as error:
                    raise RequestError(f"{file}: cannot be deleted: {error.strerror}") from error
                gone.append(file)
    return gone


def _body(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="kog cache", description="List or clear what is kept between runs.")
    parser.add_argument("action", nargs="?", choices=("list", "clear"), default="list", help="default: list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to clear (default: all that are kog's)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    if args.action == "clear":
        gone = clear(args.names)
        print(json.dumps([str(file) for file in gone]) if args.json else f"{len(gone)} files deleted")
        return 0
    if args.names:
        raise RequestError(f"list takes no names: {args.names[0]!r} is for clear")
    rows = listed()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    from kog_triton.cli.console import Output, plain_table

    table = plain_table(["cache", "files", "MB", "moved by"])
    for row in rows:
        table.add_row(row["name"], str(row["files"]), f"{row['bytes'] / 1e6:,.1f}", row["variable"])
    console = Output()
    console.write_table(table)
    for row in rows:
        console.write_line(f"{row['name']}: {row['what']}, {row['path'] or 'nowhere: no home'}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
