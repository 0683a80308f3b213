"""What mkdocs.yml cannot say: the pages outside docs/, links in a notebook, and docstrings as Markdown.

`make site` builds the site. griffe reads the docstrings without importing the library.
"""

import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "eval/RESULTS.md")


@event_priority(100)  # before the plugin that looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files under their paths in the repository, so that a link from page to page is the same there and here."""
    ours = [file.src_uri for file in files if file.src_dir == config.docs_dir]
    for name in ours:
        files.remove(files.get_file_from_path(name))
    for name in (*PAGES, *(f"docs/{name}" for name in ours)):
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_content(html: str, page: Page, **_: object) -> str:
    """mkdocs follows the links of Markdown only."""
    return re.sub(r'(href="[\w/.]+)\.md\b', r"\1.html", html) if page.file.src_uri.endswith(".ipynb") else html


class Docstrings(griffe.Extension):
    """griffe knows one argument a line, and a package's list of files has to become a list."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            text = re.sub(r"^(\S+\.py(?:, \S+\.py)*|[a-z]+/) {2,}(?=\S)", r"- `\1`: ", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"^    (\w+(?:, \w+)+):( .*(?:\n {5,}.*)*)", one_each, text, flags=re.M)

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        self.on_object(obj=pkg)


def one_each(found: re.Match[str]) -> str:
    """`    k, v: text` as a line for each of the names."""
    return "\n".join(f"    {name}:{found[2]}" for name in found[1].split(", "))
