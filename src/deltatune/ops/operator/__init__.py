"""Whether implementations are right and fast on this machine: cases, the measure of error, verdicts, the choice."""
