"""Images and videos of a data set: found in the rows, opened, and turned into tokens and patches."""
