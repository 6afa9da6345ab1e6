"""The commands of `deltatune`. Each has one file, which holds its flags and what it does."""
