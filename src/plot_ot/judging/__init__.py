"""What test banks say about a handle: intervals, controls, the verdict."""
