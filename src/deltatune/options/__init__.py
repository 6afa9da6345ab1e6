"""Every option, with its one default, its range and its words, and the reading of files that hold options."""
