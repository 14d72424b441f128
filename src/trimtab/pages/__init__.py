"""Turn plans and runs into one HTML page: figures, tables and text, nothing fetched."""
