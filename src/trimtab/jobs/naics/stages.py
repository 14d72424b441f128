"""Read the curriculum of naics from YAML: a main config, a file per stage, and a chain with their order.

    FOLDER/config.yaml                     sizes, rates and the global batch that all stages share
    FOLDER/curriculum/01_stage.yaml        conditions on positives and negatives, and their numbers
    FOLDER/curriculum/chain_default.yaml   the order, with epochs and learning rate of each

Files are recognised by their keys, so folders and files may have other names. Unknown keys are errors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import UnknownName, WrongUse, find_nearest
from trimtab.jobs.naics.pairs import Pairs, read_pairs
from trimtab.jobs.yaml_files import read_yaml
from trimtab.spec.plan import Stage

if TYPE_CHECKING:
    from collections.abc import Collection

    from trimtab.jobs.yaml_files import YamlPage

SHIPPED = Path(__file__).parent / "conf"
PAIRS = Pairs.__struct_fields__
COUNTS = {"n_positives": "positives", "n_negatives": "negatives"}
BATCH_KEYS = ("batch_size", "accumulate_grad_batches")
"""Keys that `trimtab apply` writes into a stage for other trainers; ignored here: every stage is planned."""
STAGE_KEYS = ("name", *PAIRS, *COUNTS, *BATCH_KEYS)
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
GLOBAL_BATCH_KEYS = (
    "data_loader.batch_size",
    "training.trainer.accumulate_grad_batches",
    "training.trainer.devices",
)
"""Keys whose product is the global batch."""
IGNORED_KEYS = (
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
"""Keys of another trainer or of the plan: accepted and not used."""
INTEGER_OPTIONS = ("rank", "experts", "favourites", "expert_width", "epochs", "warmup")


def read_stages(folder: str) -> tuple[Stage, ...]:
    """Return the stages of a folder in order; the built-in ones without a folder."""
    main, files, chains = _classify_files(Path(folder) if folder else SHIPPED)
    shared = {} if main is None else _read_main(main)
    stages = {stage.name: stage for stage in map(_read_stage, files)}
    if len(stages) < len(files):
        names = [_read_stage(file).name for file in files]
        duplicate = next(name for name in names if names.count(name) > 1)
        both = " and ".join(str(file.file) for file in files if _read_stage(file).name == duplicate)
        raise WrongUse(
            f"stage {duplicate}", found=f"{both} both have this name", cure="Give one another name."
        )
    links = _read_chain(chains, stages) if chains else [(name, {}) for name in sorted(stages)]
    return tuple(_merge_options(stages[name], shared, own) for name, own in links)


def find_stage(given: str, among: tuple[Stage, ...]) -> Stage:
    """Return a stage by its name or the start of its name.

    >>> find_stage("02", read_stages("")).options["negatives"]
    8
    """
    matches = [stage for stage in among if stage.name == given] or [
        stage for stage in among if given and stage.name.startswith(given)
    ]
    if len(matches) != 1:
        names = [stage.name for stage in among]
        close = find_nearest(given, names)
        meant = f"; did you mean {close[0]}?" if close and not matches else ""
        how = "several start with it" if matches else "there is none of that name"
        raise UnknownName(f"stage {given!r}", found=f"{how}{meant}", cure=f"There are {', '.join(names)}.")
    return matches[0]


def _classify_files(folder: Path) -> tuple[YamlPage | None, list[YamlPage], list[YamlPage]]:
    """Return the main config, the stage files sorted by name, and the chains of a folder."""
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is no such folder"
        raise WrongUse(f"--stages {folder}", found=found, cure="Name a folder with stage files below it.")
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")]
    files = [path for place in places for path in sorted(place.iterdir()) if path.suffix in (".yaml", ".yml")]
    pages = [read_yaml(file) for file in files]
    kinds: dict[str, list[YamlPage]] = {"main": [], "stage": [], "chain": [], "other": []}
    for page in pages:
        kinds[_file_kind(page)].append(page)
    stage_folders = {page.file.parent for page in kinds["stage"]} - {folder}
    stray = next((page for page in kinds["other"] if page.file.parent in stage_folders), None)
    if stray is not None:
        raise WrongUse(
            str(stray.file),
            found="it is in a folder of stages, but is neither a stage nor a chain",
            cure=f"A stage has {', '.join(COUNTS)}, and a chain has stages. Move anything else away.",
        )
    if not kinds["stage"]:
        raise WrongUse(
            f"--stages {folder}",
            found=f"none of its {len(files)} YAML files has a key of a stage, such as n_negatives",
            cure="Name a folder with files such as curriculum/01_stage.yaml.",
        )
    if len(kinds["main"]) > 1:
        both = " and ".join(str(page.file) for page in kinds["main"][:2])
        raise WrongUse(f"--stages {folder}", found=f"{both} are both main configs", cure="Keep one of them.")
    return next(iter(kinds["main"]), None), kinds["stage"], kinds["chain"]


def _file_kind(page: YamlPage) -> str:
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
            close = find_nearest(key, known)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UnknownName(
                page.at(*root, *key.split(".")),
                found=f"there is no key {key}{meant}",
                cure=f"There are {', '.join(sorted(known))}.",
            )


def _read_stage(page: YamlPage) -> Stage:
    """Read the stage of a file, without epochs and rate."""
    nested = "curriculum" in page.values
    root: tuple[Any, ...] = ("curriculum",) if nested else ()
    body = page.values["curriculum"] if nested else page.values
    # The name may be next to the section or in it.
    outer = {key: value for key, value in page.values.items() if nested and key != "curriculum"}
    _refuse_unknown(page, outer, ("name",), ())
    _refuse_unknown(page, body, STAGE_KEYS, root)
    name = body.get("name", outer.get("name", page.file.stem))
    counts = {
        option: _parse_count(page, root, key, body[key]) for key, option in COUNTS.items() if key in body
    }
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


def _parse_count(page: YamlPage, root: tuple[Any, ...], key: str, value: Any) -> int:
    where = page.at(*root, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongUse(
            f"{where}: {key}: {value}", found="it is not a whole number", cure="Give one from 1 up."
        )
    if value < 1:
        why = (
            "at least one negative is needed; without it the loss is always zero"
            if key == "n_negatives"
            else "that leaves no rows to learn from"
        )
        raise WrongUse(f"{where}: {key}: {value}", found=why, cure="Give 1 or more.")
    return value


def _read_main(page: YamlPage) -> dict[str, Any]:
    """Return the options that all stages share."""
    flat = _flatten(page.values, ())
    accepted = (*MAIN, *GLOBAL_BATCH_KEYS, *IGNORED_KEYS)
    for path in flat:
        key = ".".join(map(str, path))
        if not any(key == known or key.startswith(f"{known}.") for known in accepted):
            _refuse_unknown(page, [key], accepted, ())
    values = {".".join(map(str, path)): value for path, value in flat.items()}
    options: dict[str, Any] = {
        option: _parse_number(page, tuple(key.split(".")), values[key], whole=option in INTEGER_OPTIONS)
        for key, option in MAIN.items()
        if values.get(key) is not None
    }
    sizes = [
        int(_parse_number(page, tuple(key.split(".")), values[key], whole=True))
        for key in GLOBAL_BATCH_KEYS
        # auto, -1 and lists of devices do not give a number of devices.
        if key in values
        and (key != GLOBAL_BATCH_KEYS[-1] or (isinstance(values[key], int) and values[key] > 0))
    ]
    if GLOBAL_BATCH_KEYS[0] in values:
        options["global_batch"] = math.prod(sizes)
    return options


def _flatten(section: dict[str, Any], root: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, (*root, key))
        else:
            flat[*root, key] = value
    return flat


def _parse_number(page: YamlPage, path: tuple[Any, ...], value: Any, *, whole: bool = False) -> float:
    key = ".".join(str(item) for item in path if not isinstance(item, int))
    where = f"{page.at(*path)}: {key}: {value}"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        quoted = " (it is text, in quotes)" if isinstance(value, str) else ""
        kind, such = ("whole number", "8") if whole else ("number", "2e-4")
        raise WrongUse(where, found=f"it is not a {kind}{quoted}", cure=f"Write it like {key}: {such}.")
    if value < 0 or (whole and value == 0 and not key.endswith("warmup_steps")):
        raise WrongUse(where, found=f"it is {value}", cure=f"Give {key} a value above 0.")
    return value if whole else float(value)


def _read_chain(chains: list[YamlPage], stages: dict[str, Stage]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names of stages in order, with epochs and rate of each."""
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
    return [_read_link(page, number, link, stages) for number, link in enumerate(links)]


def _read_link(
    page: YamlPage, number: int, link: Any, stages: dict[str, Stage]
) -> tuple[str, dict[str, Any]]:
    root = ("stages", number)
    given = {"name": link} if isinstance(link, str) else link
    if not isinstance(given, dict) or "name" not in given:
        raise WrongUse(page.at(*root), found="it has no name", cure="Write - name: 01_stage.")
    _refuse_unknown(page, given, LINK_KEYS, root)
    name = str(given["name"])
    if name not in stages:
        close = find_nearest(name, stages)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UnknownName(
            f"{page.at(*root)}: {name}",
            found=f"no file has that stage{meant}",
            cure=f"There are {', '.join(sorted(stages))}.",
        )
    own: dict[str, Any] = {}
    if given.get("max_epochs") is not None:
        own["epochs"] = _parse_number(page, (*root, "max_epochs"), given["max_epochs"], whole=True)
    if given.get("learning_rate") is not None:
        own["rate"] = _parse_number(page, (*root, "learning_rate"), given["learning_rate"])
    return name, own


def _merge_options(stage: Stage, shared: dict[str, Any], own: dict[str, Any]) -> Stage:
    options = {**shared, **stage.options, **own}
    return stage.replace(options=options, epochs=options.get("epochs"), rate=options.get("rate"))
