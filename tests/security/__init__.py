"""What SECURITY.md promises, held against hostile files, and against the source itself."""
