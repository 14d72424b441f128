"""What goes to the process that follows a script, and what comes back."""

from __future__ import annotations

from trimtab.scripts.inputs import ScriptInput
from trimtab.scripts.longest import LongestSample
from trimtab.spec import Device, Noun, ScriptCommand, ScriptFact, Trace


class ScriptRequest(Noun, frozen=True, kw_only=True):
    """A command to follow on a device."""

    command: ScriptCommand
    device: Device
    devices: int = 1
    """GPUs that the script sees on its node."""
    scratch: str
    """Folder that takes whatever the script writes."""
    files: dict[str, str] = {}
    """Texts of config files that the script finds in place of the user's, by absolute path."""


class ScriptResult(Noun, frozen=True, kw_only=True):
    """What was found out by following a script, or the error."""

    error: dict[str, str] = {}
    """An error as `error_from_dict` reads it; empty if there is none."""
    trace: Trace | None = None
    facts: tuple[ScriptFact, ...] = ()
    windows: tuple[tuple[str, int, int], ...] = ()
    """Phases: their name, and where in the trace's order they begin and end."""
    steps: int = 0
    compiled_graphs: int = 0
    """Graphs that torch's own compiler compiled. If it compiled none, compiled code was followed as eager."""
    accumulation: int = 1
    """Backward passes of a step that repeat the same work, or work of another size."""
    is_mean: bool = False
    """Whether they differ in size, and the trace has the work of the one nearest to their mean."""
    passes: int = 0
    """Backward passes in all steps."""
    passes_of_step: int = 0
    """Backward passes in the last step, whether they repeat the same work or not."""
    fetched: tuple[tuple[int, int], ...] = ()
    """Batches that loaders gave for training by their number of samples: the number, and how many batches."""
    micro_batches: tuple[tuple[int, int], ...] = ()
    """Training calls of the model by the first side of their input: the side, and how many."""
    lengths: tuple[tuple[int, int], ...] = ()
    """The same by the second side of an input of indices: the length of sequences."""
    longest: LongestSample | None = None
    """The longest sequence that the data set can give; None if it does not say."""
    loader_s: float | None = None
    """Mean seconds of the CPU for one batch of the script's loaders; None if it has none."""
    writes: tuple[str, ...] = ()
    """Files that the script would have written, with their sizes."""
    notes: tuple[str, ...] = ()
    inputs: tuple[ScriptInput, ...] | None = None
    """Files that the script read; None if there are too many to cache the result."""
    is_cached: bool = False
