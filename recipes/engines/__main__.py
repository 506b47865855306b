from .lane import main

main()
