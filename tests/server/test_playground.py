"""The page at / as files: all there, of the right types, behind a policy that lets nothing else in."""

import gzip
import re
from pathlib import PurePath

import pytest

from kog_triton.server.routes.playground import page_files
from tests import ROOT

FOLDER = ROOT / "kog_triton" / "server" / "playground"
OWN = sorted(path for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".html", ".svg"))
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
POLICY = {
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types dompurify",
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def text_of(path):
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def test_every_file_is_served_under_the_policy(server):
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert len(files) > 30 and set(page_files()) == {
        path.relative_to(FOLDER).as_posix().removesuffix(".gz") for path in files
    }
    paths = {"/": FOLDER / "index.html"}
    paths |= {f"/playground/{path.relative_to(FOLDER).as_posix()}": path for path in files}
    paths = {url.removesuffix(".gz"): path for url, path in paths.items()}
    with server.client() as client:
        for url, path in paths.items():
            found = client.get(url)
            assert found.status_code == 200 and found.content == text_of(path), url
            kind = found.headers["content-type"].split(";")[0]
            assert kind == TYPES.get(PurePath(url).suffix, "text/html" if url == "/" else "text/plain")
            assert set(found.headers["content-security-policy"].split("; ")) == POLICY
            assert found.headers["x-content-type-options"] == "nosniff"
            again = client.get(url, headers={"if-none-match": found.headers["etag"]})
            assert again.status_code == 304 and not again.content
            assert "content-security-policy" in again.headers


@pytest.mark.parametrize("path", ["nothing.js", "", "../wire.py", "%2e%2e/wire.py", "vendor"])
def test_there_is_nothing_beside_the_files(server, path):
    assert server.get(f"/playground/{path}").status_code == 404


def test_the_api_s_description_leaves_the_page_out(server):
    assert not [p for p in server.get("/openapi.json").json()["paths"] if "playground" in p]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.relative_to(FOLDER).as_posix())
def test_every_import_is_one_of_the_files(path):
    for name in re.findall(r'^import (?:[^"\n]* from )?"([^"]+)";', path.read_text(), re.MULTILINE):
        assert name.startswith("./") and name.removeprefix("./") in page_files(), name


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name)
def test_the_page_s_own_files_are_small_and_ask_nobody_else(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 400
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not addresses
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|document\.write)\b", text)
    assert not re.search(r'\sstyle="|<style|<script>|\son[a-z]+="', text)


def test_every_library_has_its_licence_and_its_version_is_told():
    told = (ROOT / "docs" / "PLAYGROUND.md").read_text(encoding="utf-8")
    folders = [path for path in (FOLDER / "vendor").iterdir() if path.is_dir()]
    assert {path.name for path in folders} == {"dompurify", "highlight", "marked"}
    for folder in folders:
        licence = (folder / "LICENSE").read_text(encoding="utf-8")
        if "Its text is kog_triton's own" in licence:
            assert "Apache License 2.0" in licence
            licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
            assert "Apache License" in licence
        assert len(licence) > 1000
        heads = {
            found[1]
            for path in folder.glob("*.js.gz")
            if (found := re.search(rb"\bv?(\d+\.\d+\.\d+)\b", text_of(path)[:400]))
        }
        (version,) = heads
        pattern = rf"{folder.name}[^|]*\| {re.escape(version.decode())} \|"
        assert re.search(pattern, told), (folder, version)


def test_a_page_that_wants_a_key_is_shown_without_one(tmp_path, checkpoint):
    from tests.lib.served import served

    with served(tmp_path, checkpoint, "--api-key", "secret") as guarded:
        assert guarded.get("/").status_code == 200
        assert guarded.get("/playground/main.js").status_code == 200
        for path in ("/props", "/playground", "/playgrounds", "/v1/models"):
            assert guarded.get(path).status_code == 401, path
