"""Hostile files: whatever stands in a file that kvfold reads, it is read or refused in a line.

`targets` names the readers, `mutate` makes hostile files of good ones, `limits` says what a reader may do. The tests
try each of them for a second; ``python -m tests.fuzz TARGET`` for as long as one likes, guided by coverage where
atheris is installed.
"""
