"""The curriculum of naics from YAML: a main config, a file a stage, and a chain that puts them in order.

    FOLDER/config.yaml                     sizes, rates and the global batch that all stages share
    FOLDER/curriculum/01_stage.yaml        which codes are set against which, and how many
    FOLDER/curriculum/chain_default.yaml   the order, with epochs and learning rate of each

Files are known by their keys, so folders and files may have other names. Every key is understood or refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import UnknownName, WrongUse, nearest
from trimtab.jobs.naics.pairs import Pairs, read_pairs
from trimtab.jobs.yaml_files import read_yaml
from trimtab.spec.plan import Stage

if TYPE_CHECKING:
    from collections.abc import Collection

    from trimtab.jobs.yaml_files import YamlPage

SHIPPED = Path(__file__).parent / "conf"
PAIRS = Pairs.__struct_fields__
COUNTS = {"n_positives": "positives", "n_negatives": "negatives"}
CUT = ("batch_size", "accumulate_grad_batches")
"""What `trimtab apply` writes into a stage for other trainers; here every stage is planned."""
STAGE_KEYS = ("name", *PAIRS, *COUNTS, *CUT)
CHAIN_KEYS = ("chain_name", "stages")
LINK_KEYS = ("name", "max_epochs", "learning_rate")
MAIN = {
    "model.lora.r": "rank",
    "model.lora.alpha": "alpha",
    "model.lora.dropout": "dropout",
    "model.moe.num_experts": "experts",
    "model.moe.top_k": "favourites",
    "model.moe.hidden_dim": "expert_width",
    "model.moe.load_balancing_coef": "balance",
    "loss.temperature": "temperature",
    "loss.curvature": "curvature",
    "training.learning_rate": "rate",
    "training.weight_decay": "decay",
    "training.warmup_steps": "warmup",
    "training.trainer.max_epochs": "epochs",
    "training.trainer.gradient_clip_val": "clip",
}
"""Keys of the main config that are options of the job."""
BATCH = ("data_loader.batch_size", "training.trainer.accumulate_grad_batches", "training.trainer.devices")
"""Whose product is the global batch."""
LEFT = (
    "defaults",
    "hydra",
    "experiment_name",
    "seed",
    "dirs",
    "data_loader.num_workers",
    "data_loader.val_split",
    "data_loader.tokenization",
    "data_loader.streaming",
    "model.base_model_name",
    "model.eval_sample_size",
    "model.eval_every_n_epochs",
    "training.trainer.accelerator",
    "training.trainer.num_nodes",
    "training.trainer.strategy",
    "training.trainer.precision",
    "training.trainer.log_every_n_steps",
    "training.trainer.val_check_interval",
)
"""What belongs to another trainer, or to the plan: read, and not used."""
WHOLE = ("rank", "experts", "favourites", "expert_width", "epochs", "warmup")


def read_stages(folder: str) -> tuple[Stage, ...]:
    """The stages that a folder describes, in order; those that ship where none is named."""
    main, files, chains = _sorted_out(Path(folder) if folder else SHIPPED)
    shared = {} if main is None else _main(main)
    found = {file.name: file for file in map(_stage, files)}
    if len(found) < len(files):
        names = [_stage(file).name for file in files]
        twice = next(name for name in names if names.count(name) > 1)
        both = " and ".join(str(file.file) for file in files if _stage(file).name == twice)
        raise WrongUse(f"stage {twice}", found=f"{both} both have this name", cure="Give one another name.")
    links = _chain(chains, found) if chains else [(name, {}) for name in sorted(found)]
    return tuple(_linked(found[name], shared, own) for name, own in links)


def find_stage(given: str, among: tuple[Stage, ...]) -> Stage:
    """One of them by its name, or by the beginning of it.

    >>> find_stage("02", read_stages("")).options["negatives"]
    8
    """
    matches = [stage for stage in among if stage.name == given] or [
        stage for stage in among if given and stage.name.startswith(given)
    ]
    if len(matches) != 1:
        known = [stage.name for stage in among]
        close = nearest(given, known)
        meant = f"; did you mean {close[0]}?" if close and not matches else ""
        how = "several begin so" if matches else "there is none of that name"
        raise UnknownName(f"stage {given!r}", found=f"{how}{meant}", cure=f"There are {', '.join(known)}.")
    return matches[0]


def _sorted_out(folder: Path) -> tuple[YamlPage | None, list[YamlPage], list[YamlPage]]:
    """The main config, the stage files in the order of their names, and the chains of a folder."""
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is no such folder"
        raise WrongUse(f"--stages {folder}", found=found, cure="Name a folder with stage files below it.")
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")]
    files = [path for place in places for path in sorted(place.iterdir()) if path.suffix in (".yaml", ".yml")]
    pages = [read_yaml(file) for file in files]
    kinds: dict[str, list[YamlPage]] = {"main": [], "stage": [], "chain": [], "other": []}
    for page in pages:
        kinds[_kind(page)].append(page)
    beside = {kind.file.parent for kind in kinds["stage"]} - {folder}
    stray = next((kind for kind in kinds["other"] if kind.file.parent in beside), None)
    if stray is not None:
        raise WrongUse(
            str(stray.file),
            found="it lies among stages, and is neither one nor a chain",
            cure=f"A stage has {', '.join(COUNTS)}, and a chain has stages. Move anything else away.",
        )
    if not kinds["stage"]:
        raise WrongUse(
            f"--stages {folder}",
            found=f"none of its {len(files)} YAML files has a key of a stage, such as n_negatives",
            cure="Name a folder with files such as curriculum/01_stage.yaml.",
        )
    if len(kinds["main"]) > 1:
        both = " and ".join(str(kind.file) for kind in kinds["main"][:2])
        raise WrongUse(f"--stages {folder}", found=f"{both} are both main configs", cure="Keep one of them.")
    return next(iter(kinds["main"]), None), kinds["stage"], kinds["chain"]


def _kind(page: YamlPage) -> str:
    body = page.values.get("curriculum", page.values)
    if isinstance(body, dict) and (body.keys() & {*PAIRS, *COUNTS}):
        return "stage"
    if page.values.keys() & set(CHAIN_KEYS):
        return "chain"
    return "main" if page.values.keys() & {"data_loader", "training", "model"} else "other"


def _refuse_unknown(
    page: YamlPage, keys: Collection[str], known: Collection[str], root: tuple[Any, ...]
) -> None:
    for key in keys:
        if key not in known:
            close = nearest(key, known)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UnknownName(
                page.at(*root, *key.split(".")),
                found=f"there is no key {key}{meant}",
                cure=f"There are {', '.join(sorted(known))}.",
            )


def _stage(page: YamlPage) -> Stage:
    """A stage as its file has it, without epochs and rate."""
    nested = "curriculum" in page.values
    root: tuple[Any, ...] = ("curriculum",) if nested else ()
    body = page.values["curriculum"] if nested else page.values
    # A name may stand beside the section as well as in it.
    beside = {key: value for key, value in page.values.items() if nested and key != "curriculum"}
    _refuse_unknown(page, beside, ("name",), ())
    _refuse_unknown(page, body, STAGE_KEYS, root)
    name = body.get("name", beside.get("name", page.file.stem))
    counts = {option: _count(page, root, key, body[key]) for key, option in COUNTS.items() if key in body}
    pairs = {key: body[key] for key in PAIRS if body.get(key) is not None}
    for key, value in pairs.items():
        try:
            read_pairs({key: value})
        except UnknownName as error:
            raise UnknownName(
                f"{page.at(*root, key)}: {error.given}", found=error.found, cure=error.cure
            ) from None
        except WrongUse as error:
            raise WrongUse(
                f"{page.at(*root, key)}: {error.given}", found=error.found, cure=error.cure
            ) from None
    try:
        return Stage(name=str(name), options={**counts, "pairs": pairs})
    except ValueError as error:
        raise WrongUse(
            page.at(*root, "name"), found=str(error), cure="Use letters, digits, - and _."
        ) from None


def _count(page: YamlPage, root: tuple[Any, ...], key: str, value: Any) -> int:
    where = page.at(*root, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongUse(f"{where}: {key}: {value}", found="it is no whole number", cure="Give one from 1 up.")
    if value < 1:
        why = (
            "an anchor is told from its negatives: without one the loss is zero, always"
            if key == "n_negatives"
            else "that leaves no rows to learn from"
        )
        raise WrongUse(f"{where}: {key}: {value}", found=why, cure="Give 1 or more.")
    return value


def _main(page: YamlPage) -> dict[str, Any]:
    """Options of the job that all stages share."""
    flat = _flat(page.values, ())
    known = (*MAIN, *BATCH, *LEFT)
    for path in flat:
        key = ".".join(map(str, path))
        if not any(key == one or key.startswith(f"{one}.") for one in known):
            _refuse_unknown(page, [key], known, ())
    values = {".".join(map(str, path)): value for path, value in flat.items()}
    found: dict[str, Any] = {
        option: _number(page, tuple(key.split(".")), values[key], whole=option in WHOLE)
        for key, option in MAIN.items()
        if values.get(key) is not None
    }
    sizes = [
        int(_number(page, tuple(key.split(".")), values[key], whole=True))
        for key in BATCH
        # auto, -1 and lists of devices say how many there are, which is not the config's to know.
        if key in values and (key != BATCH[-1] or (isinstance(values[key], int) and values[key] > 0))
    ]
    if BATCH[0] in values:
        found["global_batch"] = math.prod(sizes)
    return found


def _flat(section: dict[str, Any], root: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, (*root, key))
        else:
            found[*root, key] = value
    return found


def _number(page: YamlPage, path: tuple[Any, ...], value: Any, *, whole: bool = False) -> float:
    key = ".".join(str(item) for item in path if not isinstance(item, int))
    where = f"{page.at(*path)}: {key}: {value}"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        quoted = " (it is text, in quotes)" if isinstance(value, str) else ""
        kind, such = ("whole number", "8") if whole else ("number", "2e-4")
        raise WrongUse(where, found=f"it is no {kind}{quoted}", cure=f"Write it like {key}: {such}.")
    if value < 0 or (whole and value == 0 and not key.endswith("warmup_steps")):
        raise WrongUse(where, found=f"it is {value}", cure=f"Give {key} a value above 0.")
    return value if whole else float(value)


def _chain(chains: list[YamlPage], found: dict[str, Stage]) -> list[tuple[str, dict[str, Any]]]:
    """Names of stages in order, with epochs and rate of each."""
    page = next((chain for chain in chains if chain.file.stem == "chain_default"), chains[0])
    if len(chains) > 1 and page.file.stem != "chain_default":
        several = ", ".join(chain.file.name for chain in chains)
        raise WrongUse(
            str(page.file.parent),
            found=f"there are several chains: {several}",
            cure="Name one chain_default.yaml.",
        )
    _refuse_unknown(page, page.values, CHAIN_KEYS, ())
    links = page.values.get("stages")
    if not isinstance(links, list) or not links:
        raise WrongUse(
            page.at("stages"), found="there is no list of stages", cure="Write - name: 01_stage ..."
        )
    return [_link(page, number, link, found) for number, link in enumerate(links)]


def _link(page: YamlPage, number: int, link: Any, found: dict[str, Stage]) -> tuple[str, dict[str, Any]]:
    root = ("stages", number)
    given = {"name": link} if isinstance(link, str) else link
    if not isinstance(given, dict) or "name" not in given:
        raise WrongUse(page.at(*root), found="it has no name", cure="Write - name: 01_stage.")
    _refuse_unknown(page, given, LINK_KEYS, root)
    name = str(given["name"])
    if name not in found:
        close = nearest(name, found)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(
            f"{page.at(*root)}: {name}",
            found=f"no file is that stage{meant}",
            cure=f"There are {', '.join(sorted(found))}.",
        )
    own: dict[str, Any] = {}
    if given.get("max_epochs") is not None:
        own["epochs"] = _number(page, (*root, "max_epochs"), given["max_epochs"], whole=True)
    if given.get("learning_rate") is not None:
        own["rate"] = _number(page, (*root, "learning_rate"), given["learning_rate"])
    return name, own


def _linked(found: Stage, shared: dict[str, Any], own: dict[str, Any]) -> Stage:
    options = {**shared, **found.options, **own}
    return found.replace(options=options, epochs=options.get("epochs"), rate=options.get("rate"))
