"""`python -m trimtab` is the same as `trimtab`."""

from trimtab.cli import run

if __name__ == "__main__":
    run()
