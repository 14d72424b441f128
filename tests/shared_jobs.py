"""Job files that tests share, so that a trace is made once in a session however many tests ask for it."""

from __future__ import annotations

import hashlib
import os
import textwrap
from pathlib import Path


def shared_job(text: str, name: str = "Job") -> str:
    """Return `FILE:NAME` of a job with this source; the same source always has the same file.

    It is beside the cache that the tests share, because a trace is cached by the path of its job.
    """
    source = textwrap.dedent(text).encode()
    file = Path(os.environ["TRIMTAB_CACHE"]) / "jobs" / hashlib.sha256(source).hexdigest()[:12] / "job.py"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Two processes of tests may write it at the same time.
        draft = file.with_name(f"draft-{os.getpid()}")
        draft.write_bytes(source)
        draft.replace(file)
    return f"{file}:{name}"
