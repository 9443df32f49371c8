"""What is read beside the code holds together: links, anchors that constants cite, widths, files, the changelog."""

import re
from collections import Counter

import pytest

import kog_triton
from tests import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("", "docs", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.md"))
}
LOGS = ("benchmarks/README.md", "benchmarks/cuda-log.md", "benchmarks/triton-log.md")
WIDTH = 120
CITED = re.compile(r"\b(benchmarks/[\w-]+\.md)(?:#([\w-]+))?")


def anchors(page):
    """Of a page: what it names itself, and what a heading is called where it is shown."""
    named = re.findall(r'<a id="([\w-]+)"></a>', page)
    titles = re.findall(r"^#+ (.*?)(?: <a id=.*)?$", page, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles]
    return Counter(named), set(named) | set(slugs)


def code():
    """Sources with comments that may cite."""
    for folder in ("kog_triton", "backends", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cu"):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_the_pages_are_read():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/ARCHITECTURE.md", *LOGS} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_an_anchor_is_one_place(page):
    twice = [name for name, times in anchors(PAGES[page])[0].items() if times > 1]
    assert not twice


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', PAGES[page]):
        path, _, anchor = "".join(target).partition("#")
        if path.startswith("https:"):
            continue
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), f"{page}: {path}"
        if anchor:
            known = anchors(PAGES[file.relative_to(ROOT).as_posix()])[1]
            assert anchor in known, f"{page}: {path}#{anchor}"


def test_every_cited_anchor_exists():
    """A comment on a measured constant names the file and the anchor of its measurement."""
    found = 0
    for name, text in [*code(), *PAGES.items()]:
        for page, anchor in CITED.findall(text):
            assert page in PAGES, f"{name}: {page}"
            if anchor:
                found += 1
                assert anchor in anchors(PAGES[page])[0], f"{name}: {page}#{anchor}"
            elif not name.endswith(".md"):
                assert page not in LOGS, f"{name}: {page} without an anchor"
    assert found >= 20


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"docs/GLOSSARY.md"}))
def test_lines_fit(page):
    """Rows of tables, what a program printed and tags are as long as they are, but not in the logs."""
    long, printed = [], False
    for number, line in enumerate(PAGES[page].splitlines(), 1):
        printed ^= line.startswith("```")
        free = page not in LOGS and (line.startswith(("|", "  <img")) or printed)
        generated = page == "benchmarks/RESULTS.md" and line.startswith(("Not timed", "From nothing"))
        if len(line) > WIDTH and not free and not generated:
            long.append(number)
    assert not long


@pytest.mark.parametrize("page", ["README.md", "docs/ARCHITECTURE.md", "CHANGELOG.md"])
def test_every_file_that_is_named_exists(page):
    """By its path, or as a header of the CUDA kernel."""
    names = re.findall(r"`([\w./-]+/[\w.-]+\.\w+|[\w.]+\.h|\.ci/[\w-]+)`", PAGES[page])
    assert names
    homes = (ROOT, ROOT / "backends" / "cuda" / "include" / "kog")
    assert [name for name in names if not any((home / name).exists() for home in homes)] == []


def test_the_changelog_has_this_version_and_the_usual_form():
    text = PAGES["CHANGELOG.md"]
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(kog_triton.__version__)}\] - \d{{4}}-\d\d-\d\d", versions[1])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
