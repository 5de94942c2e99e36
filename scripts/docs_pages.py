"""docs_pages.py OUT: writes what mkdocs reads: OUT/pages with the README, docs/ and a page a public header, and OUT/mkdocs.yml."""
import json
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ["core", "kernels", "gradients", "autograd", "nn", "data", "observe", "optim", "amp", "checkpointing",
           "parallel", "libtorch"]
GUIDES = ["tutorial", "installing", "architecture", "naming", "errors", "environment", "performance", "results", "measuring",
          "gpu", "cuda_report"]


def title_of(page):
    found = re.search(r"^# (.+)$", page.read_text(), re.M)
    return found[1] if found else page.stem


def header_page(header, folder):
    """The comment at its head as text, the rest as code."""
    lines = header.read_text().splitlines()
    head = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    words = "\n".join(re.sub(r"^///? ?", "", line) for line in lines[:head])
    code = "\n".join(lines[head:]).strip()
    return f"# {folder}/{header.name}\n\n`#include <cairn/{folder}/{header.name}>`, in `cairn::{folder}`\n\n{words}\n\n```cpp\n{code}\n```\n"


def rewritten(text, prefix):
    """Links that left docs/ for the tree: to headers' pages, to pages, or to no page at all."""
    text = re.sub(r"\]\((?:\.\./)*[\w/]+/include/cairn/(\w+)/(\w+)\.h\)", rf"]({prefix}reference/\1/\2.md)", text)
    text = re.sub(r"\[([^\]]*)\]\(docs/adr\)", r"[\1](adr/0001-f32-master-belongs-to-the-parameter.md)", text)
    text = text.replace("](docs/", "](")
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?!adr|images)[^)#]*\)", r"\1", text)


def main():
    out = pathlib.Path(sys.argv[1])
    pages = out / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages)
    for page in pages.rglob("*.md"):
        page.write_text(rewritten(page.read_text(), "../" if page.parent != pages else ""))
    (pages / "index.md").write_text(rewritten((ROOT / "README.md").read_text(), ""))
    reference = []
    for folder in FOLDERS:
        headers = sorted((ROOT / folder).glob(f"**/include/cairn/{folder}/*.h"), key=lambda header: header.name)
        for header in headers:
            page = pages / "reference" / folder / f"{header.stem}.md"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(header_page(header, folder))
        if headers:
            reference.append({folder: [{header.name: f"reference/{folder}/{header.stem}.md"} for header in headers]})
    guides = [name for name in GUIDES if (pages / f"{name}.md").exists()]
    others = sorted(page.stem for page in pages.glob("*.md") if page.stem not in [*guides, "index"])
    named = lambda names: [{title_of(pages / f"{name}.md"): f"{name}.md"} for name in names]
    decisions = [{title_of(page): f"adr/{page.name}"} for page in sorted((pages / "adr").glob("*.md"))]
    config = {
        "site_name": "Cairn", "docs_dir": str(pages), "site_dir": str(out / "site"), "use_directory_urls": False,
        "theme": {"name": "material", "font": False,
                  "features": ["navigation.tabs", "navigation.top", "search.highlight", "content.code.copy"],
                  "palette": [{"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "blue grey"},
                              {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "blue grey"}]},
        "plugins": ["search", "offline"],
        "markdown_extensions": ["tables", "admonition", "pymdownx.superfences", "pymdownx.highlight",
                                {"toc": {"permalink": True}}],
        "validation": {"anchors": "warn", "links": {"not_found": "warn", "unrecognized_links": "info"}},
        "nav": [{"Start": "index.md"}, {"Guides": named(others)}, {"About": named(guides)}, {"Reference": reference},
                {"Decisions": decisions}],
    }
    (out / "mkdocs.yml").write_text(json.dumps(config, indent=1))  # JSON is YAML


main()
