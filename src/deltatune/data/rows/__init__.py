"""From files and data sets on the hub to rows, and from a row of any common format to what it says."""
