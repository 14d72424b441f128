"""Every command, put together: importing this module is what makes them known."""

from trimtab.cli import change, choose, foresee, look, practise
from trimtab.cli.main import app, main_code

__all__ = ["app", "change", "choose", "foresee", "look", "main_code", "practise"]
