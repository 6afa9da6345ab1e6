"""The trace, which steers a layer's forward from the step around it: frozen, in one context variable."""
