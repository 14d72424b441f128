"""Hooks of mkdocs for `make docs`: the version in the title, and the pages of the root folder in the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "SECURITY.md": "SECURITY.md"}
"""Pages of the root folder, and their names in the site."""
COPIED = ("CITATION.cff", "LICENSE")
WORKER = """\
// Browsers refuse workers in a page that was opened from a folder. The search then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      script.src = new URL(url, location.href);
      this.ready = new Promise((resolve) => { script.onload = () => resolve(scope); });
      scope.document.documentElement.append(script);
    }
    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
"""
WORKER_FILE = "assets/iframe-worker.js"
"""A name with `iframe-worker` keeps the theme from fetching its own from elsewhere."""


def read_version() -> str:
    """Return the version in the source, without importing trimtab."""
    text = (ROOT / "src" / "trimtab" / "version.py").read_text(encoding="utf-8")
    return text.partition('VERSION = "')[2].partition('"')[0]


def on_config(config: Any) -> Any:
    """Put the version into the title, and the site into a folder of that version."""
    version = read_version()
    config.site_name = f"trimtab {version}"
    config.site_dir = str(ROOT / "site" / version)
    config.extra["polyfills"] = [WORKER_FILE]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root folder."""
    for name, place in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, WORKER_FILE, content=WORKER))
    for name in COPIED:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def move_links(text: str) -> str:
    """Return a page with its links as they are in the site, where all pages are in one folder.

    >>> move_links("[memory](docs/memory.md#how-well), [the list](../README.md#limits)")
    '[memory](memory.md#how-well), [the list](index.md#limits)'
    """
    return re.sub(r"\]\((?:\.\./|docs/)", "](", text).replace("](README.md", "](index.md")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Move the links, and write code blocks in the form that Python-Markdown needs."""
    # A language of a code block is one word there: ```console h200.
    return move_links(re.sub(r"^```console \w+$", "```console", markdown, flags=re.MULTILINE))


def on_post_build(config: Any) -> None:
    """Write the page that leads to the newest version."""
    place = Path(config.site_dir)
    target = f"{place.name}/index.html"
    (place.parent / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
        f'<title>trimtab</title><a href="{target}">trimtab {place.name}</a>\n',
        encoding="utf-8",
    )
