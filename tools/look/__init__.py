"""Looking at what a run has recorded."""
