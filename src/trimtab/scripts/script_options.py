"""Read which options a training script has from its source, without running it.

Understood are argparse, click, typer, fire, absl, dataclasses of HfArgumentParser, TrlParser, simple-parsing
and tyro, the globals of a nanoGPT-style `configurator.py`, minGPT's CfgNode, Hydra configs and environment
variables that the script reads.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from trimtab.spec.base import Noun

Sources = Mapping[str, str]
"""Text of the script and of the local modules that it imports, by path; the script first."""


class OptionForm(StrEnum):
    """How an option is written on the command line."""

    FLAG = "flag"
    """--name value, or --name=value."""
    JOINED = "joined"
    """--name=value; the script does not understand it in two words."""
    KEY = "key"
    """name=value."""
    VARIABLE = "variable"
    """An environment variable."""
    CONFIG = "config"
    """A key of a config file that nothing on the command line overrides."""


class OptionValue(StrEnum):
    """What values an option takes."""

    TEXT = "text"
    INTEGER = "integer"
    SWITCH = "switch"
    """No value: it is on if it is there."""
    PAIR = "pair"
    """--name or --no-name."""
    BOOLEAN = "boolean"
    """true or false."""
    OPTIONAL_BOOLEAN = "optional-boolean"
    """--name alone, or with true or false."""


class ScriptOption(Noun, frozen=True, kw_only=True):
    """An option of a training script."""

    names: tuple[str, ...]
    """As typed: --batch-size and -b, or batch_size for name=value and for variables."""
    off_name: str = ""
    """--no-name, if it is a pair."""
    form: OptionForm = OptionForm.FLAG
    value: OptionValue = OptionValue.TEXT
    default: str | None = None
    """None if there is no default, or it is computed."""
    choices: tuple[str, ...] = ()
    help: str = ""
    where: str = ""
    """File and line."""
    variable: str = ""
    """The attribute or name that holds it in the script."""
    file: str = ""
    """The config file that sets it, as the command names it; empty if none does."""
    key: tuple[str | int, ...] = ()
    """Where it is in the file, from the outside in."""
    in_file: Any = None
    """Its value in the file; None if the file does not have it yet."""

    def faults(self) -> list[str]:
        """Check that it has a name."""
        return [] if self.names and all(self.names) else ["an option has no name"]

    @property
    def name(self) -> str:
        """The name to show: the first long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


TRANSFORMERS_CLASSES = r"(?:Seq2Seq)?TrainingArguments"
TRL_CLASSES = r"(?:SFT|DPO|KTO|ORPO|CPO|GRPO|PPO|RLOO|Reward|GKD|BCO)Config"
"""Classes that hold per_device_train_batch_size and the like."""
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_DATACLASS_PARSERS = {"HfArgumentParser", "TrlParser", "add_arguments", "cli", "parse"}
_ENVIRONMENT = {"environ.get", "getenv", "environ.setdefault"}


def read_options(sources: Sources, config_files: Sequence[str] = ()) -> tuple[ScriptOption, ...]:
    r"""Return the options of a script, each once; a file that is not Python is left out.

    `config_files` are files of `sources` that the command names, in the order in which they count.

    >>> text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('-b', type=int, default=8)"
    >>> [(option.names, option.default) for option in read_options({"train.py": text})]
    [(('-b',), '8')]
    """
    files = [ScriptFile(path, text) for path, text in sources.items() if not path.endswith(_CONFIGS)]
    options: dict[tuple[str, ...], ScriptOption] = {}
    for file in files:
        readers: list[Callable[[ScriptFile], Iterator[ScriptOption]]] = [
            _read_calls,
            _read_click,
            _read_functions,
            _read_environment,
        ]
        if file is files[0]:
            readers.append(_read_globals)
        for reader in readers:
            for option in reader(file):
                options.setdefault(option.names, option)
    for option in (*_read_dataclasses(files), *_read_cfg_nodes(files), *_read_hydra(files, sources)):
        options.setdefault(option.names, option)
    changed = {name: value for file in files for name, value in _read_set_defaults(file)}
    in_files: dict[str, dict[str, Any]] = {}
    if files and "configurator.py" in files[0].text:
        for path in config_files:
            if path.endswith(".py") and path in sources:
                values = ScriptFile(path, sources[path]).constants
                changed |= {name: str(value) for name, value in values.items()}
                in_files |= {
                    name: {"file": path, "key": (name,), "in_file": value} for name, value in values.items()
                }
    return tuple(
        option.replace(default=changed[option.variable], **in_files.get(option.variable, {}))
        if option.variable in changed
        else option
        for option in options.values()
    )


def find_families(sources: Sources) -> frozenset[str]:
    """Return the frameworks whose options the script takes: transformers, lightning, accelerate, hydra..."""
    text = "\n".join(sources.values())
    marks = {
        "lightning": r"\bLightningCLI\b",
        "hydra": r"@hydra\.main|OmegaConf\.from_cli",
        "split batches": r"split_batches\s*=\s*True",
    }
    families = {name for name, mark in marks.items() if re.search(mark, text)}
    parsed = " ".join(re.findall(r"(?:HfArgumentParser|TrlParser)\s*\(([^)]*)\)", text))
    if parsed and not re.search(r"\b[A-Z]\w+", parsed):
        # The classes are in a variable.
        parsed = text
    for name, classes in (("transformers", TRANSFORMERS_CLASSES), ("trl", TRL_CLASSES)):
        # A subclass that is defined in the script has all options too.
        own = re.findall(rf"class\s+(\w+)\s*\([^)]*\b{classes}\b[^)]*\)", text)
        if re.search(rf"\b(?:{'|'.join([classes, *own])})\b", parsed):
            families.add(name)
    return frozenset(families)


def is_divided_by_ranks(variable: str, sources: Sources) -> str:
    """Return the line where the script divides a value by the number of GPUs or processes; empty if nowhere.

    >>> is_divided_by_ranks("batch_size", {"a.py": "args.batch_size = int(args.batch_size / ngpus_per_node)"})
    'a.py:1'
    """
    for path, text in sources.items():
        tree = ScriptFile(path, text).tree
        for node in ast.walk(tree):
            left, right = None, None
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
                left, right = node.left, node.right
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.FloorDiv):
                left, right = node.target, node.value
            if left is None or right is None or _last_name(left) != variable:
                continue
            divisor = ast.unparse(right).lower()
            if re.search(
                r"world|n_?gpu|num_gpus|gpu_count|device_count|num_processes|replicas|n_devices", divisor
            ):
                return f"{path}:{node.lineno}"  # type: ignore[attr-defined]
    return ""


def find_assignments(names: frozenset[str], sources: Sources) -> dict[str, tuple[str, str]]:
    """Return where a script sets a name to a constant: by name in small letters, its text and place."""
    assigned: dict[str, tuple[str, str]] = {}
    for path, text in sources.items():
        file = ScriptFile(path, text)
        for node in ast.walk(file.tree):
            pairs: list[tuple[str, ast.expr]] = []
            if isinstance(node, ast.Assign):
                pairs = [(_last_name(target), node.value) for target in node.targets]
            elif isinstance(node, ast.Dict):
                keys = [file.constant(key) for key in node.keys]
                pairs = [
                    (key, value) for key, value in zip(keys, node.values, strict=True) if isinstance(key, str)
                ]
            elif isinstance(node, ast.Call):
                pairs = [(word.arg, word.value) for word in node.keywords if word.arg]
            for name, value in pairs:
                constant = file.constant(value)
                lower = name.lower()
                if lower in names and isinstance(constant, int | str) and lower not in assigned:
                    assigned[lower] = (f"{name} = {constant}", f"{path}:{value.lineno}")
    return assigned


class ScriptFile:
    """A file of a script, parsed; an empty tree if it is not Python."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        try:
            self.tree = ast.parse("" if path.endswith(_CONFIGS) else text)
        except (SyntaxError, ValueError, RecursionError):
            self.tree = ast.Module(body=[], type_ignores=[])
        self.constants: dict[str, Any] = {}
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(target, ast.Name) and value is not None:
                constant = self.constant(value)
                if constant is not _UNKNOWN:
                    self.constants[target.id] = constant

    def place(self, node: Any) -> str:
        """Return file and line of a node."""
        return f"{self.path}:{node.lineno}"

    def constant(self, node: ast.expr | None) -> Any:
        """Return the value of a constant expression; `_UNKNOWN` if it is computed."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.constants.get(node.id, _UNKNOWN)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.constant(node.left), self.constant(node.right)
            if type(left) in (int, float) and type(right) in (int, float):
                try:
                    return _ARITHMETIC[type(node.op)](left, right)
                except (ArithmeticError, ValueError):
                    return _UNKNOWN
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items = [self.constant(item) for item in node.elts]
            return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
        return _UNKNOWN


_UNKNOWN: Any = object()
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}


def _last_name(node: ast.expr | None) -> str:
    """Return the last part of a name: batch_size of args.batch_size, and of int(args.batch_size)."""
    if isinstance(node, ast.Call) and node.args:
        return _last_name(node.args[0])
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.id if isinstance(node, ast.Name) else ""


def _text_of(value: Any) -> str | None:
    """Return a default as it would be typed; None for no or a computed default."""
    return None if value is None or value is _UNKNOWN else str(value)


def _value_of_type(name: str, default: Any) -> OptionValue:
    if name == "bool" or "bool" in name.lower() or (not name and isinstance(default, bool)):
        return OptionValue.BOOLEAN
    if name == "int" or (not name and isinstance(default, int)):
        return OptionValue.INTEGER
    return OptionValue.TEXT


def _read_calls(file: ScriptFile) -> Iterator[ScriptOption]:
    """Yield the options of argparse (`add_argument`) and absl (`DEFINE_integer`)."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call):
            continue
        called = _last_attribute(node.func)
        words = [value for value in map(file.constant, node.args) if isinstance(value, str)]
        if called in ("add_argument", "add_arg", "arg") and words and words[0].startswith("-"):
            yield _argparse_option(file, node, tuple(word for word in words if word.startswith("-")))
        elif called.startswith("DEFINE_") and words:
            kind = called.removeprefix("DEFINE_")
            default = file.constant(node.args[1]) if len(node.args) > 1 else None
            value = {"integer": OptionValue.INTEGER, "bool": OptionValue.PAIR, "boolean": OptionValue.PAIR}
            yield ScriptOption(
                names=(f"--{words[0]}", f"-{words[0]}"),
                off_name=f"--no{words[0]}" if kind.startswith("bool") else "",
                value=value.get(kind, OptionValue.TEXT),
                default=_text_of(default),
                help=words[-1] if len(words) > 1 else "",
                where=file.place(node),
                variable=words[0],
            )


def _argparse_option(file: ScriptFile, node: ast.Call, names: tuple[str, ...]) -> ScriptOption:
    keywords = {word.arg: word.value for word in node.keywords if word.arg}
    action = keywords.get("action")
    action_name = file.constant(action) if isinstance(action, ast.Constant) else _last_attribute(action)
    default = file.constant(keywords.get("default", ast.Constant(value=None)))
    kind = _last_attribute(keywords.get("type"))
    choices = file.constant(keywords.get("choices"))
    long = next((name for name in names if name.startswith("--")), names[0])
    variable = file.constant(keywords.get("dest"))
    if not isinstance(variable, str):
        variable = long.lstrip("-").replace("-", "_")
    value = _value_of_type(kind, default if "type" not in keywords else None)
    off_name = ""
    if action_name in ("store_true", "store_false"):
        value, default = OptionValue.SWITCH, False
    elif action_name == "BooleanOptionalAction":
        value, off_name = OptionValue.PAIR, f"--no-{long.removeprefix('--')}"
    elif value is OptionValue.BOOLEAN and file.constant(keywords.get("nargs")) == "?":
        value = OptionValue.OPTIONAL_BOOLEAN
    elif value is OptionValue.BOOLEAN and kind == "bool":
        # argparse's type=bool takes every text but the empty one for true.
        value = OptionValue.TEXT
    elif value is OptionValue.BOOLEAN and "type" not in keywords:
        # Without a type argparse gives the script the text that was typed.
        value = OptionValue.TEXT
    return ScriptOption(
        names=names,
        off_name=off_name,
        value=value,
        default=_text_of(default),
        choices=tuple(map(str, choices)) if isinstance(choices, list) else (),
        help=_help_text(file, keywords.get("help")),
        where=file.place(node),
        variable=variable,
    )


def _help_text(file: ScriptFile, node: ast.expr | None) -> str:
    """Return the constant pieces of a help text."""
    if isinstance(node, ast.BinOp):
        return _help_text(file, node.left) + _help_text(file, node.right)
    text = file.constant(node)
    return " ".join(text.split()) if isinstance(text, str) else ""


def _last_attribute(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _read_click(file: ScriptFile) -> Iterator[ScriptOption]:
    """Yield the options of click's decorators."""
    for function in ast.walk(file.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in function.decorator_list:
            if not (isinstance(node, ast.Call) and _last_attribute(node.func) == "option"):
                continue
            words = [word for word in map(file.constant, node.args) if isinstance(word, str)]
            if not any(word.startswith("-") for word in words):
                continue
            keywords = {word.arg: word.value for word in node.keywords if word.arg}
            default = file.constant(keywords.get("default", ast.Constant(value=None)))
            flags = [word for word in words if word.startswith("-")]
            is_flag = file.constant(keywords.get("is_flag")) is True
            off = next((word.partition("/")[2].strip() for word in flags if "/" in word), "")
            names = tuple(word.partition("/")[0].strip() for word in flags)
            value = _value_of_type(_last_attribute(keywords.get("type")), default)
            if off:
                value = OptionValue.PAIR
            elif is_flag:
                value = OptionValue.SWITCH
            long = next((name for name in names if name.startswith("--")), names[0])
            yield ScriptOption(
                names=names,
                off_name=off,
                value=value,
                default=_text_of(default if default is not None else False if is_flag else None),
                choices=_click_choices(file, keywords.get("type")),
                help=_help_text(file, keywords.get("help")),
                where=file.place(node),
                variable=long.lstrip("-").replace("-", "_"),
            )


def _click_choices(file: ScriptFile, node: ast.expr | None) -> tuple[str, ...]:
    if isinstance(node, ast.Call) and _last_attribute(node.func) == "Choice" and node.args:
        choices = file.constant(node.args[0])
        return tuple(map(str, choices)) if isinstance(choices, list) else ()
    return ()


def _read_functions(file: ScriptFile) -> Iterator[ScriptOption]:
    """Yield the parameters of functions that fire or typer calls."""
    called: dict[str, str] = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name):
            call = ast.unparse(node.func)
            style = {"fire.Fire": "fire", "Fire": "fire", "typer.run": "typer", "CLI": "cli"}.get(call)
            style = "cli" if call.endswith("tyro.cli") else style
            if style:
                called[node.args[0].id] = style
    uses_typer = bool(re.search(r"^\s*(?:import|from)\s+typer\b", file.text, re.MULTILINE))
    for function in file.tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        style = called.get(function.name, "")
        if uses_typer and any(
            ast.unparse(node).endswith(("command()", "callback()")) for node in function.decorator_list
        ):
            style = "typer"
        if style:
            yield from _function_options(file, function, style)


def _function_options(file: ScriptFile, function: ast.FunctionDef, style: str) -> Iterator[ScriptOption]:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    positional = [None] * (len(function.args.args) - len(function.args.defaults)) + list(
        function.args.defaults
    )
    defaults = [*positional, *function.args.kw_defaults]
    for argument, node in zip(arguments, defaults, strict=True):
        if node is None:
            continue
        annotation = argument.annotation
        option = node if isinstance(node, ast.Call) else _annotated_option(annotation)
        default = file.constant(node)
        names: list[str] = []
        help_text = off = ""
        if option is not None and _last_attribute(option.func) == "Option":
            words = [file.constant(word) for word in option.args]
            names = [word for word in words if isinstance(word, str) and word.startswith("-")]
            off = next((word.partition("/")[2].strip() for word in names if "/" in word), "")
            names = [word.partition("/")[0].strip() for word in names]
            if option is node:
                default = words[0] if words and words[0] not in names else None
            keywords = {word.arg: word.value for word in option.keywords if word.arg}
            default = file.constant(keywords["default"]) if "default" in keywords else default
            help_text = _help_text(file, keywords.get("help"))
        kind = _type_name(annotation)
        value = _value_of_type(kind, default)
        dashed = argument.arg.replace("_", "-")
        if style == "fire":
            names = [f"--{argument.arg}", f"--{dashed}"] if dashed != argument.arg else [f"--{argument.arg}"]
        elif value is OptionValue.BOOLEAN and style in ("typer", "cli"):
            value, off = OptionValue.PAIR, off or f"--no-{dashed}"
        yield ScriptOption(
            names=tuple(names) or (f"--{dashed}",),
            off_name=off,
            form=OptionForm.JOINED if style == "fire" else OptionForm.FLAG,
            value=value,
            default=_text_of(default),
            help=help_text,
            where=file.place(argument),
            variable=argument.arg,
        )


def _annotated_option(annotation: ast.expr | None) -> ast.Call | None:
    if isinstance(annotation, ast.Subscript) and _last_attribute(annotation.value) == "Annotated":
        return next((node for node in ast.walk(annotation.slice) if isinstance(node, ast.Call)), None)
    return None


def _type_name(annotation: ast.expr | None) -> str:
    """Return int, bool, str or float of an annotation such as int | None."""
    text = ast.unparse(annotation) if annotation is not None else ""
    return next((name for name in ("bool", "int", "float", "str") if re.search(rf"\b{name}\b", text)), "")


def _read_dataclasses(files: list[ScriptFile]) -> Iterator[ScriptOption]:
    """Yield the fields of dataclasses that a parser of dataclasses is given."""
    classes = {
        node.name: (file, node) for file in files for node in file.tree.body if isinstance(node, ast.ClassDef)
    }
    for file in files:
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Call) or _last_attribute(node.func) not in _DATACLASS_PARSERS:
                continue
            style = ast.unparse(node.func)
            is_tyro = style.endswith("tyro.cli")
            for name in (
                inner.id for word in node.args for inner in ast.walk(word) if isinstance(inner, ast.Name)
            ):
                if name in classes:
                    yield from _class_options(*classes[name], classes, is_tyro=is_tyro)


def _class_options(
    file: ScriptFile, node: ast.ClassDef, classes: Mapping[str, Any], *, is_tyro: bool
) -> Iterator[ScriptOption]:
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes and base.id != node.name:
            inherited, parent = classes[base.id]
            yield from _class_options(inherited, parent, classes, is_tyro=is_tyro)
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, default, help_text = field.target.id, _UNKNOWN, ""
        if isinstance(field.value, ast.Call):
            keywords = {word.arg: word.value for word in field.value.keywords if word.arg}
            default = file.constant(keywords.get("default"))
            texts = ast.walk(keywords["metadata"]) if "metadata" in keywords else iter(())
            help_text = " ".join(str(text.value) for text in texts if isinstance(text, ast.Constant))
            help_text = help_text or _help_text(file, keywords.get("help"))
        elif field.value is not None:
            default = file.constant(field.value)
        value, off = _value_of_type(_type_name(field.annotation), default), ""
        dashed = name.replace("_", "-")
        if value is OptionValue.BOOLEAN:
            value = OptionValue.PAIR if is_tyro else OptionValue.OPTIONAL_BOOLEAN
            off = f"--no-{dashed}" if is_tyro else ""
        names = [f"--{dashed}"] if is_tyro else [f"--{name}"]
        yield ScriptOption(
            names=tuple(dict.fromkeys((*names, f"--{name}", f"--{dashed}"))),
            off_name=off,
            value=value,
            default=_text_of(default),
            help=help_text,
            where=file.place(field),
            variable=name,
        )


def _read_globals(file: ScriptFile) -> Iterator[ScriptOption]:
    """Yield the globals that nanoGPT's configurator.py overrides with --name=value."""
    if "configurator.py" not in file.text:
        return
    for node in file.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Name) or not isinstance(node, ast.Assign) or target.id.startswith("_"):
            continue
        default = sample = file.constants.get(target.id)
        if isinstance(node.value, ast.IfExp):
            # The type is known, and which of the two values it has is not.
            sample = file.constant(node.value.body)
        if isinstance(sample, bool | int | float | str):
            yield ScriptOption(
                names=(f"--{target.id}",),
                form=OptionForm.JOINED,
                value=_value_of_type("", sample),
                default=_text_of(default),
                help=_comment_of(file, node.lineno),
                where=file.place(node),
                variable=target.id,
            )


def _comment_of(file: ScriptFile, line: int) -> str:
    return file.text.splitlines()[line - 1].partition("#")[2].strip()


def _read_environment(file: ScriptFile) -> Iterator[ScriptOption]:
    """Yield the environment variables that a script reads."""
    for node in ast.walk(file.tree):
        name, default = None, None
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(tuple(_ENVIRONMENT)) and node.args:
            name = file.constant(node.args[0])
            default = file.constant(node.args[1]) if len(node.args) > 1 else None
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            name = file.constant(node.slice)
        if isinstance(name, str) and name:
            yield ScriptOption(
                names=(name,),
                form=OptionForm.VARIABLE,
                value=OptionValue.TEXT,
                default=_text_of(default),
                where=file.place(node),
                variable=name,
            )


def _read_cfg_nodes(files: list[ScriptFile]) -> Iterator[ScriptOption]:
    """Yield the keys of minGPT's CfgNode, which --trainer.batch_size=32 overrides."""
    if not any("merge_from_args(" in file.text for file in files):
        return
    builders = {
        node.name: (file, function)
        for file in files
        for node in file.tree.body
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "get_default_config"
    }
    for node in (node for file in files for node in ast.walk(file.tree)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        call = ast.unparse(node.value.func)
        if not call.endswith(".get_default_config") or not isinstance(node.targets[0], ast.Attribute):
            continue
        file, function = builders.get(call.split(".")[-2], (None, None))
        for line in ast.walk(function) if function is not None and file is not None else ():
            target = line.targets[0] if isinstance(line, ast.Assign) else None
            default = file.constant(line.value) if isinstance(line, ast.Assign) and file else _UNKNOWN
            if isinstance(target, ast.Attribute) and default is not _UNKNOWN:
                yield ScriptOption(
                    names=(f"--{node.targets[0].attr}.{target.attr}",),
                    form=OptionForm.JOINED,
                    value=_value_of_type("", default),
                    default=_text_of(default),
                    where=file.place(line) if file else "",
                    variable=target.attr,
                )


def _read_hydra(files: list[ScriptFile], sources: Sources) -> Iterator[ScriptOption]:
    """Yield the keys of a Hydra config and of the groups that it chooses, as name=value overrides them."""
    if not any("@hydra.main" in file.text for file in files):
        return
    import yaml

    configs = [path for path in sources if path.endswith((".yaml", ".yml"))]
    # The main config is in the outermost folder.
    root = min(
        (PurePath(path).parent for path in configs), key=lambda path: len(path.parts), default=PurePath()
    )
    for path in configs:
        try:
            content = yaml.safe_load(sources[path])
        except yaml.YAMLError:
            continue
        section = find_hydra_section(path, sources[path], root)
        for key, value in _flat_keys(content):
            if not isinstance(value, bool | int | float | str) or "${" in str(value):
                continue
            name = ".".join((*section, *key))
            yield ScriptOption(
                names=(name,),
                form=OptionForm.KEY,
                value=_value_of_type("", value),
                default=str(value),
                where=path,
                variable=key[-1],
                file=path,
                key=key,
                in_file=value,
            )


def find_hydra_section(path: str, text: str, root: PurePath) -> tuple[str, ...]:
    """Return where the keys of a Hydra config go: by its folder, or by its @package line.

    >>> find_hydra_section("conf/model/small.yaml", "width: 8", PurePath("conf"))
    ('model',)
    """
    package = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    if package is not None and package[1] != "_group_":
        return () if package[1] == "_global_" else tuple(package[1].split("."))
    folder = PurePath(path).parent
    return folder.relative_to(root).parts if folder.is_relative_to(root) else ()


def _flat_keys(content: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            if key != "defaults":
                yield from _flat_keys(value, (*above, str(key)))
    elif above:
        yield above, content


def _read_set_defaults(file: ScriptFile) -> Iterator[tuple[str, str]]:
    """Yield what `parser.set_defaults(name=value)` sets."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and _last_attribute(node.func) == "set_defaults":
            for word in node.keywords:
                value = _text_of(file.constant(word.value))
                if word.arg and value is not None:
                    yield word.arg, value
