"""From files and data sets on the hub to rows, and from a row of any common format to its messages or text."""
