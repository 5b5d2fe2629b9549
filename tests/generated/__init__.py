"""Random attention modules, and the truth about each: is betahook right about them, or does it leave them alone?

`python -m generated --modules 2000 --seed 0` from `tests` verifies as many and prints what was refused and why.
"""
