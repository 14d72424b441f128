"""The transformers library, for the jobs that need it: an extra, so it may be missing."""

from __future__ import annotations

from typing import Any

from trimtab.errors import EnvironmentFault


def library(who: str) -> Any:
    """The module `transformers`, or an error that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFault(
            who,
            found=f"it needs the package 'transformers', which cannot be imported here ({error})",
            cure="Install it: pip install 'trimtab[jobs]'",
        ) from error
    return transformers
