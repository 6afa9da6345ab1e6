"""The records of what is replaced: a table for each package, or for each kind of operation in several packages."""
