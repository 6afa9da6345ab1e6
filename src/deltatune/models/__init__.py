"""Everything that knows upstream models: loading, describing, splitting before the head, writing."""
