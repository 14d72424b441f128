"""A script that needs a package that nobody has."""

import package_that_nobody_has  # noqa: F401
