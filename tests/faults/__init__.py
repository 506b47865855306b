"""Faults of machine and user, thrown at every command that writes: see `__main__`.

A trial starts a command in a fork of a process that has imported all of kvfold (`forks`), lets something happen to it,
mostly at one of the calls that change a file (`events`, `kinds`), and holds what is left against an undisturbed run
(`trial`, `scenarios`).
"""
