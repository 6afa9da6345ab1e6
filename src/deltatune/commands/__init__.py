"""The commands of `deltatune`. Each has one file, with its flags and its function."""
