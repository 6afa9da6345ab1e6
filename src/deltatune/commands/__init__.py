"""The commands of `deltatune`: one file each, with its flags beside its work."""
