"""The trace, which tells layers about the step around them, and the dispatch of calls: two frozen records."""
