"""The charts of a report."""
