"""naics: embeddings of industry codes, from four short texts a code, in a hyperbolic space.

Four frozen MiniLM encoders with LoRA, one a channel of text; a mixture of experts over their outputs; a
projection, and a map onto the hyperboloid. The loss is contrastive: an anchor must lie nearer to its
positive than to its negatives. model.py has the network, codes.py the codes, pairs.py which of them are set
against which, stages.py the curriculum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from trimtab.errors import WrongUse
from trimtab.jobs.job import Job
from trimtab.jobs.naics.codes import RESERVED, codes, tokens
from trimtab.jobs.naics.model import CHANNELS, NaicsModel
from trimtab.jobs.naics.pairs import negatives_of, read_pairs, rows
from trimtab.jobs.naics.stages import find_stage, read_stages

if TYPE_CHECKING:
    from trimtab.spec.stage import Stage

OF_STAGES = ("pairs", "positives", "negatives", "epochs", "rate")
"""What differs from stage to stage; all else that files say is said once, of the whole training."""


class Naics(Job):
    """105,542,277 parameters, of which 14,689,413 learn; 2,125 codes with 32 positives each."""

    name = "naics"
    additive = True
    global_batch = 256
    samples: int | None = None
    """Rows in an epoch; None: every anchor with its positives."""
    epochs = 5
    codes = 2125
    positives = 32
    """Rows that an anchor has in an epoch, each with another positive while there are others: one positive
    goes through the model with an anchor."""
    negatives = 24
    """Negatives of a row, all of which go through the model."""
    pairs: ClassVar[dict[str, Any]] = {}
    """Which codes may be anchors, positives and negatives: levels, relations, distances, margins."""
    title = 24
    """Tokens of a title; every text is cut off or filled up to its channel's length."""
    text = 512
    """Tokens of each of the other three channels."""
    vocab = 30_522
    positions = 512
    layers = 6
    heads = 12
    width = 384
    wide = 1536
    spread = 0.02
    """Standard deviation of the frozen encoders' weights."""
    rank = 8
    alpha = 16.0
    dropout = 0.1
    experts = 4
    favourites = 2
    expert_width = 1024
    temperature = 0.07
    curvature = 1.0
    balance = 0.01
    rate = 2e-4
    warmup = 500
    """Steps in which the rate rises to its value."""
    decay = 0.01
    clip = 1.0
    pace = 1.0
    """Times every rate: a small model takes larger steps."""
    stage_files = ""
    """A folder with a curriculum of the user's own; empty: the one that ships."""
    stage = ""
    """The stage to be in: it sets positives, negatives, pairs, rate and epochs that are not given."""
    unfelt: ClassVar[tuple[str, ...]] = (
        "pairs",
        "positives",
        "samples",
        "epochs",
        "rate",
        "warmup",
        "pace",
        "stage",
        "stage_files",
    )
    """Options that change neither the memory nor the time of a step."""
    tiny: ClassVar[dict[str, Any]] = {
        "global_batch": 16,
        "samples": 320,
        "epochs": 2,
        "codes": 120,
        "positives": 4,
        "negatives": 4,
        "title": 8,
        "text": 16,
        "vocab": 512,
        "positions": 16,
        "layers": 2,
        "heads": 2,
        "width": 32,
        "wide": 64,
        "spread": 0.2,
        "rank": 4,
        "alpha": 8.0,
        "dropout": 0.0,
        "expert_width": 64,
        "pace": 15.0,
        "warmup": 0,
    }

    def stages(self) -> tuple[Stage, ...]:
        """The curriculum: parts of the training, one after the other."""
        found = read_stages(self.stage_files)
        return tuple(self._fitted(one) for one in found)

    def _fitted(self, stage: Stage) -> Stage:
        """A stage as what it changes of this job; a small one keeps its sizes."""
        small = self.name.endswith(":tiny")
        kept = {
            key: value
            for key, value in stage.options.items()
            if getattr(self, key) != value and (not small or key in OF_STAGES)
        }
        return stage.replace(options=kept)

    def settle(self, given: frozenset[str]) -> None:
        """A stage stands for what it sets."""
        if self.stage and "stage" in given:
            chosen = find_stage(self.stage, self.stages())
            for name, value in chosen.options.items():
                if name not in given:
                    setattr(self, name, value)
        self._check()

    def model(self) -> NaicsModel:
        """The whole, with frozen encoders."""
        self._check()
        return NaicsModel(self)

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Random texts of anchors, each with its positive and its negatives."""
        self._check()
        return {channel: self._random_texts(size, self.length(channel)) for channel in CHANNELS}

    def _random_texts(self, size: int, long: int) -> torch.Tensor:
        ids = torch.randint(RESERVED, self.vocab, (size, 2 + self.negatives, long), dtype=torch.int32)
        lengths = torch.randint(long // 2, long + 1, (*ids.shape[:2], 1))
        return ids * (torch.arange(long) < lengths)

    def length(self, channel: str) -> int:
        """Tokens of a text of that channel."""
        return self.title if channel == "title" else self.text

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """The mean over anchors."""
        return model(batch)

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        """Anchors."""
        return len(batch["title"])

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(params, lr=self.rate * self.pace, weight_decay=self.decay)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """The rate rises in a straight line, and stays."""
        warmup = max(1, self.warmup)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def dataset(self) -> Rows:
        """The codes that ship, as rows of an anchor, a positive and negatives."""
        self._check()
        return Rows(self)

    def _check(self) -> None:
        """Raise for sizes that cannot be."""
        if self.negatives < 1:
            raise WrongUse(
                f"n_negatives of {self.negatives}",
                found="an anchor is told from its negatives: without one the loss is zero, always",
                cure="Give negatives=1 or more.",
            )
        if self.positives < 1:
            raise WrongUse(
                f"n_positives of {self.positives}",
                found="that leaves no rows to learn from",
                cure="Give positives=1 or more.",
            )
        if max(self.title, self.text) > self.positions:
            raise WrongUse(
                f"texts of {max(self.title, self.text)} tokens",
                found=f"the encoders have {self.positions} positions",
                cure=f"Give title and text of at most {self.positions}, or more positions.",
            )


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of an epoch; number 7 is the same whenever and wherever it is made."""

    def __init__(self, job: Naics) -> None:
        self.tree = codes(job.codes)
        self.pairs = read_pairs(job.pairs)
        self.anchors, self.positives = rows(self.tree, self.pairs, job.positives)
        if not len(self.anchors):
            raise WrongUse(
                f"pairs {job.pairs}",
                found=f"of {job.codes} codes, none is an anchor that has a positive and a negative",
                cure="Allow more levels, relations or distances, or smaller margins.",
            )
        self.negatives = job.negatives
        self.count = job.samples or len(self.anchors)
        self.sizes = {channel: (job.codes, channel, job.length(channel), job.vocab) for channel in CHANNELS}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chosen = self.chosen(index)
        return {channel: torch.from_numpy(tokens(*size)[chosen]) for channel, size in self.sizes.items()}

    def chosen(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The codes of a row: anchor, positive, negatives; these repeat where there are too few."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        place = index % len(self.anchors)
        anchor, positive = int(self.anchors[place]), int(self.positives[place])
        allowed = negatives_of(self.tree, self.pairs, anchor, positive)
        draw = np.random.default_rng(index)
        negatives = draw.choice(allowed, self.negatives, replace=len(allowed) < self.negatives)
        return np.array([anchor, positive, *negatives], dtype=np.int64)
