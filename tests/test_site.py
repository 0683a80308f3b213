"""The documentation site as `make site` builds it: the notebook's answers and pictures, every module, every link."""

import posixpath
import re
import subprocess
import sys
from html import unescape
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from scripts import ROOT

import pod

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages: path in the site -> HTML. What mkdocs, mkdocstrings or the notebook warns of ends the build."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-5000:]
    return {str(path.relative_to(out)): path.read_text() if path.suffix == ".html" else "" for path in out.rglob("*")}


def words(html):
    return unescape(re.sub(r"<[^>]+>", "", html))


def test_the_readme_is_the_first_page(site):
    assert "<h1" in site["index.html"]
    assert (ROOT / "README.md").read_text().splitlines()[0].removeprefix("# ") in words(site["index.html"])


def test_every_module_and_public_name_is_in_the_reference(site):
    for folder in (ROOT / "pod", ROOT / "kernels/pod_kernels"):
        for path in folder.rglob("*.py"):
            place = path.relative_to(folder.parent).with_suffix("")
            name = ".".join(place.parts).removesuffix(".__init__")
            if not place.name.startswith("__") or place.name == "__init__":
                page = f"api/{place.parent / 'index' if place.name == '__init__' else place}.html"
                assert f'id="{name}"' in site[page], page
    for name in pod.__all__:
        assert f'id="pod.{name}"' in site["api/pod/index.html"] or isinstance(getattr(pod, name), ModuleType), name


def test_arguments_that_share_a_line_have_one_each(site):
    """What griffe reads of `k, v: ...` and of a package's list of files."""
    printed = " ".join(words(site["api/pod_kernels/attention.html"]).split())
    assert all(f" {name} (Tensor) – [B, H_kv, T, D] keys" in printed for name in ("k", "v"))
    assert "<code>snapkv.py, pyramidkv.py" in site["api/pod/eviction/index.html"]


def test_the_notebook_shows_what_it_promises(site):
    page = site["docs/first_steps.html"]
    printed = words(page)
    dense, small, evicted = (
        int(re.search(rf"^{who}: answer .*, cache ([\d,]+) bytes", printed, re.MULTILINE)[1].replace(",", ""))
        for who in ("dense", "PoD", "PoD and SnapKV")
    )
    assert "dense: answer 48213," in printed
    assert evicted < 0.25 * dense and small < 0.9 * dense
    assert "PodLlamaForCausalLM with the same logits: True" in printed
    assert len(re.findall(r'<img[^>]* src="data:image/png', page)) == 4


def test_links_lead_somewhere(site):
    """Within the site, the API and the notebook included; nothing is loaded from elsewhere."""
    anchors = {name: set(re.findall(r' (?:id|name)="?([^" >]+)', html)) for name, html in site.items()}
    for name, html in site.items():
        assert not re.search(
            r'<(?:script|img|iframe)[^>]* src="?https?:|<link[^>]* rel="?stylesheet"?[^>]*https?:', html
        )
        for link in re.findall(r'<a [^>]*href="([^"]+)"', html):
            target = urlsplit(unescape(link))
            if target.scheme or name == "404.html":
                continue
            page = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(target.path)))
            page = name if not target.path else "index.html" if page == "." else page
            assert page in site, f"{name}: {link}"
            heading = unquote(target.fragment)
            assert not heading or heading.startswith("__") or heading in anchors[page], f"{name}: {link}"
