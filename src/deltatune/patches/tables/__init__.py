"""The patches themselves: one table of records for each package, or each kind of operation, that they change."""
