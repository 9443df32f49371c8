"""The page at /, and the files that it is made of: read once, sent with a policy that lets nothing else in.

They are files of the package and hold no secret, so no API key is asked for them: the page asks for one. Libraries lie
there compressed, and are sent so.
"""

import mimetypes
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from fastapi import APIRouter, Request
from starlette.responses import Response

from kog_triton.server.problems import Problem

router = APIRouter(include_in_schema=False)
INDEX = "index.html"
TYPES = {".js": "text/javascript"}  # which mimetypes leaves to the system
HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            *(f"{what} 'self'" for what in ("script-src", "style-src", "img-src", "connect-src")),
            *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
            "require-trusted-types-for 'script'",
            "trusted-types dompurify",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # ask again: a newer package may run at this address
}


@dataclass(frozen=True)
class PageFile:
    data: bytes
    kind: str
    compressed: bool

    @property
    def headers(self) -> dict[str, str]:
        tag = {"etag": f'"{sha256(self.data).hexdigest()[:20]}"'}
        return HEADERS | tag | ({"content-encoding": "gzip"} if self.compressed else {})


@cache
def page_files() -> dict[str, PageFile]:
    """By their paths below the folder, those of compressed ones without .gz."""
    found: dict[str, PageFile] = {}

    def add(folder: Traversable, path: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                add(entry, f"{path}{entry.name}/")
            else:
                name = entry.name.removesuffix(".gz")
                kind = TYPES.get(PurePath(name).suffix) or mimetypes.guess_type(name)[0]
                file = PageFile(entry.read_bytes(), kind or "text/plain", name != entry.name)
                found[path + name] = file

    add(files("kog_triton.server") / "playground", "")
    return found


def _send(request: Request, path: str) -> Response:
    found = page_files().get(path)
    if found is None:
        raise Problem(404, "no such file of the playground")
    headers = found.headers
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.kind, headers=headers)


@router.get("/")
async def page(request: Request) -> Response:
    return _send(request, INDEX)


@router.get("/playground/{path:path}")
async def page_file(request: Request, path: str) -> Response:
    return _send(request, path)
