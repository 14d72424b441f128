"""Every command, put together: importing this module is what makes them known."""

from trimtab.cli import change, choose, consult, foresee, look, practise
from trimtab.cli.main import app, main_code

__all__ = ["app", "change", "choose", "consult", "foresee", "look", "main_code", "practise"]
