"""The records of functions to replace: a table for each package, or for each kind of operation in several packages."""
