"""What several floors need: errors, text, token scoring, atomic output, progress. Imports no other floor."""
