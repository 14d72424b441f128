"""Every command, put together: importing this module is what makes them known."""

from trimtab.cli import choose, change, foresee, practise  # isort: skip - help lists commands in this order
from trimtab.cli import launch  # isort: skip
from trimtab.cli import jobs  # isort: skip
from trimtab.cli import consult, look  # isort: skip
from trimtab.cli.main import app, main_code

__all__ = [
    "app",
    "change",
    "choose",
    "consult",
    "foresee",
    "jobs",
    "launch",
    "look",
    "main_code",
    "practise",
]
