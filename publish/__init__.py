"""To the Hub: what goes into a repository, the card that describes it, and the upload."""
