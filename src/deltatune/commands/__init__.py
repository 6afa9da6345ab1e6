"""The commands of `deltatune`: one file each, with its words in the list of commands, its flags and its function."""
