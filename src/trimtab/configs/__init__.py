"""Config files of users: read with the place of every value, edited in place, backed up and put back."""
