"""`python -m kvfold.cli`, for where the console script is not on the path."""

from . import main

main()
