"""Lean: environments, drivers, and all that runs beside a candidate.

A file imports from those above it in this list, and from its own room. ``environment.py`` and run/
stand on one floor: it opens an environment by what run/ knows of files and toolchains::

    text.py           as much of a Lean text as can be read without Lean
    sandbox/          supervisors, walls, limits
    outcome.py        what Lean printed and how it ended, as a verdict
    environment.py    what a check can import, its fingerprint, and whether it was written to
    run/              a text through Lean: toolchains, compiled files, processes, forks
    judge/            what is held against Lean's own word: accepted means proved
    goals/            holes, states, steps, prefixes; targets and completions
    driver.py         what turns an operation into Lean's answer: by Lean, or as an echo
"""
