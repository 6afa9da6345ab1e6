"""One token of every row of a batch that is decoded: its step in each kind of layer, and the rows' caches."""
