"""What is left to prove: holes, states, steps, and prefixes kept for them.

::

    recipes.py      what a state is, and its id
    holes.py        the holes of a text, and drafts with tactics in them
    steps.py        goals of holes, and tactics tried on them
    prefixes.py     standing processes and snapshots, of what texts begin with
    snapshots.py    snapshots on this disk and in Redis
    targets.py      what candidates are verified against
    completions.py  what models write, made into texts
    answers.py      the blocks of it that may be code
"""
