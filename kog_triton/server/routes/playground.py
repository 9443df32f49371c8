"""The page at /, and the files that it is made of: read once, sent with a policy that lets nothing else in.

They are files of the package and hold no secret, so no API key is asked for them: the page asks for one.
"""

import mimetypes
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

from kog_triton.server.problems import Problem

router = APIRouter(include_in_schema=False)
INDEX = "index.html"
TYPES = {".mjs": "text/javascript", ".js": "text/javascript", "": "text/plain"}
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


@cache
def page_files() -> dict[str, tuple[bytes, str, str]]:
    """Path below the folder -> bytes, content type, ETag."""
    found: dict[str, tuple[bytes, str, str]] = {}

    def add(folder: Traversable, path: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                add(entry, f"{path}{entry.name}/")
            else:
                data = entry.read_bytes()
                suffix = entry.name[entry.name.rfind(".") :] if "." in entry.name else ""
                kind = TYPES.get(suffix) or mimetypes.guess_type(entry.name)[0] or "text/plain"
                found[path + entry.name] = data, kind, f'"{sha256(data).hexdigest()[:20]}"'

    add(files("kog_triton.server") / "playground", "")
    return found


def _send(request: Request, path: str) -> Response:
    found = page_files().get(path)
    if found is None:
        raise Problem(404, "no such file of the playground")
    data, kind, tag = found
    headers = HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)


@router.get("/")
async def page(request: Request) -> Response:
    return _send(request, INDEX)


@router.get("/playground/{path:path}")
async def page_file(request: Request, path: str) -> Response:
    return _send(request, path)
