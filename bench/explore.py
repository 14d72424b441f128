"""Measure how long the page of `trimtab explore` takes for an answer from traces already made, in Chromium.

    python bench/explore.py [JOB] [DEVICES]

Moves the slider by keys, over micro-batches that were not asked for before, and reads from the page the time
from the change to the drawn answer. Beside it: the CPU time of the server for further micro-batches, which
other programs on the machine do not lengthen.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import msgspec

from browser import Browser
from trimtab.api.exploring import open_explorer
from trimtab.spec.requests import ExploreRequest

ANSWERS = 24
LIMIT_MS = 100
READY = "document.getElementById('results').dataset.status === 'ready'"
EDGE = "document.getElementById('edge').textContent.startsWith('Fits up to')"


def measure_page(url: str, first: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each answer on the page, and those of them on the server."""
    page, server = [], []
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.size(1200)
        browser.open(url)
        browser.wait_for(READY)
        browser.wait_for(EDGE)
        browser.asks("document.getElementById('slider').focus()")
        for number in range(first + 1, first + 1 + ANSWERS):
            browser.key("ArrowRight", 39)
            command = f"document.getElementById('command').textContent.endsWith('--micro-batch {number}')"
            browser.wait_for(command)
            took = browser.wait_for("document.getElementById('took').dataset.ms")
            page.append(float(took))
            server.append(float(browser.asks("document.getElementById('took').dataset.server")))
    return page, server


def describe(name: str, values: list[float]) -> str:
    """Return a line about some times."""
    quick = sum(value < LIMIT_MS for value in values)
    median, worst = statistics.median(values), max(values)
    return (
        f"{name}: median {median:.0f} ms, worst {worst:.0f} ms; {quick} of {len(values)} below {LIMIT_MS} ms"
    )


def main() -> None:
    """Serve the page, drive it, and print the times."""
    job, on = [*sys.argv[1:], *("slm", "A100-40GB")[len(sys.argv) - 1 :]][:2]
    first = 8
    server = open_explorer(ExploreRequest(job, on, micro_batch=first))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        page, waited = measure_page(server.url, first)
        cpu = []
        start = server.explorer.choices.start()
        for number in range(first + 1 + ANSWERS, first + 1 + 2 * ANSWERS):
            choice = msgspec.structs.replace(start, micro_batch=number)
            began = time.thread_time()
            server.explorer.answer(choice)
            cpu.append(1e3 * (time.thread_time() - began))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        server.explorer.close()
    print(f"{job} on {on}")
    for name, values in (("on the page", page), ("on the server", waited), ("CPU time of the server", cpu)):
        print(f"  {describe(name, values)}")


if __name__ == "__main__":
    main()
