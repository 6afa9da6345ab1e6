"""What a layer's forward is told by the step around it: one frozen trace in one context variable."""
