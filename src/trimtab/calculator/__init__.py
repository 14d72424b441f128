"""The calculator in the browser: `trimtab explore`."""
